"""Split a bound into terms by source of rounding, and find which term an error resembles.

To first order, a bound is a sum over everything that rounds. The term of one source is the bound of an arithmetic in
which nothing else rounds. If errors are not small (`expm1`, the cap on a probability's error), the terms do not add up
to the bound. Callers then report the difference. The command `explain --impl` prints the terms and the resemblance.

An error that comes from one source is, element by element, the source's term times a random number. So the logarithm of
error over term varies over the elements like that of a normal number's magnitude, with variance `pi^2 / 8`. For another
source's term it varies more. The error resembles the term that leaves the smallest variance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cases.operand_values import Cotangent, Problem
from conformance.truth.declared_formulas import compute_declared_expectation_for_roundoff
from conformance.truth.oracle import Array, EmptyRows
from conformance.truth.rounding_bounds import Expectation
from conformance.truth.roundoff import Roundoff
from impls.contract.declarations import Arithmetic, Formulas

SOURCES = {
    "products": "rounding the products of f32 operands",
    "coarse": "rounding operands of products to fewer bits, as declared",
    "scaled_q": "rounding the scaled q to the operands' dtype, as declared",
    "cache": "rounding keys and values times the scales of the cache",
    "depth": "summing logits over the head dimension, in f32",
    "logits": "rounding logits to the operands' dtype, as declared",
    "softmax": "a softmax in the operands' dtype, as declared",
    "exponent": "storing, shifting and exponentiating logits, in f32",
    "cap": "the tanh of the soft cap and its slope, in f32",
    "probabilities": "rounding probabilities to the operands' dtype",
    "dropout": "the factor of dropout and its product with a weight",
    "sums": "sums over keys, queries and the depth of values, in f32",
    "block_sums": "rounding sums after each block, as declared",
    "group_sums": "rounding sums over the heads of a group, as declared",
    "log": "the logarithm and the pivot added to it, in f32",
    "backward": "differences and products of the backward pass, in f32",
    "base": "converting logsumexp to base 2, as declared",
    "residuals": "rounding residuals to the operands' dtype, as declared",
    "out": "rounding results to the operands' dtype",
    "bias": "rounding dbias to the dtype of the bias",
    "tiny": "underflow",
}
"""Sources of rounding: a description of each, by the field of `Roundoff` that holds its unit roundoff."""
_CONTRACT = Formulas()
MIN_ELEMENTS = 64  # fewest elements with an error for which a resemblance is looked for
# Least share of the variance that a term must explain: several times what chance explains in `MIN_ELEMENTS` elements.
_MIN_EXPLAINED = 0.05
_MIN_RANDOM_VARIANCE = np.pi**2 / 8 / 4  # a quarter of the variance of the logarithm of a normal number's magnitude
_MAX_RANDOM_VARIANCE = np.pi**2 / 8 * 3  # three times it: bounds are no exact standard deviations
_ALIKE_SHARE = 0.02  # terms whose remaining variance is within this share of the smallest are reported together


@dataclasses.dataclass(frozen=True)
class Resemblance:
    """The rounding sources that an error resembles."""

    sources: tuple[str, ...]  # names of the sources, the best first
    # Typical quotient of the errors and the best source's term. For random errors, it is the root mean square of normal
    # numbers with the same mean logarithm. Otherwise it is the geometric mean of the quotients.
    times: float
    # Whether the quotients vary as those of rounding errors do. They vary less if the errors are nearly a constant
    # multiple of the term, and more if something else than rounding is wrong in some elements.
    is_random: bool


def compute_expectation_by_source(
    problem: Problem,
    arithmetic: Arithmetic,
    cotangents: Sequence[Cotangent] = (),
    *,
    formulas: Formulas = _CONTRACT,
    empty_rows: EmptyRows = "zero",
) -> dict[str, Expectation]:
    """Compute, for each source that rounds at all, the exact results and the bounds if only this source rounds."""
    whole = Roundoff.of(arithmetic, problem)
    sizes = {name: getattr(whole, name) for name in SOURCES}
    silent = dict.fromkeys(SOURCES, 0.0)
    return {
        name: compute_declared_expectation_for_roundoff(
            problem, dataclasses.replace(whole, **silent | {name: size}), formulas, cotangents, empty_rows=empty_rows
        )
        for name, size in sizes.items()
        if size
    }


def list_terms(terms: Mapping[str, Array], index: tuple[int, ...], bound: float) -> list[tuple[str, float]]:
    """List the terms of the bound at one element, largest first, without terms below 0.05% of the bound."""
    found = [(name, float(term[index])) for name, term in terms.items()]
    return sorted((one for one in found if one[1] > 5e-4 * bound), key=lambda one: -one[1])


def find_resemblance(
    error: Array, terms: Mapping[str, Array], judged: Array, *, most: float = np.inf
) -> Resemblance | None:
    """Find the terms that have the shape of an error over the elements.

    Args:
      terms: the term of each source, in the same shape.
      most: the largest multiple of a term that errors may be on average and still resemble it.

    Returns:
      the resemblance; None if no term explains enough, or fewer than `MIN_ELEMENTS` elements have an error.
    """
    off = judged & (error > 0) & np.isfinite(error)
    if off.sum() < MIN_ELEMENTS:
        return None
    size = np.log(error[off])
    left: dict[str, float] = {}
    times: dict[str, float] = {}
    for name, term in terms.items():
        there = term[off]
        if not (there > 0).all():  # an element has an error although this source causes none there
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
    return Resemblance(tuple(alike), times[best], _MIN_RANDOM_VARIANCE < left[best] < _MAX_RANDOM_VARIANCE)


def select_bounds(expected: Mapping[str, Expectation], pick: Callable[[Expectation], Array]) -> dict[str, Array]:
    """Return the bound of one result for each source; `pick` takes this bound from an expectation."""
    return {name: pick(one) for name, one in expected.items()}
