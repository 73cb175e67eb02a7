"""Define a job, the unit of a run: one implementation on one case under some checks."""

from __future__ import annotations

import dataclasses

from cases.case import Case
from conformance.check_api.branch_search_request import NO_SEARCH, BranchSearch
from conformance.check_api.scopes import GRID
from conformance.check_api.subchecks import ALL_SUBCHECKS, Subchecks
from conformance.checks import Check
from impls.contract.implementation import Implementation


@dataclasses.dataclass(frozen=True)
class Job:
    """One implementation, one case, and the checks to run on it, which share compiled functions and oracle results.

    `selection` names the costly subchecks that run on this case. `branch_search` is for the check `branches` alone.
    """

    implementation: Implementation
    case: Case
    checks: tuple[Check, ...]
    selection: Subchecks = ALL_SUBCHECKS
    branch_search: BranchSearch = NO_SEARCH

    @property
    def is_on_grid(self) -> bool:
        """Whether the job runs checks of the grid only: checks that every case of a covering array gets."""
        return {check.scope for check in self.checks} == {GRID}

    @property
    def short(self) -> bool:
        """Whether the job compiles few programs."""
        return all(check.scope.short for check in self.checks)

    @property
    def id(self) -> str:
        """A readable name: `implementation-case`, with the checks between if they are not those of the grid."""
        extra = "" if self.is_on_grid else "-".join(check.name for check in self.checks) + "-"
        return f"{self.implementation.name}-{extra}{self.case.id}"
