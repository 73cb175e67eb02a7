"""List the branches of kernels that no judged case reaches, from the records of the check `branches`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from reports.record_groups import JudgedImplementation
from reports.records import BRANCHES, FAIL, UNJUDGED, Record

REACHES = "the case runs what no planned case reaches: "
"""The beginning of the reason of a failure on a case that was searched for. A list of branches follows."""


_MAX_FILES = 3


@dataclasses.dataclass(frozen=True)
class UnreachedBranches:
    """The branches of an implementation that no judged case reaches.

    Attributes:
      implementation: the implementation.
      branches: the place of each, such as `flash.py:18`, and its condition in words.
    """

    implementation: JudgedImplementation
    branches: tuple[tuple[str, str], ...]

    @property
    def heading(self) -> str:
        """A phrase that states how many branches no case reaches, and in which files."""
        files = list(dict.fromkeys(place.rpartition(":")[0] for place, _ in self.branches))
        named = ", ".join(files) if len(files) <= _MAX_FILES else f"{len(files)} files"
        number = len(self.branches)
        return f"{'1 branch' if number == 1 else f'{number:,} branches'} of {named} that no case reaches"


def find_common_branch(records: Sequence[Record]) -> str:
    """Find a branch that the cases of all these failures run, and no planned case; empty if there is none.

    It is a phrase such as "flash.py:18 `group > 16` is true".
    """
    found = [record.reason.partition(REACHES)[2].split(", ") for record in records]
    common = [branch for branch in found[0] if branch and all(branch in branches for branches in found)]
    return common[0] if common else ""


def find_unreached(groups: Mapping[JudgedImplementation, Sequence[Record]]) -> tuple[UnreachedBranches, ...]:
    """Find the branches that no case reaches, for each implementation that has any."""
    found = []
    for implementation, records in groups.items():
        branches = tuple(
            (record.observable, record.reason)
            for record in records
            if record.check == BRANCHES and record.verdict in (UNJUDGED, FAIL) and ":" in record.observable
        )
        if branches:
            found.append(UnreachedBranches(implementation, branches))
    return tuple(found)
