"""Confirming and shrinking findings at the end of a run: what to probe, and for how long."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence

from rich.console import Console

from cases.case import Case, parse
from conformance.asking.scopes import GRID
from conformance.checks import BY_NAME
from conformance.contract import Implementation
from conformance.judging.journal import Journal
from conformance.judging.probing import shrinking
from conformance.judging.probing.allowance import Allowance
from conformance.judging.probing.confirming import Prober, Suspicion
from conformance.judging.runner import Runner
from conformance.records import Record
from reports.causes import roots
from reports.causes.finding import RAISES, Finding
from reports.causes.levels import Level, levels_of

MOST_SHRUNK = 3
"""Findings that `--shrink` shrinks, the foremost."""
SHRINK_SECONDS = 60.0
"""For each of them, at most."""
_MOST_OTHERS = 3  # suspicions that are told apart
_ROUNDS = 2  # what was seen may say that something else is to be suspected
# What took a kernel's process down would take down another.
_LOST = "the case was asked no further"


def confirm(
    journal: Journal, implementations: Sequence[Implementation], allowed: Allowance, seconds: float, console: Console
) -> None:
    """Judge what confirms the findings so far, and write it down; none of it is counted.

    After `seconds` no case is begun, and what is under way may take what is `allowed`.
    """
    started = time.monotonic()
    prober = Prober(allowed, implementations, seconds, journal.probe)
    for _ in range(_ROUNDS):
        before = prober.judged
        prober.know([*journal.recorded.records, *journal.recorded.probes])
        for finding in roots.of(journal.recorded.records, journal.recorded.probes):
            if _worth_probing(finding) and not prober.is_late:
                prober.confirm(_suspicion(finding))
        if prober.judged == before or prober.is_late:
            break
    if prober.judged:
        spent = time.monotonic() - started
        cases = "1 case more" if prober.judged == 1 else f"{prober.judged} cases more"
        told = f"findings confirmed by {cases} in {spent:.0f} s of at most {seconds:.0f}"
        console.print(f"{told} (--confirm-seconds=0 asks none)", style="dim", highlight=False, soft_wrap=True)


def shrink(
    journal: Journal, implementations: Sequence[Implementation], runner: Runner, console: Console
) -> Iterator[str]:
    """Shrink what shows the first findings, and say what the smallest cases are; they are written down as well."""
    kernels = {implementation.name: implementation for implementation in implementations}
    prober = Prober(Allowance(runner, math.inf), implementations, math.inf, journal.probe)
    for number, finding in enumerate(roots.of(journal.recorded.records, journal.recorded.probes)[:MOST_SHRUNK], 1):
        smallest = finding.smallest
        if smallest.check not in BY_NAME or BY_NAME[smallest.check].scope is not GRID:
            yield f"finding {number} is not shrunk: {smallest.check} is not asked of any case"
            continue
        console.print(f"shrinking finding {number}; Ctrl-C stops with the smallest case so far", highlight=False)
        shrunk = shrinking.shrink(
            kernels[smallest.implementation],
            runner,
            parse(smallest.case),
            smallest,
            seconds=SHRINK_SECONDS,
            keeps=functools.partial(_has, frozenset(finding.levels or ())),
        )
        stopped = "" if shrunk.to_the_end else ", stopped before the end"
        yield f"smallest of finding {number}: {shrunk.case} ({shrunk.tried} others tried{stopped})"
        yield from (record.reproduce for record in shrunk.records[:1])
        if shrunk.tried:
            journal.probe(shrunk.records)
        if shrunk.tried and finding.levels:
            prober.know([*journal.recorded.records, *journal.recorded.probes])
            prober.beside(dataclasses.replace(_suspicion(finding), failing=shrunk.case.id))


def _has(levels: frozenset[Level], case: Case) -> bool:
    return levels <= levels_of(case.id)


def _worth_probing(finding: Finding) -> bool:
    told = not finding.others and (finding.is_confirmed or finding.passes)
    lost = finding.kind == RAISES and finding.smallest.reason.endswith(_LOST)
    return bool(finding.levels) and not told and not lost


def _suspicion(finding: Finding) -> Suspicion:
    levels, others = finding.levels or (), finding.others[:_MOST_OTHERS]
    record: Record = finding.smallest
    with_examples = [x for combination in (levels, *others) for x in combination if others and x.example]
    return Suspicion(
        implementation=record.implementation,
        check=finding.question[0],
        failing=record.case,
        levels=tuple(level.fields for level in levels),
        counters=tuple(dict(level.counter) for level in levels),
        examples=tuple(dict(level.example) for level in with_examples),
        others=tuple(tuple(name for level in other for name in level.fields) for other in others if not with_examples),
    )
