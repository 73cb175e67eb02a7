"""Define judgements: the verdicts that checks yield, before the runner turns them into records.

Also turn comparisons with the oracle, and exceptions of a kernel, into judgements.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from conformance.execution import kernel_errors
from conformance.sandbox.kernel_process import ProcessLost
from conformance.truth.comparison import Comparison
from conformance.truth.error_patterns.failure import Failure
from conformance.truth.tolerances import RMS_MIN_ELEMENTS, Tolerances
from reports import records
from reports.records import Worst

_SELECTED: contextvars.ContextVar[Collection[str] | None] = contextvars.ContextVar("only", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict on one observable, with its evidence."""

    observable: str  # the name of what was judged, such as `out` or `dk.merged`
    verdict: str  # one of the verdicts of `reports.records`
    ratio: float | None = None  # the largest error in units of its bound
    rms: float | None = None  # the root mean square of these ratios
    # For gradients, the largest ratio if the expected value is the flash backward pass recomputed from the
    # implementation's own residuals. It is shown and not judged.
    ratio_flash: float | None = None
    limit: float | None = None  # the largest `ratio` that passes
    rms_limit: float | None = None  # the largest `rms` that passes; None if there are too few elements to judge it
    worst: Worst | None = None  # the element with the largest ratio
    reason: str = ""  # the reason for a verdict other than `pass`, or a note for the user
    remedy: str = ""  # a declaration or a change with which the user can make it pass
    # Measured numbers by name, which are shown and not judged.
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # The failed comparison, from which patterns of the error are derived.
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
    """Judge a comparison with the oracle by the table of limits.

    Args:
      observable: the name under which the table has the limit.
      label: the name in the record, if it differs from `observable`.
      flash: the same gradient compared with the flash backward pass recomputed from the implementation's own residuals.
        It is shown and not judged, since the residuals are judged separately. A small ratio here means that the error
        comes from the residuals.
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
            reason="no row of this case has one right result: each row either attends to nothing, which is declared "
            "undefined, or rounding decides which keys it attends to",
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
    """Format two numbers with three digits, or with as many digits as it takes to show that they differ."""
    digits = 3
    while digits < 17 and value != limit and f"{value:.{digits}g}" == f"{limit:.{digits}g}":
        digits += 1
    return f"{value:.{digits}g}", f"{limit:.{digits}g}"


def build_unsupported(observable: str, reason: str) -> Judgement:
    """Build the judgement of an observable that the implementation does not offer."""
    return Judgement(observable=observable, verdict=records.UNSUPPORTED, reason=reason)


def build_refused_precision(observable: str, reason: str) -> Judgement:
    """Build the judgement of an observable whose products request a precision that this platform refuses."""
    return Judgement(
        observable=observable,
        verdict=records.UNJUDGED,
        reason=f"only a platform with this precision can judge the kernel: {reason}",
        figures={records.REFUSED_PRECISION: 1.0},
    )


def add_label(name: str, judged: Iterable[Judgement]) -> Iterator[Judgement]:
    """Append `name` to the observable of each judgement, as in `out.name`."""
    for judgement in judged:
        yield dataclasses.replace(judgement, observable=f"{judgement.observable}.{name}")


def catch_errors(observable: str, judge: Callable[[], Iterable[Judgement]]) -> Iterator[Judgement]:
    """Yield judgements, and turn an exception of the implementation into one last judgement.

    A crash of the implementation is a verdict and must not end the run. `NotImplementedError` is reported as
    unsupported. A product of a precision that this platform does not offer leaves the rest unjudged. Everything else is
    an error.
    """
    try:
        yield from judge()
    except NotImplementedError as error:
        refused = build_unsupported(
            observable, kernel_errors.describe_refusal(error) or "the call raises NotImplementedError"
        )
        yield dataclasses.replace(refused, figures={records.REFUSED: 1.0})
    except BaseException as error:  # an implementation may raise any type
        # The caller may close this generator, which raises GeneratorExit here. That is no error of the implementation.
        is_closed = isinstance(error, GeneratorExit) and kernel_errors.find_place(error) is None
        if is_closed or isinstance(error, KeyboardInterrupt | ProcessLost):
            raise
        reason = kernel_errors.describe_kernel_error(error)
        if kernel_errors.is_refused_precision(error):
            yield build_refused_precision(observable, reason)
        else:
            yield Judgement(observable=observable, verdict=records.ERROR, reason=reason)


def run_subcheck(name: str, judge: Callable[[], Iterable[Judgement]]) -> Iterator[Judgement]:
    """Run one subcheck: label its judgements with `name`, and turn its exception into a judgement."""
    selected = _SELECTED.get()
    if selected is not None and name not in selected:
        return iter(())
    return catch_errors(name, lambda: add_label(name, judge()))


@contextlib.contextmanager
def select_subchecks(names: Collection[str] | None) -> Iterator[None]:
    """Run only the subchecks of these names within the block; all of them if `names` is None."""
    before = _SELECTED.set(names)
    try:
        yield
    finally:
        _SELECTED.reset(before)
