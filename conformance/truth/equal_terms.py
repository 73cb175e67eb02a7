"""Bound the error of sums of equal terms, whose roundings all go in the same direction.

The random walk of `gamma(n)` (`conformance.truth.rounding_bounds`) assumes that partial sums round independently. Equal
terms do not. While the sum stays between two powers of two, it is a multiple of its last place, and each equal term
leaves the same remainder. So `m` equal terms may be off by `m / 2` unit roundoffs of their sum: each partial sum rounds
by a unit of itself, the worst case (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). 365 equal
terms were measured to be off by 34 unit roundoffs; a random walk allows 4.8.

If only `logsumexp` has a cotangent, dq is such a sum: `dx = p dlse` is equal wherever the weights of a row are equal,
and many keys may share a coordinate.
"""

from __future__ import annotations

import numpy as np

from conformance.truth.oracle import Array
from conformance.truth.roundoff import compute_walk_steps


def compute_equal_term_excess(weights: Array, values: Array) -> Array | float:
    """Bound how far equal terms take the rounding error of `weights @ values` above that of a random walk.

    For weights `[G, T, S]` and values `[S, H]`, the excess is `[G, T, H]`, in unit roundoffs of the sum of magnitudes.
    The excess is 0 if few terms are equal.
    """
    walk = compute_walk_steps(values.shape[0])
    of_values = _count_most_frequent(values.T)  # [H]
    if (of_values / 2 <= walk).all():
        return 0.0
    alike = np.minimum(_count_most_frequent(weights)[..., None], of_values)
    return np.maximum(alike / 2 - walk, 0.0)


def _count_most_frequent(x: Array) -> Array:
    """Count how often the most frequent nonzero value (in f32) occurs along the last axis; adding zeros is exact."""
    ordered = np.sort(x.astype(np.float32), axis=-1)
    place = np.arange(ordered.shape[-1])
    begins = np.ones(ordered.shape, bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    run = place - np.maximum.accumulate(np.where(begins, place, 0), axis=-1) + 1
    return np.where(ordered == 0, 0, run).max(axis=-1)
