"""The terms of a bound, by what rounds, and which of them an error resembles.

A bound is to first order a sum over everything that rounds. The term of one source is the bound of an arithmetic in
which nothing else rounds. Where errors are no longer small (`expm1`, a probability's cap), the terms do not add up to
the bound; the rest is said.

An error of rounding is as large as its term, element by element, times a random number. So the logarithm of the error
less that of the term varies over the elements as that of a normal number does, by `pi^2 / 8`, and that of an error of
another source varies by more. The term that leaves the least is the one that the error resembles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cases.operand_values import Cotangent, Problem
from conformance.contract import Arithmetic
from conformance.truth.oracle import Array, EmptyRows
from conformance.truth.rounding_bounds import Expectation, compute_expectation_for_roundoff
from conformance.truth.roundoff import Roundoff

SOURCES = {
    "products": "rounding the products of f32 operands",
    "coarse": "rounding operands of products to fewer bits, as declared",
    "scaled_q": "rounding q * scale to the operands' dtype, as declared",
    "cache": "rounding keys and values times the scales of the cache",
    "depth": "summing logits over the head dimension, in f32",
    "logits": "rounding logits to the operands' dtype, as declared",
    "softmax": "a softmax in the operands' dtype, as declared",
    "exponent": "storing, shifting and exponentiating logits, in f32",
    "cap": "the tanh of the soft cap and its slope, in f32",
    "probabilities": "rounding probabilities to the operands' dtype",
    "sums": "sums over keys, queries and the depth of values, in f32",
    "block_sums": "rounding sums after each block, as declared",
    "group_sums": "rounding sums over the heads of a group, as declared",
    "log": "the logarithm and the pivot added to it, in f32",
    "backward": "differences and products of the backward pass, in f32",
    "residuals": "rounding residuals to the operands' dtype, as declared",
    "out": "rounding results to the operands' dtype",
    "bias": "rounding dbias to the dtype of the bias",
    "tiny": "underflow",
}
"""Every unit roundoff by the name of its field, and what rounds by it."""
MIN_ELEMENTS = 64  # elements that are off, to say what their errors resemble
_MIN_EXPLAINED = 0.05  # the share of the variance that a term must explain, several times what chance does for `ENOUGH`
_MIN_RANDOM_VARIANCE = np.pi**2 / 8 / 4  # a quarter of the variance of the logarithm of a normal number's magnitude
_ALIKE_SHARE = 0.02  # terms that explain within this share of the best are told together


@dataclasses.dataclass(frozen=True)
class Resemblance:
    """What errors resemble: names of sources, the best first, and how many times its term they are.

    `times` is the root mean square of normal numbers with the mean logarithm that the quotients have; where errors are
    not random, the geometric mean of the quotients.
    """

    sources: tuple[str, ...]
    times: float
    is_random: bool  # or always about the same multiple of the term, which no rounding is


def compute_expectation_by_source(
    problem: Problem,
    arithmetic: Arithmetic,
    cotangents: Sequence[Cotangent] = (),
    *,
    empty_rows: EmptyRows = "zero",
) -> dict[str, Expectation]:
    """What to expect where one source alone rounds, for each source that rounds at all."""
    whole = Roundoff.of(arithmetic, problem)
    sizes = {name: getattr(whole, name) for name in SOURCES}
    silent = dict.fromkeys(SOURCES, 0.0)
    return {
        name: compute_expectation_for_roundoff(
            problem, dataclasses.replace(whole, **silent | {name: size}), cotangents, empty_rows=empty_rows
        )
        for name, size in sizes.items()
        if size
    }


def list_terms(terms: Mapping[str, Array], index: tuple[int, ...], bound: float) -> list[tuple[str, float]]:
    """The terms at an element, largest first, without those that add nothing to three digits."""
    found = [(name, float(term[index])) for name, term in terms.items()]
    return sorted((one for one in found if one[1] > 5e-4 * bound), key=lambda one: -one[1])


def find_resemblance(
    error: Array, terms: Mapping[str, Array], judged: Array, *, most: float = np.inf
) -> Resemblance | None:
    """Which terms have the shape of an error, over the elements; none if none does, or too few elements are off.

    Args:
      error: `|got - expected|`.
      terms: by source, in the same shape.
      judged: which elements count.
      most: how many times a term an error may be to count as like it.
    """
    off = judged & (error > 0) & np.isfinite(error)
    if off.sum() < MIN_ELEMENTS:
        return None
    size = np.log(error[off])
    left: dict[str, float] = {}
    times: dict[str, float] = {}
    for name, term in terms.items():
        there = term[off]
        if not (there > 0).all():  # it cannot be that alone
            continue
        quotient = size - np.log(there)
        variance = float(quotient.var())
        # The mean logarithm of a normal number's magnitude is -(Euler's constant + ln 2) / 2.
        mean = quotient.mean() + (np.euler_gamma + np.log(2)) / 2 * (variance > _MIN_RANDOM_VARIANCE)
        if np.exp(mean) <= most:
            left[name], times[name] = variance, float(np.exp(mean))
    best = min(left, key=left.__getitem__, default=None)
    if best is None or left[best] > (1 - _MIN_EXPLAINED) * float(size.var()):
        return None
    alike = sorted((name for name in left if left[name] <= (1 + _ALIKE_SHARE) * left[best]), key=left.__getitem__)
    return Resemblance(tuple(alike), times[best], left[best] > _MIN_RANDOM_VARIANCE)


def select_bounds(expected: Mapping[str, Expectation], pick: Callable[[Expectation], Array]) -> dict[str, Array]:
    """The bounds of one result by source; `pick` finds it in an expectation."""
    return {name: pick(one) for name, one in expected.items()}
