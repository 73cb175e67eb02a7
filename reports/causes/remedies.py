"""Find the declarations under which the failures of a finding would pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from conformance.records import DECLARATIONS_TRIED, RED, Record
from reports.causes.finding import FINITE_BEHIND_MASK, order_by_frequency
from reports.record_groups import group_by


@dataclasses.dataclass(frozen=True)
class MaskLeak:
    """Failures of a contender because NaN or infinity behind the mask reaches a result.

    Attributes:
      count: how many records fail.
      cases: how many cases they are of.
      checks: that fail, most often first.
      tried: how many records pass where memory behind the mask is declared to be finite.
    """

    count: int
    cases: int
    checks: tuple[str, ...]
    tried: int

    @property
    def remedy(self) -> str:
        """The declaration that explains them, empty if it was not seen to."""
        return FINITE_BEHIND_MASK if self.tried else ""


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A declaration that would explain failures, and was tried.

    Attributes:
      declaration: as it is written in a call of `declare`.
      count: how many failures it explains.
      tried: on how many failures any declaration was tried.
      checks: of the failures that it explains, most often first.
    """

    declaration: str
    count: int
    tried: int
    checks: tuple[str, ...]


def summarize_mask_leak(records: Sequence[Record]) -> MaskLeak:
    """Summarize the failures of a contender that memory behind the mask makes."""
    return MaskLeak(
        count=len(records),
        cases=len({record.case for record in records}),
        checks=order_by_frequency(record.check for record in records),
        tried=sum(record.remedy == FINITE_BEHIND_MASK for record in records),
    )


def find_remedies(records: Iterable[Record]) -> list[Remedy]:
    """Find the declarations that would explain red records of a contender, in the order of their names."""
    tried = [r for r in records if r.verdict in RED and (r.remedy or DECLARATIONS_TRIED in r.figures)]
    groups = group_by((record for record in tried if record.remedy), lambda record: record.remedy)
    return [
        Remedy(declaration, len(found), len(tried), order_by_frequency(record.check for record in found))
        for declaration, found in sorted(groups.items())
    ]
