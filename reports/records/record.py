"""Define records. A record holds the verdict on one judged observable.

Records are plain data, and the only data that pass from judging to reporting. The class is also the format of a record
in a file (`reports.records.record_files`): its annotations say which values a file may have.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from reports.printable_text import is_printable, make_printable
from reports.records.error_map import ErrorMap

RECORD_SCHEMA = "attention-conformance/record/1"
PASS = "pass"
FAIL = "fail"
UNSUPPORTED = "unsupported"
EXPECTED_FAIL = "expected-fail"
UNEXPECTED_PASS = "unexpected-pass"
ERROR = "error"
UNJUDGED = "unjudged"
VERDICTS = (PASS, FAIL, UNSUPPORTED, EXPECTED_FAIL, UNEXPECTED_PASS, ERROR, UNJUDGED)
RED = frozenset({FAIL, UNEXPECTED_PASS, ERROR})
"""Verdicts with which a run does not conform."""
RATIO_FAST_COMPILE = "ratio_fast_compile"
"""Name of a figure of a result that was judged twice: its ratio under the flags that make compiling cheap."""
FLAGS_DIFFER = "flags_differ"
"""Name of a figure, always 1: the verdict differs between the flags that make compiling cheap and JAX's own flags."""
DECLARATIONS_TRIED = "declarations_tried"
"""Name of a figure, always 1: weaker declarations were tried on this failure, with or without success."""
IN_PROCESS = "in_process"
"""Name of a figure, always 1: a user's kernel ran in the judge's own process, and could have altered the judge."""
REFUSED = "refused"
"""Name of a figure, always 1: the call raised `NotImplementedError`, and no declaration says that it would."""
REFUSED_PRECISION = "refused_precision"
"""Name of a figure, always 1: this platform refuses the precision that a product requests, so nothing was judged."""
DEFAULT_PRECISION = "default_precision"
"""Name of a figure, always 1: f32 products are declared exact, and none of them requests the precision of f32."""
BEYOND_ROUNDING = "beyond_rounding"
"""Name of a figure of the check `algorithm`: 1 if a result is wrong in float64 by more than rounding may explain."""
BRANCHES = "branches"
"""The name of the check that says what no case reaches, and whose jobs judge further cases that reach it."""
EARLY_END = "early_end"
"""What a record names in place of a check to say that the jobs of its implementation ended early."""
JUDGED = frozenset({PASS, FAIL, EXPECTED_FAIL, UNEXPECTED_PASS})
"""Verdicts that rest on a comparison with the oracle."""
_WORST_FIRST = (FAIL, ERROR, UNEXPECTED_PASS, EXPECTED_FAIL, PASS, UNJUDGED, UNSUPPORTED)

# Fields of a record with text that may come from a kernel or its author.
_TEXT_FIELDS = (
    "implementation",
    "platform",
    "case",
    "check",
    "observable",
    "reason",
    "remedy",
    "pattern",
    "reproduce",
    "host",
)
_FIGURE_FIELDS = ("ratio", "rms", "ratio_flash", "limit", "rms_limit", "margin")
_get_figures = operator.attrgetter(*_FIGURE_FIELDS)
_get_texts = operator.attrgetter(*_TEXT_FIELDS)
_get_key = operator.attrgetter("implementation", "platform", "case", "check", "observable", "run")

if TYPE_CHECKING:
    Figure: TypeAlias = float
else:
    Figure = int | float | Literal["inf", "-inf", "nan"]
"""A number that may be infinite or NaN. JSON has no such numbers, so files have them as strings."""

_NOTHING: Mapping[str, Any] = {}


def _get_nothing() -> Mapping[str, Any]:
    return _NOTHING  # one mapping for all records, most of which have none


def parse_figures(struct: Struct, names: Iterable[str]) -> None:
    """Replace the figures that a file has as strings by the numbers that they mean."""
    for name in names:
        if isinstance(figure := getattr(struct, name), str):
            force_setattr(struct, name, float(figure))


class Worst(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The element with the largest ratio: its index, its value, the expected value and the error bound there."""

    index: tuple[int, ...]
    got: Figure
    expected: Figure
    bound: Figure

    def __post_init__(self) -> None:
        if str in map(type, (self.got, self.expected, self.bound)):
            parse_figures(self, ("got", "expected", "bound"))


class Record(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag_field="schema", tag=RECORD_SCHEMA
):
    """One judged observable of one case, or the reason why it was not judged.

    Attributes:
      implementation: the name of the implementation.
      platform: the JAX backend on which it was judged.
      case: the id of the case.
      check: the name of the check.
      observable: the name of the result that was judged.
      verdict: one of `VERDICTS`.
      dtype: the dtype of the operands.
      features: the features of the case.
      ratio: the largest `|got - expected| / bound` over the elements, judged against `limit`. For the check `ensemble`,
        the size of a statistic over many elements instead: `bias` or `spread`, which `observable` names.
      rms: the root mean square of `|got - expected| / bound`, judged against `rms_limit` if that is set.
      ratio_flash: for gradients, the largest ratio if the expected value is the backward pass recomputed from the
        implementation's own saved `out` and `logsumexp`. It is shown and not judged.
      limit: the limit of `ratio`.
      rms_limit: the limit of `rms`.
      margin: how well the case discriminates. Of all simple wrong results, the smallest ratio, in units of the limit.
      worst: the element with the largest ratio.
      reason: the reason for the verdict, in words.
      remedy: for failures, a weaker declaration with which the check was seen to pass on this case.
      pattern: for failures, where the error is and which known form it has, in words; empty if no known form fits.
      error_map: for failures, a coarse picture of where the error is. Only results that are compared directly have one.
      reproduce: the command that repeats only this judgement.
      seconds: the time of judging, in seconds.
      figures: numbers that were measured and not judged (`compile_seconds`, `temporary_bytes`, ...). If rounding could
        change which keys some queries select, `undecided_rows` of the case's `rows` were left out of the judgement. A
        result that failed under the flags that make compiling cheap is judged again under JAX's own flags. Then
        `ratio_fast_compile` is the first ratio, and `flags_differ` is present if the verdicts differ. A user's kernel
        that was judged with `--in-process` has `in_process`.
      files: digests of the files that the kernel read for the first time during this judgement. The run record has the
        files that the kernel read when it was loaded.
      host: the host that judged it, if an executor did, such as a cluster; else empty, for the host of the run.
      run: a label of the record's run if runs that differ were merged; else empty. The label is not written to files,
        since the record's position in a file shows its run.
    """

    implementation: str
    platform: str
    case: str
    check: str
    observable: str
    verdict: str
    dtype: str = ""
    features: tuple[str, ...] = ()
    ratio: Figure | None = None
    rms: Figure | None = None
    ratio_flash: Figure | None = None
    limit: Figure | None = None
    rms_limit: Figure | None = None
    margin: Figure | None = None
    worst: Worst | None = None
    reason: str = ""
    remedy: str = ""
    pattern: str = ""
    error_map: ErrorMap | None = None
    reproduce: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Figure] = field(default_factory=_get_nothing)
    files: Mapping[str, str] = field(default_factory=_get_nothing)
    host: str = ""
    run: Annotated[str, Meta(max_length=0)] = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")
        if str in map(type, _get_figures(self)):
            parse_figures(self, _FIGURE_FIELDS)
        if self.figures and str in map(type, self.figures.values()):
            force_setattr(self, "figures", {name: float(figure) for name, figure in self.figures.items()})
        if not is_printable("".join(_get_texts(self))):
            for name in _TEXT_FIELDS:
                force_setattr(self, name, make_printable(getattr(self, name)))

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the judgement. Records with the same key are judgements of the same observable."""
        return _get_key(self)


def merge_records(*groups: Iterable[Record]) -> list[Record]:
    """Merge records in the order of their keys; of two with the same key, keep the worse verdict.

    Two runs of the same kernel under the same conditions should agree. If one of them fails, the pass of the other
    proves nothing.
    """
    ordered = sorted(itertools.chain(*groups), key=lambda record: record.key)
    merged = ordered[:1]
    for record in ordered[1:]:
        if record.key != merged[-1].key:
            merged.append(record)
        elif _WORST_FIRST.index(record.verdict) < _WORST_FIRST.index(merged[-1].verdict):
            merged[-1] = record
    return merged
