"""Explain the error of an implementation on a case, for `explain --impl`.

For each result, list the terms of the error bound at the worst element, and say which term the error resembles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from cases.case import Case
from conformance.check_api.subject import Subject
from conformance.execution.executor import Result
from conformance.sandbox.sandboxed_executor import SupportQueryFailed, create_executor
from conformance.session.failures import CannotJudge
from conformance.truth import bound_sources
from conformance.truth.comparison import compare
from conformance.truth.rounding_bounds import Bounded, Expectation
from conformance.truth.tolerances import Tolerances
from impls.contract.implementation import Implementation
from reports import text_format
from reports.metrics import Metric

_MAX_ROUNDING_TIMES = 8.0
"""The largest plausible ratio of a rounding error to its term. A larger error does not come from that rounding."""
_MAX_COARSER_TIMES = 2.0**16 * _MAX_ROUNDING_TIMES
"""The same if bfloat16 was rounded to in place of float32, which has 16 bits more."""
_MAX_COARSER_SHARE = 2.0**-5
"""The largest plausible error of such rounding, as a share of the values: a few units of bfloat16's last bit."""

_MAX_NAMED_TERMS = 3
_WHOLE_BOUND = "the whole bound"
_TERM_NAMES = {**bound_sources.SOURCES, _WHOLE_BOUND: "the bound as a whole, no term alone"}


def explain_bounds(implementation: Implementation, case: Case, tolerances: Tolerances) -> str:
    """Describe each result's worst error and its bound's terms. Raises `CannotJudge` if the case cannot run here."""
    subject = Subject(create_executor(implementation), case, tolerances)
    if (absent := implementation.accelerator.absent) is not None:
        raise CannotJudge(f"{implementation.name} cannot run here: {absent}")
    try:
        reason = implementation.supports(case)
    except SupportQueryFailed as error:
        raise CannotJudge(str(error)) from error
    if reason is not None:
        raise CannotJudge(f"{implementation.name} does not support {case.id}: {reason}")
    cotangents = {name: subject.cotangents[name] for name in subject.cotangents if name == subject.full_cotangent}
    with np.errstate(divide="ignore", invalid="ignore"):
        by_source = bound_sources.compute_expectation_by_source(
            subject.problem,
            implementation.arithmetic,
            list(cotangents.values()),
            formulas=implementation.formulas,
            empty_rows=subject.empty_rows,
        )
    lines = [f"{implementation.name} on {case.id}: the terms of the bound at the worst element of each result"]
    for name, result, bounded, judged, pick in _iter_results(subject):
        lines += [
            "",
            *_format_terms(subject, name, result, bounded, judged, bound_sources.select_bounds(by_source, pick)),
        ]
    return "\n".join(lines)


_OfferedResult = tuple[str, Callable[[], Result], Bounded, np.ndarray, Callable[[Expectation], np.ndarray]]


def _iter_results(subject: Subject) -> Iterator[_OfferedResult]:
    """Yield each offered result: its name, a function that computes it, its bounds, its judged elements, its terms."""

    def forward(name: str) -> Callable[[Expectation], np.ndarray]:
        return lambda expected: expected.forward[name].bound

    def gradient(name: str) -> Callable[[Expectation], np.ndarray]:
        return lambda expected: expected.gradients[0][name].bound

    truth = subject.expectation.forward
    yield "out", lambda: subject.forward, truth["out"], subject.judged_out, forward("out")
    for name in (name for name in truth if name in subject.implementation.residuals):
        yield name, lambda: subject.residuals, truth[name], subject.judged_residuals, forward(name)
    cotangent = subject.full_cotangent
    if cotangent in subject.cotangents:
        everywhere = np.ones((), bool)
        for name, bounded in subject.get_expected_gradients(cotangent).items():
            if name in subject.implementation.gradients:
                yield name, lambda: subject.gradients(cotangent), bounded, everywhere, gradient(name)


def _format_terms(
    subject: Subject,
    name: str,
    result: Callable[[], Result],
    bounded: Bounded,
    judged: np.ndarray,
    by_source: dict[str, np.ndarray],
) -> list[str]:
    try:
        values = result().values
    except Exception as error:  # a kernel may raise anything; show it in place of the terms
        return [f"{name}: raised {type(error).__name__}: {text_format.shorten_text(str(error), longest=300)}"]
    if name not in values:
        return [f"{name}: was not returned"]
    comparison = compare(values[name], bounded, judged)
    worst = comparison.worst
    if comparison.problem or worst is None:
        return [f"{name}: {comparison.problem or 'no element is judged'}"]
    limit = subject.limits.limit(subject.case.dtype, name)
    place = text_format.format_element(worst)
    lines = [f"{name}: {text_format.format_metric(Metric('max', comparison.ratio, limit.ratio))}", f"  {place}"]
    found = bound_sources.list_terms(by_source, worst.index, worst.bound)
    for source, size in found:
        part = f"{size / worst.bound:>4.0%}"
        lines.append(f"  {text_format.format_number(size):>9}  {part}  {bound_sources.SOURCES[source]}")
    rest = worst.bound - sum(size for _, size in found)
    if worst.bound and abs(rest) >= 0.01 * worst.bound:
        why = "more, since errors are not small here" if rest > 0 else "less, since not all are largest together"
        lines.append(f"  {text_format.format_number(rest):>9}  {rest / worst.bound:>4.0%}  {why}")
    if not worst.bound:
        lines.append("  nothing rounds here: the bound is zero, and the value must be exact")
    passes = comparison.ratio <= limit.ratio
    resemblance = _describe_resemblance(np.asarray(values[name]), bounded, judged, by_source, passes=passes)
    return [*lines, f"  {resemblance}"] if resemblance else lines


def _describe_resemblance(
    got: np.ndarray, bounded: Bounded, judged: np.ndarray, by_source: dict[str, np.ndarray], *, passes: bool
) -> str:
    """Return a sentence on the term that the errors of all elements resemble; empty if they are no rounding.

    Errors of a result that passes are compared with the terms that are not much smaller. Those of one that fails may
    also come from rounding to a dtype with fewer bits than is declared. No underflow is coarser than another.
    """
    error = np.abs(got.astype(np.float64) - bounded.value)
    counts = np.broadcast_to(judged, error.shape)
    most = _MAX_ROUNDING_TIMES if passes else _MAX_COARSER_TIMES
    found = bound_sources.find_resemblance(error, by_source | {_WHOLE_BOUND: bounded.bound}, counts, most=most)
    if found is None or not found.is_random:
        return ""
    is_coarser = found.times > _MAX_ROUNDING_TIMES
    judged_error, judged_values = error[counts], np.asarray(bounded.value)[counts]
    if is_coarser and np.linalg.norm(judged_error) > _MAX_COARSER_SHARE * np.linalg.norm(judged_values):
        return ""
    sources = [source for source in found.sources if not (is_coarser and source == "tiny")]
    if not sources:
        return ""
    named = ", or ".join(_TERM_NAMES[source] for source in sources[:_MAX_NAMED_TERMS])
    size = f"{text_format.format_number(found.times, digits=2)} times"
    if is_coarser:
        return f"the error resembles {named}, but is {size} it, as if that were done with fewer bits"
    return f"the error resembles {named}: {size} it by root mean square"
