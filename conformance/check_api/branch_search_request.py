"""Define what the check `branches` needs to know of the run besides its subject, and what it adds to the run."""

from __future__ import annotations

import dataclasses

from cases.case import Case


@dataclasses.dataclass(frozen=True)
class BranchSearch:
    """The start of a search for a kernel's branches.

    Attributes:
      cases: the ids of the cases that the run judges; empty to begin with the subject's case alone.
      packages: packages whose branches are searched besides those of the kernel's folder.
      beyond_numbers: whether lengths beyond the numbers in the kernel's source are judged too.
    """

    cases: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    beyond_numbers: bool = False


NO_SEARCH = BranchSearch()


@dataclasses.dataclass(frozen=True)
class FurtherCase:
    """A case that a check adds to those that are judged, and why, as the reason of its failures says it."""

    case: Case
    reason: str
