"""Diagnosis at the end of a run: which planted bugs a kernel is wrong most like."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rich.console import Console

from conformance.contract import Implementation
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from conformance.records import RED, Record, RunInfo
from conformance.sensitivity import diagnosis, signatures
from conformance.sensitivity.diagnosis import Likeness
from reports.summary import by_contender

_SCALE = "(1: by the same numbers, 0.35: in the same places by others)"


def ask(
    journal: Journal, implementations: Sequence[Implementation], runner: Runner, seconds: float, console: Console
) -> None:
    """Judge the cases of a signature for every kernel with failures, each for so long; none of it is counted."""
    wrong = {record.implementation for record in journal.recorded.records if record.verdict in RED}
    for implementation in implementations:
        if implementation.name not in wrong or implementation.accelerator.absent is not None:
            continue
        started = time.monotonic()
        asked = 0
        for job in signatures.jobs(implementation):
            if time.monotonic() - started > seconds:
                break
            journal.probe(runner.judge(job))
            asked += 1
        if asked:
            spent = time.monotonic() - started
            told = f"{implementation.name} compared with planted bugs on {asked} cases in {spent:.0f} s"
            console.print(f"{told} of at most {seconds:g}", style="dim", highlight=False, soft_wrap=True)


def told(info: RunInfo, found: Sequence[Record]) -> RunInfo:
    """What a report says beside records, with the diagnosis of each contender that failed and was asked."""
    wrong = {contender for contender, _ in by_contender([record for record in found if record.verdict in RED]).items()}
    bank = signatures.load()
    diagnoses = {}
    for contender, asked in by_contender(info.probes).items():
        signature = signatures.signature(asked)
        if bank and contender in wrong and signature.wrong:
            diagnoses[contender.label] = _words(diagnosis.diagnose(signature, bank), len(bank))
    return dataclasses.replace(info, diagnoses=diagnoses)


def _words(faults: Sequence[Sequence[Likeness]], known: int) -> list[str]:
    if not faults:
        return [f"wrong like none of {known:,} planted bugs, on the cases by which those are told apart"]
    first, *others = faults
    lines = [f"wrong most like these planted bugs {_SCALE}", *map(_line, first)]
    for other in others:
        lines += [f"where {first[0].bug.name} shows nothing, most like these", *map(_line, other)]
        first = other
    return lines


def _line(each: Likeness) -> str:
    bug = each.bug
    beyond = f"; {each.rest} wrong results beyond it" if each.rest else ""
    return f"{each.likeness:.2f} {bug.name} ({bug.family}; {bug.reference}){beyond}"
