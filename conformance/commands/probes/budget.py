"""What a run that is red asks beside what it judges, and how long that may take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rich.console import Console

from conformance import interrupts
from conformance.commands.probes import confirm, diagnose
from conformance.contract import Implementation
from conformance.judging.journal import Journal
from conformance.judging.probing.allowance import Allowance
from conformance.judging.runner import Runner
from conformance.records import RED

_SHARE, _MOST = 0.1, 15.0
"""Of the run so far, and seconds, that both together may take at most."""
_ENDING = 0.05  # of that, to end what is cut off
_CONFIRMING = 0.4
"""After so much of it confirming begins nothing more; diagnosis has the rest."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Seconds for confirming and for diagnosis: none for what the length of the run decides."""

    confirm: float | None = None
    diagnose: float | None = None


def allowed(spent: float) -> float:
    """Seconds after which everything is cut off, of a run that took so many."""
    return (1 - _ENDING) * min(_SHARE * spent, _MOST)


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
    if interrupts.received() or not any(record.verdict in RED for record in journal.recorded.records):
        return
    known = journal.recorded.records
    both, started = allowed(spent), time.monotonic()
    with interrupts.until_stopped():
        seconds = _CONFIRMING * both if budget.confirm is None else budget.confirm
        allowance = Allowance(runner, both if budget.confirm is None else seconds, known)
        confirm.confirm(journal, implementations, allowance, seconds, console)
        if not journal.recorded.probes and allowance.declined:
            told = f"{allowance.seconds:.1f} s are too few to confirm what was found (--confirm-seconds=10 asks more)"
            console.print(told, style="dim", highlight=False, soft_wrap=True)
        if budget.diagnose is not None:
            allowance = Allowance(runner, budget.diagnose, known)
        elif budget.confirm is not None:
            allowance = Allowance(runner, (1 - _CONFIRMING) * both, known)
        diagnose.ask(journal, implementations, allowance, console)
    took = time.monotonic() - started
    if spent and journal.recorded.probes:
        told = f"both took {took:.1f} s, {took / spent:.0%} of the {spent:.0f} s before"
        console.print(told, style="dim", highlight=False, soft_wrap=True)
