"""Define a job, the unit of a run: one implementation on one case under some checks."""

from __future__ import annotations

import dataclasses

from cases.case import Case
from conformance.check_api.rotation import FULL_ROTATION, Rotation
from conformance.check_api.scopes import GRID
from conformance.checks import Check
from impls.contract.implementation import Implementation


@dataclasses.dataclass(frozen=True)
class Job:
    """An implementation, a case, checks to run on it, and the `rotation` of costly questions that they ask."""

    implementation: Implementation
    case: Case
    checks: tuple[Check, ...]
    rotation: Rotation = FULL_ROTATION

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
