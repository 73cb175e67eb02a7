"""Define a finding: red records that one cause explains, and what is known of the cause."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

from cases.operand_registry import RESIDUALS
from conformance.records import ERROR, FAIL, RED, UNEXPECTED_PASS, Record
from reports.causes.case_levels import Level
from reports.record_groups import Contender

RAISES, FORWARD, GRADIENTS, BEHIND_MASK, CHECK, UNEXPECTED = (
    "raises",
    "forward",
    "gradients",
    "behind the mask",
    "check",
    "unexpected pass",
)
KINDS = (RAISES, FORWARD, GRADIENTS, BEHIND_MASK, CHECK, UNEXPECTED)
"""What findings are about, in their order: what a later kind says may follow from an earlier one."""

OUT = ("forward/out", "residuals/out", "primal/out", "primal/out_with_residuals")
STATISTICS = "ensemble"
"""The check that judges the same results over many elements: what is slightly wrong shows there first."""
PLAIN_CALL = (
    *OUT,
    *(f"{check}/{name}" for name in RESIDUALS for check in ("residuals", "primal")),
    f"{STATISTICS}/out",
)
"""The results of the plain call, those first in which a fault of the forward pass shows most plainly."""
FINITE_BEHIND_MASK = 'behind_mask="finite"'
"""The declaration that memory behind the mask must be finite."""

# How reasons begin that say that what came back cannot be compared with what was expected.
_WRONG_FORM = re.compile(r"(dtype|shape) is ")
_RAISING_LINE = re.compile(r"\((?P<place>[^()\s][^()]*:\d+): ")

Question = tuple[str, str]
"""A check, and a result that it judges."""


@dataclasses.dataclass(frozen=True)
class Share:
    """How many of the cases that were asked are red."""

    red: int
    asked: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Red records that one cause explains.

    Attributes:
      contender: whose records.
      kind: one of `KINDS`.
      levels: those that a case needs to fail, none if every case fails; not a tuple if it is unknown which cases fail.
      others: other levels that stand in the same cases, so that no case distinguishes them from `levels`.
      question: the check and the result that the cause was located by.
      records: all red records that it explains, those of its own kind first.
      inside, outside: how many cases fail with these levels, and without.
      left_out: how many more cases were asked, and are in neither, since other findings explain why they fail.
      smallest: the record of the plainest case that shows it, which may be one that was run to confirm it.
      without: for each level, the case of `smallest` without it, if that passes; empty if none was seen to pass.
      passes: a plain case with these levels that passes, empty if there is none. It shows that the levels alone do not
        make a case fail.
    """

    contender: Contender
    kind: str
    levels: tuple[Level, ...] | None
    others: tuple[tuple[Level, ...], ...] = ()
    question: Question
    records: tuple[Record, ...]
    inside: Share
    outside: Share
    left_out: int = 0
    smallest: Record
    without: tuple[str, ...] = ()
    passes: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What tells the finding from the others of a report: its contender, and the key of its first record."""
        return (self.contender.label, *self.records[0].key)

    @property
    def is_explained(self) -> bool:
        """Whether it is known what the failures have in common."""
        return self.levels is not None or self.kind in (BEHIND_MASK, UNEXPECTED) or self.inside.red == self.inside.asked

    @property
    def is_confirmed(self) -> bool:
        """Whether a case fails with the levels, and passes without each of them."""
        return bool(self.levels) and bool(self.without) and all(self.without)

    @property
    def own(self) -> tuple[Record, ...]:
        """The records of the finding's own kind, which show the cause themselves."""
        return tuple(record for record in self.records if classify_record(record) == self.kind)

    @property
    def results(self) -> tuple[str, ...]:
        """The results that are wrong by its own kind of check, most often first."""
        return order_by_frequency(get_result(record.observable) for record in self.own or self.records)

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that show it, most often first."""
        return order_by_frequency(record.check for record in self.own or self.records)

    @property
    def follows(self) -> tuple[str, ...]:
        """Checks whose failures follow from it, most often first."""
        shown = set(self.checks)
        return tuple(c for c in order_by_frequency(record.check for record in self.records) if c not in shown)


def get_signal(record: Record) -> str:
    """Return what a record judges as `check/result`."""
    return f"{record.check}/{get_result(record.observable)}"


def get_result(observable: str) -> str:
    """Return the result that an observable is about: `dq` of `dq.row.nan`."""
    return observable.partition(".")[0]


def classify_record(record: Record) -> str:
    """Return the kind of finding that a red record would be if nothing else explained it."""
    if record.verdict == UNEXPECTED_PASS:
        return UNEXPECTED
    if record.verdict == ERROR or is_wrong_form(record):
        return RAISES
    if is_mask_leak(record):
        return BEHIND_MASK
    if get_signal(record) in PLAIN_CALL:
        return FORWARD
    return GRADIENTS if is_about_gradients(get_signal(record)) else CHECK


def is_wrong_form(record: Record) -> bool:
    """Return whether a result has another dtype or shape than expected.

    Then its values cannot be compared.
    """
    return record.verdict == FAIL and record.worst is None and _WRONG_FORM.match(record.reason) is not None


def is_mask_leak(record: Record) -> bool:
    """Return whether a record is red because NaN or infinity behind the mask reaches a result."""
    return record.verdict in RED and (is_mask_poison(record) or record.remedy == FINITE_BEHIND_MASK)


def is_mask_poison(record: Record) -> bool:
    """Return whether NaN or infinity was put behind the mask."""
    return record.check == "poison" and record.observable.rpartition(".")[2] in ("nan", "inf")


def is_about_gradients(signal: str) -> bool:
    """Return whether a check and a result are about gradients."""
    return signal.startswith(("gradients", f"{STATISTICS}/"))


def find_raising_line(reason: str) -> re.Match[str] | None:
    """Find where a reason names the line that raises, as the group `place`.

    The last match counts, since a message may have anything before it.
    """
    return next(reversed(list(_RAISING_LINE.finditer(reason))), None)


def order_by_frequency(names: Iterable[str]) -> tuple[str, ...]:
    """Return the different names, the most frequent first."""
    return tuple(name for name, _ in Counter(names).most_common())
