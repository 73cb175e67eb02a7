"""Tell findings of two sorts apart: what is wrong, and what differs by a convention or an arithmetic.

A finding differs if all its failures that a run judged again under some declarations pass under them
(`reports.records.Proposal`). Then the kernel can be declared as it is, or mended. Otherwise it is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from reports.causes.finding import Finding, get_result
from reports.records import DeclarationTrial, Proposal

WRONG, DIFFERS = "wrong", "differs"
"""The two sorts of findings."""


def find_covering_declarations(finding: Finding, proposal: Proposal | None) -> tuple[str, ...]:
    """Find the fewest declarations under which a finding passes; empty if it passes under none that were tried."""
    if proposal is None:
        return ()
    every = (*proposal.declarations, *proposal.wrappers)
    tried: dict[tuple[str, ...], list[bool]] = {}
    for trial in proposal.trials:
        if set(trial.declarations) <= set(every) and (passes := _passes(finding, trial)) is not None:
            tried.setdefault(trial.declarations, []).append(passes)
    passing = [declarations for declarations, found in tried.items() if all(found)]
    has_conflict = any(len(declarations) == len(every) and not all(found) for declarations, found in tried.items())
    return min(passing, key=lambda one: (len(one), one), default=()) if not has_conflict else ()


def count_trials(finding: Finding, declarations: Sequence[str], proposal: Proposal) -> tuple[int, int]:
    """Count the failing cases of a finding, and the right cases, that pass under declarations."""
    of = [trial for trial in proposal.trials if trial.declarations == tuple(declarations)]
    failing = {trial.case for trial in of if _passes(finding, trial)}
    return len(failing), len({trial.case for trial in of} - failing)


def _passes(finding: Finding, trial: DeclarationTrial) -> bool | None:
    """Return whether the results that are wrong by a finding are right in a trial; None if it is not of the finding."""
    own = {
        get_result(record.observable)
        for record in (*finding.records, finding.smallest)
        if (record.check, record.case) == (trial.check, trial.case)
    }
    return not own & set(trial.wrong) and "all" not in trial.wrong if own else None
