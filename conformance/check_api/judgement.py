"""What a check says about one observable, before it becomes a record."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from conformance import records
from conformance.execution import kernel_errors
from conformance.records import Worst
from conformance.sandbox.kernel_process import ProcessLost
from conformance.truth.comparison import Comparison
from conformance.truth.error_patterns.failure import Failure
from conformance.truth.tolerances import RMS_MIN_ELEMENTS, Tolerances

_SELECTED: contextvars.ContextVar[Collection[str] | None] = contextvars.ContextVar("only", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict on one observable, with its evidence; `failure` is what a failed comparison was of, to be looked at."""

    observable: str
    verdict: str
    ratio: float | None = None
    rms: float | None = None
    ratio_flash: float | None = None
    limit: float | None = None
    rms_limit: float | None = None
    worst: Worst | None = None
    reason: str = ""
    remedy: str = ""
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failure: Failure | None = dataclasses.field(default=None, repr=False, compare=False)


def judge_comparison(
    observable: str,
    comparison: Comparison,
    *,
    dtype: str,
    tolerances: Tolerances,
    label: str | None = None,
    flash: Comparison | None = None,
) -> Judgement:
    """Judge a comparison against the tolerance table.

    Args:
      observable: which limit applies.
      comparison: against the truth.
      dtype: of the operands.
      tolerances: the table in force.
      label: how the record names the observable, if not by its plain name.
      flash: the same value compared with the flash backward from the implementation's own saved results: evidence of
        how an error arises, not a judgement, since what was saved is judged by itself.
    """
    limit = tolerances.limit(dtype, observable)
    use_rms = comparison.count >= RMS_MIN_ELEMENTS
    reasons = []
    if comparison.problem:
        reasons.append(comparison.problem)
    elif not comparison.ratio <= limit.ratio:
        reasons.append("ratio {} exceeds {}".format(*format_distinct(comparison.ratio, limit.ratio)))
    if use_rms and not comparison.rms <= limit.rms:
        reasons.append("rms {} exceeds {}".format(*format_distinct(comparison.rms, limit.rms)))
    if not comparison.count and not comparison.problem:
        return Judgement(
            observable=label or observable,
            verdict=records.UNJUDGED,
            reason="no row of this case has one right answer: each may attend to nothing, which is declared undefined, "
            "or rounding decides what it attends to",
        )
    return Judgement(
        observable=label or observable,
        verdict=records.FAIL if reasons else records.PASS,
        ratio=comparison.ratio,
        rms=comparison.rms,
        ratio_flash=None if flash is None else flash.ratio,
        limit=limit.ratio,
        rms_limit=limit.rms if use_rms else None,
        worst=comparison.worst,
        reason="; ".join(reasons),
    )


def format_distinct(value: float, limit: float) -> tuple[str, str]:
    """Two figures in words, with three digits or as many as it takes to tell them apart."""
    digits = 3
    while digits < 17 and value != limit and f"{value:.{digits}g}" == f"{limit:.{digits}g}":
        digits += 1
    return f"{value:.{digits}g}", f"{limit:.{digits}g}"


def build_unsupported(observable: str, reason: str) -> Judgement:
    """Declared as not offered."""
    return Judgement(observable=observable, verdict=records.UNSUPPORTED, reason=reason)


def add_label(name: str, judged: Iterable[Judgement]) -> Iterator[Judgement]:
    """Judgements with `name` behind each observable: `out.name`."""
    for judgement in judged:
        yield dataclasses.replace(judgement, observable=f"{judgement.observable}.{name}")


def catch_errors(observable: str, judge: Callable[[], Iterable[Judgement]]) -> Iterator[Judgement]:
    """Judgements as they come. What the implementation raises becomes one of `observable`, and ends them.

    A crash is a verdict, not the end of the run.
    """
    try:
        yield from judge()
    except NotImplementedError as error:
        refused = build_unsupported(
            observable, kernel_errors.describe_refusal(error) or "the call raises NotImplementedError"
        )
        yield dataclasses.replace(refused, figures={records.REFUSED: 1.0})
    except BaseException as error:  # of any type: whatever the implementation raises is the finding
        left = (
            isinstance(error, GeneratorExit) and kernel_errors.find_place(error) is None
        )  # by whoever asked: no error
        if left or isinstance(error, KeyboardInterrupt | ProcessLost):
            raise
        yield Judgement(observable=observable, verdict=records.ERROR, reason=kernel_errors.describe_kernel_error(error))


def run_subcheck(name: str, judge: Callable[[], Iterable[Judgement]]) -> Iterator[Judgement]:
    """Judgements labelled with `name`, of one of several questions: what it raises says nothing about the others."""
    only = _SELECTED.get()
    return iter(()) if only is not None and name not in only else catch_errors(name, lambda: add_label(name, judge()))


@contextlib.contextmanager
def select_subchecks(names: Collection[str] | None) -> Iterator[None]:
    """Of the questions that are told `apart`, only those of these names are asked within; all of them if none."""
    before = _SELECTED.set(names)
    try:
        yield
    finally:
        _SELECTED.reset(before)
