"""Confirming findings at the end of a run: what to probe, and for how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from rich.console import Console

from conformance.commands.errors import CannotJudge
from conformance.contract import Implementation
from conformance.judging.confirming import Prober, Suspicion
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from conformance.records import Record
from reports.causes import roots
from reports.causes.finding import RAISES, Finding

_MOST_OTHERS = 3  # suspicions that are told apart
_ROUNDS = 2  # what was seen may say that something else is to be suspected
# What took a kernel's process down would take down another.
_LOST = "the case was asked no further"


def reject_negative(seconds: float) -> None:
    """Refuse a time that is none."""
    if not seconds >= 0:
        raise CannotJudge(f"--confirm-seconds must not be negative, got {seconds:g}")


def confirm(
    journal: Journal, implementations: Sequence[Implementation], runner: Runner, seconds: float, console: Console
) -> None:
    """Judge what confirms the findings so far, and write it down. Ctrl-C leaves it at what was judged.

    Nothing of it is counted, and a run in which nothing is red does nothing here.
    """
    started = time.monotonic()
    prober = Prober(runner, implementations, seconds, journal.probe)
    with contextlib.suppress(KeyboardInterrupt):
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
        told = f"findings confirmed by {cases} in {spent:.0f} s of at most {seconds:g} (--confirm-seconds=0 asks none)"
        console.print(told, style="dim", highlight=False)


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
