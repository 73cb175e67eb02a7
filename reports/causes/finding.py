"""A finding: red records that one cause explains, and what is known of the cause."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from cases.operand_registry import RESIDUALS
from conformance.records import ERROR, FAIL, UNEXPECTED_PASS, Record
from reports import shared_evidence
from reports.causes.case_levels import Level
from reports.conformity import Contender

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
      contender: whose.
      kind: one of `KINDS`.
      levels: those that a case needs to fail, none if every case does. No tuple where nothing tells which cases do.
      others: other levels that stand in the same cases, so that no case tells which of them it is.
      question: the check and the result that it was located by.
      records: all red records that it explains, those of its own kind first.
      inside, outside: how many cases fail with these levels, and without.
      left_out: how many more were asked, and are in neither, since other findings explain why they fail.
      smallest: the record of the plainest case that shows it, which may be one that was run to confirm it.
      without: for each level, the case of `smallest` without it, where that passes; empty where it was not seen to.
      passes: a plain case with these levels that passes, empty if there is none: then they are not all it takes.
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
    def is_explained(self) -> bool:
        """Whether it is known what the failures have in common."""
        return self.levels is not None or self.kind in (BEHIND_MASK, UNEXPECTED) or self.inside.red == self.inside.asked

    @property
    def is_confirmed(self) -> bool:
        """Whether the same case was seen to fail with the levels, and to pass without each of them."""
        return bool(self.levels) and bool(self.without) and all(self.without)

    @property
    def own(self) -> tuple[Record, ...]:
        """The records that show it themselves."""
        return tuple(record for record in self.records if classify_record(record) == self.kind)

    @property
    def results(self) -> tuple[str, ...]:
        """The results that are wrong by its own kind of check, most often first."""
        return _order_by_frequency(get_result(record.observable) for record in self.own or self.records)

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that show it, most often first."""
        return _order_by_frequency(record.check for record in self.own or self.records)

    @property
    def follows(self) -> tuple[str, ...]:
        """Checks whose failures follow from it, most often first."""
        shown = set(self.checks)
        return tuple(
            check for check in _order_by_frequency(record.check for record in self.records) if check not in shown
        )


def choose_foremost(found: Sequence[Finding], most: int) -> list[tuple[int, Finding]]:
    """So many findings with their numbers, of each contender the first before the second of any other."""
    ranks: Counter[Contender] = Counter()
    ranked = []
    for number, finding in enumerate(found, 1):
        ranked.append((ranks[finding.contender], number, finding))
        ranks[finding.contender] += 1
    chosen = sorted(ranked, key=lambda one: one[:2])[:most]
    return sorted(((number, finding) for _, number, finding in chosen), key=lambda one: one[0])


def get_signal(record: Record) -> str:
    """What a record says of its case, as a check and a result."""
    return f"{record.check}/{get_result(record.observable)}"


def classify_record(record: Record) -> str:
    """What a red record would be about if nothing else explained it."""
    if record.verdict == UNEXPECTED_PASS:
        return UNEXPECTED
    if record.verdict == ERROR or is_wrong_form(record):
        return RAISES
    if shared_evidence.is_mask_leak(record):
        return BEHIND_MASK
    if get_signal(record) in PLAIN_CALL:
        return FORWARD
    return GRADIENTS if is_about_gradients(get_signal(record)) else CHECK


def is_wrong_form(record: Record) -> bool:
    """Whether a result has another dtype or shape than asked, so that nothing is known of its numbers."""
    return record.verdict == FAIL and record.worst is None and _WRONG_FORM.match(record.reason) is not None


def is_about_gradients(signal: str) -> bool:
    """Whether a check and a result are about gradients."""
    return signal.startswith(("gradients", f"{STATISTICS}/"))


def find_raising_line(reason: str) -> re.Match[str] | None:
    """Where a reason names the line that raises, as `place`: last, since a message may say anything before."""
    return next(reversed(list(_RAISING_LINE.finditer(reason))), None)


def get_result(observable: str) -> str:
    """`dq` of `dq.row.nan`."""
    return observable.partition(".")[0]


def _order_by_frequency(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in Counter(names).most_common())
