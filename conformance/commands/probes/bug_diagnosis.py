"""Diagnosis at the end of a run: which planted bugs a kernel is wrong most like."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

from rich.console import Console

from conformance.commands.probes.signature_completion import complete_signature
from conformance.contract import Implementation
from conformance.judging.failure_probes.probe_budget import ProbeBudget
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.records import ERROR, FAIL, Record, RunInfo
from conformance.sensitivity import diagnosis, failure_signatures
from conformance.sensitivity.diagnosis import Similarity
from reports.causes import root_causes
from reports.causes.case_levels import Level, find_levels
from reports.record_groups import group_by_contender
from reports.text_format import format_count

_FAILED_VERDICTS = (FAIL, ERROR)  # what passes unexpectedly is like no bug
_SCALE_LEGEND = "(1: by the same numbers, 0.35: in the same places by others)"


def measure_signatures_of_failed(
    journal: Journal, implementations: Sequence[Implementation], allowed: ProbeBudget, console: Console
) -> None:
    """Judge the cases of a signature for every kernel with failures, all in what is allowed; none of it is counted."""
    if not allowed.left:
        return
    wrong = {record.implementation for record in journal.recorded.records if record.verdict in _FAILED_VERDICTS}
    asked = [one for one in implementations if one.name in wrong and one.accelerator.absent is None]
    found = root_causes.find_root_causes(journal.recorded.records, journal.recorded.probes) if asked else []
    for number, implementation in enumerate(asked):
        if not allowed.left:  # a process that was cut off would be started again to say what it supports
            return
        started = time.monotonic()
        mine = allowed.left / (len(asked) - number)
        needed = [frozenset(f.levels) for f in found if f.contender.implementation == implementation.name and f.levels]
        cases = 0
        for job in order_by_information(list(failure_signatures.iter_signature_jobs(implementation)), needed):
            judged = allowed.judge(job, mine - (time.monotonic() - started))
            if judged is not None:
                journal.probe(judged)
                cases += 1
        if cases:
            spent = time.monotonic() - started
            told = f"{implementation.name} compared with planted bugs on {cases} cases in {spent:.0f} s"
            console.print(
                f"{told} of at most {mine:.0f} (--diagnose-seconds=60 for more)",
                style="dim",
                highlight=False,
                soft_wrap=True,
            )


def order_by_information(jobs: Sequence[Job], needed: Sequence[frozenset[Level]]) -> list[Job]:
    """The jobs in the order in which they tell most: for each finding in turn a case with the levels that it needs.

    Between them come the others in their own order, since what a kernel is right in tells bugs apart too.
    """
    heaps = [[job for job in jobs if levels <= find_levels(job.case.id)] for levels in needed]
    heaps.append(list(jobs))
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*heaps))
    return list({id(job): job for job in rounds if job is not None}.values())


def add_diagnoses(info: RunInfo, found: Sequence[Record]) -> RunInfo:
    """What a report says beside records, with the diagnosis of each contender that failed and was asked."""
    asked = group_by_contender(info.probes)
    theirs = {contender: group for contender, group in group_by_contender(found).items() if contender in asked}
    bank = failure_signatures.load_signatures() if asked else []
    diagnoses = {}
    for contender, records in theirs.items():
        signature = failure_signatures.build_signature(asked[contender])
        if bank and signature.wrong and any(record.verdict in _FAILED_VERDICTS for record in records):
            whole = complete_signature(signature, records, root_causes.find_root_causes(records, asked[contender]))
            faults = diagnosis.diagnose(whole, bank)
            # Of what only raises, the line that raises says more than that no bug is like it.
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
