"""Check `ensemble`: find errors in bf16 and f16 below one rounding, by statistics over many elements and seeds.

Each observable has two statistics:

- **Bias** is the mean error away from zero, in units of half the spacing of the output dtype. A correct kernel has 0. A
  kernel that truncates instead of rounding has -1.
- **Spread** is the root mean square error, relative to that of a correct kernel (`conformance.truth.error_variance`).
  It shows a kernel that accumulates in the operands' dtype instead of f32, since such a kernel rounds at every step.

In f16 a sum in the operands' dtype may also overflow. The subcheck `wide_sums` runs the same compiled program on a
problem where such a sum does overflow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from cases.case import Case
from cases.operand_values import Cotangent
from conformance.check_api.judgement import Judgement, build_unsupported, run_subcheck
from conformance.check_api.subject import Subject
from conformance.execution.executor import Result
from conformance.truth.error_variance import ErrorVariance, compute_error_variance
from reports import records

SEEDS = 6
"""The number of problems per statistic; they differ in values only and share one compiled program."""

# The limits of both statistics separate correct kernels from faults. They follow from measurements on CPU with
# jax_nn_xla, jax_splash_tpu (both backward passes), jax_flash_tpu, jax_mha_gpu, dot_product, block_flash and two
# kernels of the tests:
# - Correct kernels: the largest spread is 1.00, as derived (1.04 with logits rounded to f16). The largest bias is
#   0.011, at standard errors of 0.001 to 0.004.
# - Declared rounding of partial sums, simulated with eight heads or blocks: a spread of 1.05, since sums of rounded
#   numbers are often a tie.
# - Undeclared rounding at each of 8 blocks, or of 8 heads of a group: a spread of 1.11 to 1.72.
# - Truncation: a bias of -1.00. A bf16 gradient that is too large by one part in 10^4: a bias of 0.03.
BIAS_LIMIT = 0.03
SPREAD_LIMIT = 1.1
# A bias of this many standard errors or fewer passes too, if that is more than `BIAS_LIMIT`. Many elements may share a
# few large errors (rounded logits, rounded sums of weights). Then the bias may exceed `BIAS_LIMIT` by chance.
_STANDARD_ERRORS = 6.0
# For `wide_sums`. The shift is added to values in the first half of the depth and subtracted in the second half.
# Cotangents are equal in both halves and multiplied by the factor. So products in `D = <out, do>` and in `<do, v>` are
# about 100,000, and sums over half of the depth are larger: both overflow f16. The sums over the whole depth must fit
# into f16: a kernel that casts probabilities to f16 gets the gradient of the cast in f16.
_VALUE_SHIFT = 256.0
_COTANGENT_FACTOR = 512.0
# The distance between the seeds of the problems of one case. It is so large that no two cases share a seed.
_SEED_STEP = 2**32


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The statistics of one observable."""

    bias: float  # the mean error away from zero, in units of half a spacing
    standard_error: float  # the standard error of `bias`
    spread: float  # the root mean square error, relative to the expected one


def check_ensemble(subject: Subject) -> Iterator[Judgement]:
    """Check that bf16 and f16 errors have no bias and no larger spread than roundings explain."""
    arithmetic = subject.implementation.arithmetic
    if arithmetic.scaled_q == "base2":
        yield build_unsupported(
            "all", 'with scaled_q="base2", all keys of a row share errors whose variance is not known'
        )
        return
    if subject.case.distribution != "normal" and arithmetic.softmax == "input":
        yield build_unsupported(
            "all", "with a softmax in the operands' dtype, rows share errors that are not derived here"
        )
        return
    if subject.case.bias is not None and "input" in (arithmetic.logits, arithmetic.softmax):
        yield build_unsupported("all", "with logits in the operands' dtype, errors of the biased logit are not known")
        return
    collected: dict[str, list[tuple[np.ndarray, ErrorVariance]]] = {}
    for case in list_reseeded_cases(subject.case):
        one = dataclasses.replace(subject, case=case)
        expected = compute_error_variance(one.problem, arithmetic, one.cotangents.get("random"))
        result = _run_case(one)
        for name, exact in expected.items():
            if name != "out" and name not in subject.implementation.gradients:
                continue
            got = result.values[name]
            if got.shape != exact.value.shape or got.dtype != one.problem.q.dtype:
                reason = f"got {got.dtype}{list(got.shape)}, must be {one.problem.q.dtype}{list(exact.value.shape)}"
                yield Judgement(observable=name, verdict=records.FAIL, reason=reason)
                return
            collected.setdefault(name, []).append((got, exact))
    for name, pairs in collected.items():
        yield from judge_statistics(name, compute_statistics(pairs), subject.case.dtype)
    # Other distributions have whole sums that overflow f16 if they are made so large.
    if subject.case.dtype == "f16" and subject.case.distribution == "normal" and "random" in subject.cotangents:
        yield from run_subcheck("wide_sums", functools.partial(_check_wide_sums, subject))


def _check_wide_sums(subject: Subject) -> Iterator[Judgement]:
    """Check f16 gradients where partial sums over the depth overflow f16 and whole sums do not."""
    if subject.implementation.arithmetic.softmax != "f32":
        yield build_unsupported(
            "gradients", "the softmax is declared in f16, so sums of its backward pass may overflow"
        )
        return
    v, drawn = subject.problem.v, subject.cotangents["random"].out
    half = v.shape[-1] // 2
    depth = np.arange(v.shape[-1])
    problem = dataclasses.replace(
        subject.problem, v=v + np.where(depth < half, _VALUE_SHIFT, -_VALUE_SHIFT).astype(v.dtype)
    )
    equal_halves = np.abs(drawn[..., np.where(depth < half, depth, depth - half)])
    cotangent = Cotangent("random", equal_halves * drawn.dtype.type(_COTANGENT_FACTOR))
    got = subject.executor.gradients(problem, cotangent).values
    expected = subject.expect(problem, [cotangent]).gradients[0]
    for name in subject.implementation.gradients:
        if name in got:
            yield subject.judge(name, got[name], expected[name])


def compute_statistics(pairs: list[tuple[np.ndarray, ErrorVariance]]) -> Statistics:
    """Compute the statistics of an observable over all elements of all problems.

    `pairs` holds for each problem the result and its exact values with expected variances.

    Elements of a row, along the last axis, share their probabilities. So the bias is computed row by row and then
    averaged over rows. The bias of a row is the sum of its errors divided by the sum of its half spacings. A mean of
    the elements' quotients would be wrong: near zero, the spacing of an element is far below its error.

    Rows of one problem may share errors too: a rounded sum of weights moves all rows of `dv`. Different problems share
    no errors. So the standard error is the larger of two: the one over rows, and the one over problems.
    """
    rows, squares = [], []
    for got, exact in pairs:
        with np.errstate(invalid="ignore", over="ignore"):
            error = got.astype(np.float64) - exact.value
            leaning = (error * np.sign(exact.value)).sum(axis=-1)
            squares.append(np.mean(error**2 / exact.variance))
        rows.append((leaning / (exact.ulp / 2).sum(axis=-1)).ravel())
    by_row, by_problem = np.concatenate(rows), np.array([each.mean() for each in rows])
    over_problems = by_problem.std(ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else 0.0
    return Statistics(
        bias=float(by_row.mean()),
        standard_error=float(max(by_row.std() / np.sqrt(by_row.size), over_problems)),
        spread=float(np.sqrt(np.mean(squares))),
    )


def list_reseeded_cases(case: Case) -> list[Case]:
    """List the `SEEDS` cases over which the statistics of `case` are computed; only their seeds differ."""
    return [dataclasses.replace(case, seed=(case.seed + number * _SEED_STEP) % 2**64) for number in range(SEEDS)]


def _run_case(subject: Subject) -> Result:
    """Run the forward and backward pass if the subject has gradients, else the forward call without residuals."""
    if "random" in subject.cotangents:
        return subject.gradients("random")
    return subject.executor.forward(subject.problem)


def judge_statistics(name: str, computed: Statistics, dtype: str) -> Iterator[Judgement]:
    """Judge both statistics of an observable, as `name.bias` and `name.spread`."""
    limit = max(BIAS_LIMIT, _STANDARD_ERRORS * computed.standard_error)
    yield _judge_statistic(f"{name}.bias", computed.bias, limit, _describe_bias(computed.bias))
    scatter = f"errors scatter {computed.spread:.3g} times as much as all roundings of a correct kernel together"
    if abs(computed.bias) <= limit:  # a larger bias explains the spread already
        scatter += f": is a sum rounded to {dtype} at every step, instead of being accumulated in f32?"
    yield _judge_statistic(f"{name}.spread", computed.spread, SPREAD_LIMIT, scatter)


def _describe_bias(bias: float) -> str:
    """Describe the direction of a bias and its likely cause."""
    side = "towards" if bias < 0 else "away from"
    cause = "truncation instead of rounding" if -1.1 < bias < -0.9 else "a systematic error below one rounding"
    return f"errors lean {side} zero by {abs(bias):.2g} of half a spacing: {cause}"


def _judge_statistic(observable: str, value: float, limit: float, reason: str) -> Judgement:
    """Judge the absolute value of a statistic by its limit; `reason` explains a failure."""
    passes = abs(value) <= limit
    if not np.isfinite(value):
        reason = "some results are not finite"
    return Judgement(
        observable=observable,
        verdict=records.PASS if passes else records.FAIL,
        ratio=abs(value),
        limit=limit,
        reason="" if passes else reason,
    )
