"""Follow up on the failures of a run, within a time limit.

Findings are confirmed, judged again under declarations that might explain them, and compared with planted bugs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from conformance import interrupts
from conformance.follow_up import bug_diagnosis, confirmation, declaration_trials, exact_probes
from conformance.follow_up.probe_budget import ProbeBudget
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from impls.contract.implementation import Implementation
from reports.records import RED

_SHARE, _LEAST_SECONDS = 0.1, 15.0
"""By default, confirmation and diagnosis together may take this share of the run's time, at least so many seconds."""
_END_SHARE = 0.05  # this share of the follow-up's time is reserved for ending a process that is cut off
_CONFIRMING_SHARE, _DECLARING_SHARE = 0.4, 0.3
"""After the first share of the follow-up's time, confirmation starts no further case, and after both, no case is judged
again under other declarations. Diagnosis has the rest.
"""


@dataclasses.dataclass(frozen=True)
class FollowUpSeconds:
    """Seconds for confirmation with trials of declarations, and for diagnosis; None for a share of the run's time."""

    confirm: float | None = None
    diagnose: float | None = None
    option: str = "--diagnose-seconds"


def compute_allowed_seconds(spent: float) -> float:
    """Return the seconds after which all follow-ups are cut off, for a run that took `spent` seconds."""
    return (1 - _END_SHARE) * max(_SHARE * spent, _LEAST_SECONDS)


def follow_up(
    journal: Journal,
    implementations: Sequence[Implementation],
    runner: Runner,
    budget: FollowUpSeconds,
    *,
    spent: float,
    say: Callable[[str], None],
) -> None:
    """Confirm findings and compare failing kernels with planted bugs, and print how long both took.

    A run without red records, or one that a signal stopped, is not followed up. The run took `spent` seconds so far.
    `runner` need not judge failures again, since its records are evidence only.
    """
    if interrupts.get_received_signal() or not any(record.verdict in RED for record in journal.recorded.records):
        return
    known = journal.recorded.records
    both = compute_allowed_seconds(spent)
    with interrupts.end_on_signal():
        started = time.monotonic()
        seconds = (_CONFIRMING_SHARE + _DECLARING_SHARE) * both if budget.confirm is None else budget.confirm
        confirming = seconds * _CONFIRMING_SHARE / (_CONFIRMING_SHARE + _DECLARING_SHARE)
        allowance = ProbeBudget(runner, both if budget.confirm is None else seconds, known)
        confirmation.confirm_findings(journal, implementations, allowance, confirming, say)
        if seconds:
            exact_probes.evaluate_findings(journal, implementations, allowance)
            left = seconds - (time.monotonic() - started)
            declaration_trials.try_declarations(journal, implementations, allowance, left, say)
        if not journal.recorded.probes and allowance.declined:
            option = budget.option.replace("diagnose", "confirm")
            line = f"{allowance.seconds:.1f} s are too few to confirm findings ({option}=10 gives more)"
            say(line)
        if budget.diagnose is not None:
            allowance = ProbeBudget(runner, budget.diagnose, known)
        elif budget.confirm is not None:
            allowance = ProbeBudget(runner, (1 - _CONFIRMING_SHARE) * both, known)
        bug_diagnosis.measure_profiles_of_failed(journal, implementations, allowance, say, option=budget.option)
