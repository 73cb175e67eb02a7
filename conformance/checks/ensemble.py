"""Errors of bf16 and f16 kernels below one rounding of the output, seen over many elements and seeds.

There are two statistics for each observable. **Bias** is the mean error away from zero, in units of half the spacing of
the output dtype. A correct kernel has 0; one that truncates instead of rounding has -1. **Spread** is the root mean
square error, as a multiple of what a correct kernel is expected to have (`conformance.truth.error_variance`). A kernel that
accumulates in the operands' dtype instead of f32 rounds at every step, which shows here.

In f16 a sum in the operands' dtype also overflows. That is asked too, of the program that there is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from cases.case import Case
from cases.operand_values import Cotangent
from conformance import records
from conformance.check_api.judgement import Judgement, build_unsupported, run_subcheck
from conformance.check_api.subject import Subject
from conformance.execution.executor import Result
from conformance.truth.error_variance import ErrorVariance, compute_error_variance

SEEDS = 6
"""Problems that the statistics run over; they differ in their values only and share one compiled program."""

# Over jax_nn_xla, jax_splash_tpu (both backward passes), jax_flash_tpu, jax_mha_gpu, dot_product, block_flash and two
# kernels written for the tests, on CPU, the largest spread is 1.00, as derived (1.04 with logits rounded to f16), and
# the largest bias 0.011, at standard errors of 0.001 to 0.004. Simulated sums of eight heads or blocks that are rounded
# on the way, as declared, have a spread of 1.05: sums of rounded numbers are often a tie. Undeclared, rounding at each
# of 8 blocks, or of 8 heads of a group, gives one of 1.13 to 1.72; truncation gives a bias of -1.00, and one part in
# 10^4 too much of a gradient in bf16 one of 0.03.
BIAS_LIMIT = 0.03
SPREAD_LIMIT = 1.1
# What shares few large errors (rounded logits, rounded sums of weights) may lean further by chance, but never this far.
_STANDARD_ERRORS = 6.0
# What is added to values in the first half of the depth and taken from those in the other, and by what cotangents grow,
# which are alike in both. So products in `D = <out, do>` and in `<do, v>` are some 100,000, and sums over half of the
# depth more, which f16 does not have. The whole sums are within: a probability that JAX casts to f16 has its gradient
# in f16.
_VALUE_SHIFT = 256.0
_COTANGENT_FACTOR = 512.0
# Seeds of one case lie this far apart, so that no two base seeds share a problem.
_SEED_STEP = 2**32


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Bias and its standard error, in units of half a spacing; spread, as a multiple of the expected one."""

    bias: float
    standard_error: float
    spread: float


def check_ensemble(subject: Subject) -> Iterator[Judgement]:
    """Over many seeds, errors in bf16 and f16 neither lean to one side nor scatter more than roundings explain."""
    collected: dict[str, list[tuple[np.ndarray, ErrorVariance]]] = {}
    for case in list_reseeded_cases(subject.case):
        one = dataclasses.replace(subject, case=case)
        expected = compute_error_variance(one.problem, one.implementation.arithmetic, one.cotangents.get("random"))
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
    if subject.case.dtype == "f16" and "random" in subject.cotangents:
        yield from run_subcheck("wide_sums", functools.partial(_check_wide_sums, subject))


def _check_wide_sums(subject: Subject) -> Iterator[Judgement]:
    """Gradients are right where parts of the sums over depth are beyond f16, and whole sums are not."""
    if subject.implementation.arithmetic.softmax != "f32":
        yield build_unsupported("gradients", "sums on the way back are declared in f16")
        return
    v, drawn = subject.problem.v, subject.cotangents["random"].out
    half = v.shape[-1] // 2
    depth = np.arange(v.shape[-1])
    problem = dataclasses.replace(
        subject.problem, v=v + np.where(depth < half, _VALUE_SHIFT, -_VALUE_SHIFT).astype(v.dtype)
    )
    alike = np.abs(drawn[..., np.where(depth < half, depth, depth - half)])
    cotangent = Cotangent("random", alike * drawn.dtype.type(_COTANGENT_FACTOR))
    got = subject.executor.gradients(problem, cotangent).values
    expected = subject.expect(problem, [cotangent]).gradients[0]
    for name in subject.implementation.gradients:
        if name in got:
            yield subject.judge(name, got[name], expected[name])


def compute_statistics(pairs: list[tuple[np.ndarray, ErrorVariance]]) -> Statistics:
    """Of results and what they should be, over all their elements.

    Elements of a row (along the last axis) share their probabilities, so the bias is taken row by row and then averaged
    over the rows. The bias of a row is the sum of its errors over the sum of its spacings. It is not a mean of
    quotients, since an element next to zero has a spacing far below its error. Rows of a problem may share errors too:
    a sum of weights that is rounded moves all rows of dv. Problems share none, so the standard error is the larger one
    of that over rows and that over problems.
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
    """The cases that the statistics of `case` run over."""
    return [dataclasses.replace(case, seed=(case.seed + number * _SEED_STEP) % 2**64) for number in range(SEEDS)]


def _run_case(subject: Subject) -> Result:
    if "random" in subject.cotangents:
        return subject.gradients("random")
    return subject.executor.forward(subject.problem)


def judge_statistics(name: str, found: Statistics, dtype: str) -> Iterator[Judgement]:
    """Judge both statistics of an observable, as `name.bias` and `name.spread`."""
    limit = max(BIAS_LIMIT, _STANDARD_ERRORS * found.standard_error)
    yield _judge_statistic(f"{name}.bias", found.bias, limit, _describe_bias(found.bias))
    scatter = f"errors scatter {found.spread:.3g} times as much as all roundings of a correct kernel together"
    if abs(found.bias) <= limit:  # else that is the explanation
        scatter += f": is a sum rounded to {dtype} at every step, instead of being accumulated in f32?"
    yield _judge_statistic(f"{name}.spread", found.spread, SPREAD_LIMIT, scatter)


def _describe_bias(bias: float) -> str:
    side = "towards" if bias < 0 else "away from"
    cause = "truncation instead of rounding" if -1.1 < bias < -0.9 else "an error below one rounding, but always there"
    return f"errors lean {side} zero by {abs(bias):.2g} of half a spacing: {cause}"


def _judge_statistic(observable: str, value: float, limit: float, reason: str) -> Judgement:
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
