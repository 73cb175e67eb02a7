"""Diagnose failing kernels at the end of a run: name the planted bugs that their failures resemble.

The error sizes of a failing kernel on a fixed set of cases are its signature. The signatures of planted bugs (known
small mistakes in correct kernels) are stored, and the most similar ones are shown in the report.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from conformance.contract import Implementation
from conformance.judging.failure_probes.probe_budget import ProbeBudget
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.records import ERROR, FAIL, Record, RunInfo
from conformance.sensitivity import diagnosis, failure_signatures
from conformance.sensitivity.diagnosis import Similarity
from conformance.session.probes.signature_completion import complete_signature
from reports.causes import root_causes
from reports.causes.case_levels import Level, find_levels
from reports.record_groups import group_by_contender
from reports.text_format import format_count

_FAILED_VERDICTS = (FAIL, ERROR)  # an unexpected pass is red too, but resembles no bug
_SCALE_LEGEND = "(1: by the same numbers, 0.35: in the same places by others)"


def measure_signatures_of_failed(
    journal: Journal, implementations: Sequence[Implementation], allowed: ProbeBudget, say: Callable[[str], None]
) -> None:
    """Judge signature cases for each failing kernel, within the `allowed` time, and record them as probes.

    Probes count neither as passes nor as failures. Failing kernels get equal shares of the time.
    """
    if not allowed.left:
        return
    wrong = {record.implementation for record in journal.recorded.records if record.verdict in _FAILED_VERDICTS}
    failed = [one for one in implementations if one.name in wrong and one.accelerator.absent is None]
    found = root_causes.find_root_causes(journal.recorded.records, journal.recorded.probes) if failed else []
    for number, implementation in enumerate(failed):
        if not allowed.left:  # listing this kernel's cases could start its process again
            return
        started = time.monotonic()
        mine = allowed.left / (len(failed) - number)
        needed = [frozenset(f.levels) for f in found if f.contender.implementation == implementation.name and f.levels]
        cases = 0
        for job in order_by_information(list(failure_signatures.iter_signature_jobs(implementation)), needed):
            judged = allowed.judge(job, mine - (time.monotonic() - started))
            if judged is not None:
                journal.add_probes(judged)
                cases += 1
        if cases:
            spent = time.monotonic() - started
            line = f"{implementation.name} compared with planted bugs on {cases} cases in {spent:.0f} s"
            say(f"{line} of at most {mine:.0f} (--diagnose-seconds=60 for more)")


def order_by_information(jobs: Sequence[Job], needed: Sequence[frozenset[Level]]) -> list[Job]:
    """Order the jobs of a signature so that the most informative ones come first.

    Findings take turns: each contributes its next case with the levels that the finding needs to fail. In each round
    comes one more case in the given order, since right results distinguish bugs too.

    Args:
      jobs: the jobs on the cases of a signature.
      needed: for each finding, the levels that a case needs to fail.
    """
    heaps = [[job for job in jobs if levels <= find_levels(job.case.id)] for levels in needed]
    heaps.append(list(jobs))
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*heaps))
    return list({id(job): job for job in rounds if job is not None}.values())


def add_diagnoses(info: RunInfo, found: Sequence[Record]) -> RunInfo:
    """Add to the data of a report the diagnosis of each contender that failed and was probed."""
    probes = group_by_contender(info.probes)
    theirs = {contender: group for contender, group in group_by_contender(found).items() if contender in probes}
    bank = failure_signatures.load_signatures() if probes else []
    diagnoses = {}
    for contender, records in theirs.items():
        signature = failure_signatures.build_signature(probes[contender])
        if bank and signature.wrong and any(record.verdict in _FAILED_VERDICTS for record in records):
            whole = complete_signature(signature, records, root_causes.find_root_causes(records, probes[contender]))
            faults = diagnosis.diagnose(whole, bank)
            # If a kernel only raises exceptions and resembles no bug, the line that raises is shown elsewhere, and is
            # the better diagnosis.
            if faults or any(record.verdict == FAIL for record in records):
                diagnoses[contender.label] = _format_diagnosis(faults, len(bank), len(signature.sizes))
    return dataclasses.replace(info, diagnoses=diagnoses)


def _format_diagnosis(faults: Sequence[Sequence[Similarity]], known: int, asked: int) -> list[str]:
    on = f"on {format_count(asked, 'case')} of those by which these are told apart"
    if not faults:
        return [f"wrong like none of {known:,} planted bugs, {on}"]
    first, *others = faults
    lines = [f"wrong most like these planted bugs {_SCALE_LEGEND}, {on}", *map(_format_likeness, first)]
    for other in others:
        lines += [f"where {first[0].bug.name} shows nothing, most like these", *map(_format_likeness, other)]
        first = other
    return lines


def _format_likeness(each: Similarity) -> str:
    bug = each.bug
    beyond = f"; {each.rest} wrong results beyond it" if each.rest else ""
    return f"{each.similarity:.2f} {bug.name} ({bug.family}; {bug.reference}){beyond}"
