"""Compute which keys a lightning indexer chooses, in float64.

The indexer of DeepSeek's sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2-Exp, equation 1) scores each key `s` for
each query `t` by `sum over heads h of w_th relu(<q_th, k_s>)`, and chooses the `topk` keys with the highest scores.

A case has no operands for an indexer alone. The first coordinate of q is the weight of its head, and the others are the
indexer's q. The first coordinate of k is left out. So a problem of attention whose mask is `Lightning` holds a problem
of an indexer, and `out` shows which keys were chosen (docs/contract.md, section 5).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from cases.masks.mask_numbers import require_integer
from cases.moba_mask import ChoosingMask, Chosen

_U = 2.0**-24  # unit roundoff of f32, in which scores are computed
LIMIT = 4.0
"""The multiple of their first-order error by which scores may be off, like results in the tolerance table."""


@dataclasses.dataclass(frozen=True)
class Lightning(ChoosingMask):
    """The mask of the `topk` keys with the highest scores, among all keys or those up to the query's own."""

    topk: int
    causal: bool = False
    offset: int = 0
    feature: ClassVar[str] = "lightning"
    refusal: ClassVar[str] = "is no indexer"

    def __post_init__(self) -> None:
        if require_integer("lightning topk", self.topk) < 1:
            raise ValueError(f"lightning topk must be at least 1, got {self.topk}")

    def choose(self, q: np.ndarray, k: np.ndarray) -> Chosen:
        """Choose the keys of all queries. Equal scores go to the key with the lower index."""
        weights, own, keys = split_indexer_operands(q, k)
        i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
        candidates = (j <= i + self.offset) if self.causal else np.ones((q.shape[1], k.shape[1]), bool)
        scores, errors = _score(weights.astype(np.float64), own.astype(np.float64), keys.astype(np.float64))
        order = np.argsort(np.where(candidates, -scores, np.inf), axis=-1, kind="stable")
        taken = np.zeros(scores.shape, bool)
        np.put_along_axis(taken, order[..., : self.topk], True, axis=-1)
        taken &= candidates
        decided = _find_decided(scores, errors, taken, candidates & ~taken, _find_first_equal_key(keys))
        shape = (q.shape[0], q.shape[2], q.shape[1])
        return Chosen(
            taken[:, None],
            decided=np.broadcast_to(decided[:, None], shape),
            choosing=candidates[None, None],
        )


def split_indexer_operands(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split `q [B, T, N, H]` and `k [B, S, 1, H]` into the weights `[B, T, N]`, q and k of an indexer.

    Its q is `[B, T, N, H - 1]`, and its k is `[B, S, H - 1]`.
    """
    return q[..., 0], q[..., 1:], k[:, :, 0, 1:]


def _score(weights: np.ndarray, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the scores of all keys and bounds of their errors in f32, `[B, T, S]` each.

    Where a head's product is negative however it rounds, the head adds exactly 0.
    """
    heads = q.shape[2]
    scores, errors = (np.zeros((*q.shape[:2], k.shape[1])) for _ in range(2))
    for n in range(heads):
        products, of_product = multiply_head(q[:, :, n], k)
        w = weights[:, :, n, None]
        scores += w * np.maximum(products, 0)
        errors += np.where(products < -of_product, 0, np.abs(w) * (of_product + LIMIT * _U * heads * np.abs(products)))
    return scores, errors


def multiply_head(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Multiply the queries `[B, T, D]` of a head by keys `[B, S, D]`; return products and their errors, `[B, T, S]`.

    A product is off by its roundings in f32, of which there are `D` one after another, in the worst order with random
    signs.
    """
    products = np.einsum("btd,bsd->bts", q, k)
    size = np.einsum("btd,bsd->bts", np.abs(q), np.abs(k))
    return products, LIMIT * _U * (1 + max(1, q.shape[-1] ** 0.5 / 4)) * size


def _find_decided(
    scores: np.ndarray, errors: np.ndarray, taken: np.ndarray, left: np.ndarray, same: np.ndarray
) -> np.ndarray:
    """Return for which queries no rounding can change the choice, booleans `[B, T]`.

    A choice is in doubt if a key is taken and another is left whose scores differ by less than the sum of their errors.
    Keys that are equal have equal scores however they round, and so have keys to which every head adds exactly 0.
    """
    decided = np.ones(scores.shape[:2], bool)
    for s in range(scores.shape[2]):
        close = scores[..., s, None] - scores <= errors[..., s, None] + errors
        equal = (same == same[:, s, None])[:, None] | ((errors == 0) & (errors[..., s, None] == 0))
        decided &= ~(taken[..., s] & (left & close & ~equal).any(axis=-1))
    return decided


def _find_first_equal_key(keys: np.ndarray) -> np.ndarray:
    """Return for each key `[B, S, D]` the index of the first key with the same numbers, `[B, S]`."""
    found = np.empty(keys.shape[:2], int)
    for b, row in enumerate(keys):
        first: dict[bytes, int] = {}
        found[b] = [first.setdefault((key + 0).tobytes(), s) for s, key in enumerate(row)]
    return found
