"""Confirm findings at the end of a run, by judging cases that should fail or pass if a finding names its cause.

This module chooses the findings and keeps to a time limit. `conformance.judging.failure_probes.confirmation` chooses
the cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from conformance.judging.failure_probes.confirmation import Prober, Suspicion
from conformance.judging.failure_probes.probe_budget import ProbeBudget
from conformance.judging.journal import Journal
from conformance.judging.runner import ABANDONED_CASE
from impls.contract.implementation import Implementation
from reports.causes import root_causes
from reports.causes.case_levels import FIELD_GROUPS
from reports.causes.finding import RAISES, Finding
from reports.records import Record

_MAX_ALTERNATIVES = 3  # the number of other explanations of a finding that are tested by cases
_MAX_ROUNDS = 2  # probes of the first round may change what findings suspect, which the second round probes


def confirm_findings(
    journal: Journal,
    implementations: Sequence[Implementation],
    allowed: ProbeBudget,
    seconds: float,
    say: Callable[[str], None],
) -> None:
    """Judge cases that confirm or refute the findings so far, and record them as probes.

    Probes count neither as passes nor as failures.

    Args:
      journal: the journal of the run, which has its records and gets the probes.
      implementations: the implementations of the run.
      allowed: judges the cases, and cuts off a case that uses up its time.
      seconds: time after which no further case is started.
      say: called with lines for the user.
    """
    started = time.monotonic()
    prober = Prober(allowed, implementations, seconds, journal.add_probes)
    for _ in range(_MAX_ROUNDS):
        before = prober.judged
        prober.remember([*journal.recorded.records, *journal.recorded.probes])
        for finding in root_causes.find_root_causes(journal.recorded.records, journal.recorded.probes):
            if prober.is_late:
                break
            if _is_worth_probing(finding):
                prober.confirm(build_suspicion(finding))
            if finding.is_vague:
                prober.isolate(
                    finding.smallest.implementation, finding.question[0], finding.smallest.case, FIELD_GROUPS
                )
        if prober.judged == before or prober.is_late:
            break
    if prober.judged:
        spent = time.monotonic() - started
        cases = "1 case more" if prober.judged == 1 else f"{prober.judged} cases more"
        line = f"findings confirmed by {cases} in {spent:.0f} s of at most {seconds:.0f}"
        say(f"{line} (--confirm-seconds=0 judges none)")


def _is_worth_probing(finding: Finding) -> bool:
    """Tell whether probes could still confirm or change the cause that a finding names."""
    settled = not finding.others and (finding.is_confirmed or finding.passes)
    # If the failing case killed the kernel's process, judging similar cases would kill further processes.
    lost = finding.kind == RAISES and finding.smallest.reason.endswith(ABANDONED_CASE)
    return bool(finding.levels) and not settled and not lost


def build_suspicion(finding: Finding) -> Suspicion:
    """Build the suspicion to probe: the levels that a finding needs, and the levels of alternative explanations."""
    levels, others = finding.levels or (), finding.others[:_MAX_ALTERNATIVES]
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
