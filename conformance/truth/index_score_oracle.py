"""Compute the scores of the keys that a lightning indexer chose, and their gradients, in float64, with error bounds.

The formulas and bounds are derived in docs/numerics.md, section "Scores of an indexer".
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cases.lightning_mask import LIMIT, multiply_head
from conformance.truth.rounding_bounds import Bounded
from conformance.truth.roundoff import UNIT_ROUNDOFF, U

_Array = np.ndarray


def compute_index_scores(
    q: _Array, k: _Array, weights: _Array, indices: _Array, cotangent: _Array, dtype: str
) -> Mapping[str, Bounded]:
    """Return `scores [B, T, e]` of listed keys, and the gradients `dq`, `dk` and `dweights` for a cotangent of them.

    Args:
      q: the indexer's queries `[B, T, N, D]`.
      k: its keys `[B, S, D]`.
      weights: the weights of heads `[B, T, N]`.
      indices: the listed places `[B, T, e]`; -1 names none, and its score and cotangent do not count.
      cotangent: the cotangent of the scores, `[B, T, e]`.
      dtype: the dtype of the operands and of their gradients, such as `bf16`.
    """
    q, k, weights, cotangent = (x.astype(np.float64) for x in (q, k, weights, cotangent))
    named, at = indices >= 0, np.maximum(indices, 0)
    cotangent = np.where(named, cotangent, 0)
    heads = q.shape[2]
    rows = np.arange(q.shape[0])[:, None, None], np.arange(q.shape[1])[:, None], at
    scores, score_errors = (np.zeros(at.shape) for _ in range(2))
    found = {name: np.zeros(x.shape) for name, x in (("dq", q), ("dk", k), ("dweights", weights))}
    sizes, doubts = ({name: np.zeros(x.shape) for name, x in found.items()} for _ in range(2))
    for n in range(heads):
        products, errors = (np.take_along_axis(x, at, axis=2) for x in multiply_head(q[:, :, n], k))
        w, errors = weights[:, :, n, None], np.where(products < -errors, 0, errors)
        above = np.maximum(products, 0)
        scores += w * above
        score_errors += np.abs(w) * (errors + np.where(errors > 0, LIMIT * U * heads * np.abs(products), 0))
        found["dweights"][:, :, n] = (cotangent * above).sum(axis=-1)
        sizes["dweights"][:, :, n] = (np.abs(cotangent) * above).sum(axis=-1)
        doubts["dweights"][:, :, n] = (np.abs(cotangent) * errors).sum(axis=-1)
        # Where a product is 0 within its error, relu may have either slope, and the whole term is in doubt.
        is_doubtful = (np.abs(products) <= errors) | (products == 0)
        for into, factor, is_signed in (
            (found, (products > 0) * w * cotangent, True),
            (sizes, np.abs((products > 0) * w * cotangent), False),
            (doubts, np.abs(is_doubtful * w * cotangent), False),
        ):
            spread = np.zeros((*at.shape[:2], k.shape[1]))
            np.add.at(spread, rows, factor)
            own, keys = (q[:, :, n], k) if is_signed else (np.abs(q[:, :, n]), np.abs(k))
            into["dq"][:, :, n] += np.einsum("bts,bsd->btd", spread, keys)
            into["dk"] += np.einsum("bts,btd->bsd", spread, own)
    terms = {"dq": at.shape[2], "dk": q.shape[1] * heads, "dweights": at.shape[2]}
    rounding = 0.0 if dtype == "f32" else UNIT_ROUNDOFF[dtype]
    bounded = {"scores": Bounded(np.where(named, scores, 0), np.where(named, score_errors, np.inf))}
    for name, value in found.items():
        roundings = LIMIT * U * (3 + max(1, terms[name] ** 0.5 / 4))
        bound = roundings * sizes[name] + doubts[name]
        bound = bound + rounding * (np.abs(value) + bound) + _TINY[dtype]
        overflows = (dtype == "f16") & (np.abs(value) + bound > _LARGEST_F16)
        bounded[name] = Bounded(value, np.where(overflows, np.inf, bound))
    return bounded


_LARGEST_F16 = 65504.0
# The largest error of a gradient that underflows.
_TINY = {"f32": 2.0**-126, "bf16": 2.0**-126, "f16": 2.0**-25}
