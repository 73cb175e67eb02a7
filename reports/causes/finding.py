"""Define `Finding`: the records of failures that one cause explains, and the facts about the cause.

A record is *red* if its verdict is a failure, an error or an unexpected pass. `classify_record` returns the kind of
failure that a red record shows, such as a wrong forward result. `root_causes` builds findings from records.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

from cases.operand_registry import RESIDUALS
from reports.causes.case_levels import Level
from reports.record_groups import JudgedImplementation
from reports.records import ERROR, FAIL, RED, UNEXPECTED_PASS, Record

RAISES, UNREPEATABLE, FORWARD, GRADIENTS, BEHIND_MASK, CHECK, UNEXPECTED = (
    "raises",
    "unrepeatable",
    "forward",
    "gradients",
    "behind the mask",
    "check",
    "unexpected pass",
)
ROUNDS_TOO_MUCH, WRONG_EXACTLY = "rounds too much", "wrong in exact arithmetic"
"""The two outcomes for a wrong result in float64: right there, or wrong there by more than rounding explains."""
KINDS = (RAISES, UNREPEATABLE, FORWARD, GRADIENTS, BEHIND_MASK, CHECK, UNEXPECTED)
"""The kinds of findings, in order: failures of a later kind may follow from a cause of an earlier kind."""

OUT = ("forward/out", "residuals/out", "primal/out", "primal/out_with_residuals")
ALGORITHM = "algorithm"
"""The check that evaluates a kernel in float64, where nothing rounds."""
STATISTICS = "ensemble"
"""The check that judges results by statistics over many elements, so that it notices slight errors first."""
PLAIN_CALL = (
    *OUT,
    *(f"{check}/{name}" for name in RESIDUALS for check in ("residuals", "primal")),
    f"{STATISTICS}/out",
)
"""The forward results of a call on a case's own operands, as `check/result`.

The results in which a fault of the forward pass shows most plainly come first.
"""
FINITE_BEHIND_MASK = 'behind_mask="finite"'
"""The declaration that memory behind the mask must be finite."""

# The subchecks that make the same call again and compare the bits of its results.
_REPETITIONS = frozenset({"repeated", "second_call", "a_thousand"})
_BITS = "bits"
# The start of a record's reason if a result has another dtype or shape than expected, so that it cannot be compared.
_WRONG_FORM = re.compile(r"(dtype|shape) is ")
_RAISING_LINE = re.compile(r"\((?P<place>[^()\s][^()]*:\d+): ")

Located = tuple[str, str]
"""A check, and a result that it judges."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The number of red cases (`red`) among the cases that were judged (`asked`)."""

    red: int
    asked: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The red records that one cause explains, and the facts about the cause.

    Attributes:
      implementation: the implementation and platform whose records these are.
      kind: one of `KINDS`.
      levels: the levels that a case needs to fail, and an empty tuple if every case fails. None if it is unknown what
        failing cases have in common.
      others: other combinations of levels that occur in the same cases, so that no case distinguishes them from
        `levels`.
      located_by: the check and the result by which the cause was located.
      records: all red records that the cause explains; those of the finding's own kind come first.
      inside: how many of the judged cases with these levels fail.
      outside: how many of the judged cases without these levels fail.
      left_out: the number of judged cases that `inside` and `outside` leave out, since other findings explain them.
      cotangent: for gradients, which cotangents show the fault, as the end of a sentence; empty if any cotangent does.
      smallest: the record of the plainest case that shows the cause. It may be a case that was run to confirm the
        finding.
      without: for each level, the id of a passing case that differs from the case of `smallest` by lacking the level.
        An entry is empty if no such case is known; the tuple is empty if none is known for any level.
      passes: the id of a plain case that has all the levels and passes; empty if there is none. Such a case shows that
        the levels are not sufficient to make a case fail.
      in_float64: what the result of `smallest` is if every float is float64: `ROUNDS_TOO_MUCH`, `WRONG_EXACTLY`, or
        empty if it was not evaluated so.
    """

    implementation: JudgedImplementation
    kind: str
    levels: tuple[Level, ...] | None
    others: tuple[tuple[Level, ...], ...] = ()
    located_by: Located
    records: tuple[Record, ...]
    inside: Share
    outside: Share
    left_out: int = 0
    cotangent: str = ""
    smallest: Record
    without: tuple[str, ...] = ()
    passes: str = ""
    in_float64: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What tells the finding from the others of a report: its implementation, and the key of its first record."""
        return (self.implementation.label, *self.records[0].key)

    @property
    def is_explained(self) -> bool:
        """Whether a common property of the failing cases is known."""
        return self.levels is not None or self.kind in (BEHIND_MASK, UNEXPECTED) or self.inside.red == self.inside.asked

    @property
    def is_vague(self) -> bool:
        """Return whether results are wrong, and no levels are known with which most cases fail."""
        is_narrow = self.levels is not None and 2 * self.inside.red > self.inside.asked
        return self.kind in (FORWARD, GRADIENTS) and not is_narrow

    @property
    def is_confirmed(self) -> bool:
        """Whether a case that fails with the levels is known to pass without any one of them."""
        return bool(self.levels) and bool(self.without) and all(self.without)

    @property
    def own(self) -> tuple[Record, ...]:
        """The records of the finding's own kind, which show the cause themselves."""
        return tuple(record for record in self.records if classify_record(record) == self.kind)

    @property
    def results(self) -> tuple[str, ...]:
        """The results that are wrong in records of the finding's own kind, the most frequent first."""
        return order_by_frequency(get_result(record.observable) for record in self.own or self.records)

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that show the cause, in records of the finding's own kind, the most frequent first."""
        return order_by_frequency(record.check for record in self.own or self.records)

    @property
    def follows(self) -> tuple[str, ...]:
        """The other checks, whose failures follow from the cause, the most frequent first."""
        shown = set(self.checks)
        return tuple(c for c in order_by_frequency(record.check for record in self.records) if c not in shown)


def get_signal(record: Record) -> str:
    """Return the check and the result of a record as `check/result`."""
    return f"{record.check}/{get_result(record.observable)}"


def get_result(observable: str) -> str:
    """Return the result that an observable judges: `dq` for `dq.row.nan`."""
    return observable.partition(".")[0]


def classify_record(record: Record) -> str:
    """Return the kind of the finding that a red record would belong to if no other cause explained the record."""
    if record.verdict == UNEXPECTED_PASS:
        return UNEXPECTED
    if record.verdict == ERROR or is_wrong_form(record):
        return RAISES
    if is_repetition(record):
        return UNREPEATABLE
    if is_mask_leak(record):
        return BEHIND_MASK
    if get_signal(record) in PLAIN_CALL:
        return FORWARD
    return GRADIENTS if is_about_gradients(get_signal(record)) else CHECK


def is_wrong_form(record: Record) -> bool:
    """Return whether a record fails because a result has another dtype or shape, so that values cannot be compared."""
    return record.verdict == FAIL and record.worst is None and _WRONG_FORM.match(record.reason) is not None


def is_repetition(record: Record) -> bool:
    """Return whether a record compares the bits of the same call made twice."""
    name, *parts = record.observable.split(".")
    return bool(_REPETITIONS & set(parts)) and (name == _BITS or "repeated" in parts)


def is_mask_leak(record: Record) -> bool:
    """Return whether a record is red because NaN or infinity behind the mask reaches a result."""
    return record.verdict in RED and (is_mask_poison(record) or record.remedy == FINITE_BEHIND_MASK)


def is_mask_poison(record: Record) -> bool:
    """Return whether the record's check put NaN or infinity where the mask hides it."""
    return record.check == "poison" and record.observable.rpartition(".")[2] in ("nan", "inf")


def is_about_gradients(signal: str) -> bool:
    """Return whether a signal, `check/result`, judges gradients; it must not be in `PLAIN_CALL`."""
    return signal.startswith(("gradients", f"{STATISTICS}/"))


def find_raising_line(reason: str) -> re.Match[str] | None:
    """Find the place in a record's reason that names the line that raises; the match has it as the group `place`.

    Returns the last match, since an exception's message before it may contain anything. Returns None if there is none.
    """
    return next(reversed(list(_RAISING_LINE.finditer(reason))), None)


def order_by_frequency(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct names, the most frequent first."""
    return tuple(name for name, _ in Counter(names).most_common())
