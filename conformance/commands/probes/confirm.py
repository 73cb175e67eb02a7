"""Confirming findings at the end of a run: what to probe, and for how long."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from conformance.contract import Implementation
from conformance.judging.journal import Journal
from conformance.judging.probing.allowance import Allowance
from conformance.judging.probing.confirming import Prober, Suspicion
from conformance.records import Record
from reports.causes import roots
from reports.causes.finding import RAISES, Finding

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
                prober.confirm(suspicion(finding))
        if prober.judged == before or prober.is_late:
            break
    if prober.judged:
        spent = time.monotonic() - started
        cases = "1 case more" if prober.judged == 1 else f"{prober.judged} cases more"
        told = f"findings confirmed by {cases} in {spent:.0f} s of at most {seconds:.0f}"
        console.print(f"{told} (--confirm-seconds=0 asks none)", style="dim", highlight=False, soft_wrap=True)


def _worth_probing(finding: Finding) -> bool:
    told = not finding.others and (finding.is_confirmed or finding.passes)
    lost = finding.kind == RAISES and finding.smallest.reason.endswith(_LOST)
    return bool(finding.levels) and not told and not lost


def suspicion(finding: Finding) -> Suspicion:
    """What a finding suspects, and what else may be it."""
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
