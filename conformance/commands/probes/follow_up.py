"""What a run that is red asks beside what it judges, and how long that may take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from rich.console import Console

from conformance import interrupts
from conformance.commands.probes import bug_diagnosis, finding_confirmation
from conformance.contract import Implementation
from conformance.judging.failure_probes.probe_budget import ProbeBudget
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from conformance.records import RED

_SHARE, _MOST = 0.1, 15.0
"""Of the run so far, and seconds, that both together may take at most."""
_END_SHARE = 0.05  # of that, to end what is cut off
_CONFIRMING_SHARE = 0.4
"""After so much of it confirming begins nothing more; diagnosis has the rest."""


@dataclasses.dataclass(frozen=True)
class FollowUpSeconds:
    """Seconds for confirming and for diagnosis: none for what the length of the run decides."""

    confirm: float | None = None
    diagnose: float | None = None


def compute_allowed_seconds(spent: float) -> float:
    """Seconds after which everything is cut off, of a run that took so many."""
    return (1 - _END_SHARE) * min(_SHARE * spent, _MOST)


def follow_up(
    journal: Journal,
    implementations: Sequence[Implementation],
    runner: Runner,
    budget: FollowUpSeconds,
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
    if interrupts.get_received_signal() or not any(record.verdict in RED for record in journal.recorded.records):
        return
    known = journal.recorded.records
    both, started = compute_allowed_seconds(spent), time.monotonic()
    with interrupts.end_on_signal():
        seconds = _CONFIRMING_SHARE * both if budget.confirm is None else budget.confirm
        allowance = ProbeBudget(runner, both if budget.confirm is None else seconds, known)
        finding_confirmation.confirm_findings(journal, implementations, allowance, seconds, console)
        if not journal.recorded.probes and allowance.declined:
            told = f"{allowance.seconds:.1f} s are too few to confirm what was found (--confirm-seconds=10 asks more)"
            console.print(told, style="dim", highlight=False, soft_wrap=True)
        if budget.diagnose is not None:
            allowance = ProbeBudget(runner, budget.diagnose, known)
        elif budget.confirm is not None:
            allowance = ProbeBudget(runner, (1 - _CONFIRMING_SHARE) * both, known)
        bug_diagnosis.measure_signatures_of_failed(journal, implementations, allowance, console)
    took = time.monotonic() - started
    if spent and journal.recorded.probes:
        told = f"both took {took:.1f} s, {took / spent:.0%} of the {spent:.0f} s before"
        console.print(told, style="dim", highlight=False, soft_wrap=True)
