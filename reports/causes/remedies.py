"""Find the declarations under which the failures of a finding would pass.

A declaration says how a kernel computes, for example that products are in tf32, so that bounds or inputs change. The
run judges some failures again under other declarations and records in `Record.remedy` which one makes a failure pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from reports.causes.finding import FINITE_BEHIND_MASK, order_by_frequency
from reports.record_groups import group_by
from reports.records import DECLARATIONS_TRIED, RED, Record


@dataclasses.dataclass(frozen=True)
class MaskLeak:
    """Failures of an implementation because NaN or infinity behind the mask reaches a result.

    Attributes:
      checks: the checks that fail, the most frequent first.
      tried: the number of these records that were judged again, and pass, under the declaration that memory behind the
        mask is finite.
    """

    count: int
    cases: int
    checks: tuple[str, ...]
    tried: int

    @property
    def remedy(self) -> str:
        """The declaration under which the failures pass; empty if no failure is known to pass under it."""
        return FINITE_BEHIND_MASK if self.tried else ""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A declaration under which failures pass, as far as they were judged again."""

    declaration: str  # the declaration, as an argument in a call of `declare`
    count: int  # the number of failures that pass under the declaration
    tried: int  # the number of failures that were judged again under any declaration
    checks: tuple[str, ...]  # the checks of the failures that pass under the declaration, the most frequent first


def summarize_mask_leak(records: Sequence[Record]) -> MaskLeak:
    """Summarize the failures of an implementation that NaN or infinity behind the mask causes."""
    return MaskLeak(
        count=len(records),
        cases=len({record.case for record in records}),
        checks=order_by_frequency(record.check for record in records),
        tried=sum(record.remedy == FINITE_BEHIND_MASK for record in records),
    )


def find_remedies(records: Iterable[Record]) -> list[Remedy]:
    """Find the declarations under which red records of an implementation pass, sorted by declaration."""
    tried = [r for r in records if r.verdict in RED and (r.remedy or DECLARATIONS_TRIED in r.figures)]
    groups = group_by((record for record in tried if record.remedy), lambda record: record.remedy)
    return [
        Remedy(declaration, len(found), len(tried), order_by_frequency(record.check for record in found))
        for declaration, found in sorted(groups.items())
    ]
