"""What a run that is red asks beside what it judges, and how long that may take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rich.console import Console

from conformance.commands.probes import confirm, diagnose
from conformance.contract import Implementation
from conformance.judging import interrupts
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from conformance.records import RED

# Of the run so far, both together. In less than the least nothing is told, and more than the most nobody waits for.
_SHARE, _LEAST, _MOST = 0.1, 6.0, 14.0
_CONFIRMING = 0.4
"""What confirming may take of that; diagnosis has the rest, and what confirming left."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Seconds for confirming and for diagnosis: none for what the length of the run decides."""

    confirm: float | None = None
    diagnose: float | None = None


def ask(
    journal: Journal,
    implementations: Sequence[Implementation],
    runner: Runner,
    budget: Budget,
    *,
    spent: float,
    console: Console,
) -> None:
    """Confirm what was found and compare kernels with planted bugs, within the budget, and say what it took.

    Args:
      journal: of the run, which writes down what is asked; none of that is counted.
      implementations: those of the run.
      runner: judges here.
      budget: how long it may take.
      spent: how many seconds the run took so far.
      console: what is said goes there.
    """
    if not any(record.verdict in RED for record in journal.recorded.records):
        return
    allowed = min(max(_SHARE * spent, _LEAST), _MOST)
    started = time.monotonic()
    with interrupts.heeded():
        seconds = _CONFIRMING * allowed if budget.confirm is None else budget.confirm
        if seconds:
            confirm.confirm(journal, implementations, runner, seconds, console)
        left = allowed - (time.monotonic() - started) if budget.confirm is None else (1 - _CONFIRMING) * allowed
        seconds = max(left, 0.0) if budget.diagnose is None else budget.diagnose
        if seconds:
            diagnose.ask(journal, implementations, runner, seconds, console)
    took = time.monotonic() - started
    if spent and journal.recorded.probes:
        told = f"both took {took:.1f} s, {took / spent:.0%} of the {spent:.0f} s before"
        console.print(told, style="dim", highlight=False, soft_wrap=True)
