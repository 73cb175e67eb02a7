"""Compute the mask of mixture of block attention (MoBA), in which queries choose chunks of keys, in float64.

It follows docs/contract.md, section 5, and the paper's definition (Lu et al. 2025, MoBA, arXiv:2502.13189, equations 2
to 6). Keys are cut into chunks. The gate of query `i` on a chunk is `<q_i, mean of the chunk's keys>`. A query always
attends to its own chunk, and never to a later one. The other `topk - 1` chunks are the earlier ones with the highest
gates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import numpy as np

from cases.masks import FAR, And, Dense, Mask, OffsetMask, Or, iter_leaves
from cases.masks.mask_numbers import require_integer

_U = 2.0**-24  # unit roundoff of f32, in which gates are computed
# Gates may be off by this multiple of their first-order error, like results in the tolerance table.
_LIMIT = 4.0


class ChoosingMask(OffsetMask):
    """Base of masks with which each query chooses its keys by q and k."""

    computed: ClassVar[bool] = False

    def choose(self, q: np.ndarray, k: np.ndarray) -> Chosen:
        """Return the pairs that the mask allows for `q [B, T, N, H]` and `k [B, S, K, H]`."""
        raise NotImplementedError

    def allowed(self, i: Any, j: Any) -> NoReturn:
        """Raise: which pairs may attend depends on q and k."""
        raise NotImplementedError(f"{self.feature}: which pairs may attend depends on q and k")

    def dense(self, q_length: int, kv_length: int) -> NoReturn:
        """Raise, as `allowed` does."""
        self.check_lengths(q_length, kv_length)
        self.allowed(None, None)

    def blocks(self, q_length: int, kv_length: int, block_q: int, block_kv: int) -> NoReturn:
        """Raise, as `allowed` does."""
        self.dense(q_length, kv_length)


@dataclasses.dataclass(frozen=True)
class Moba(ChoosingMask):
    """The mask of a query's own chunk up to the query, and of the `topk - 1` earlier chunks with the highest gates.

    Query `i` stands at position `i + offset`, which must be that of a key. The last chunk may be shorter. Which pairs
    are allowed depends on q and k (`resolve_choices`).
    """

    chunk: int
    topk: int
    offset: int = 0
    feature: ClassVar[str] = "moba"
    refusal: ClassVar[str] = "takes no mask that depends on q and k"

    def __post_init__(self) -> None:
        for name, given, least in (("chunk", self.chunk, 1), ("topk", self.topk, 1), ("offset", self.offset, 0)):
            value = require_integer(f"moba {name}", given)
            if value < least:
                raise ValueError(f"moba {name} must be at least {least}, got {value}")
            object.__setattr__(self, name, min(value, FAR))

    def count_chunks(self, kv_length: int) -> int:
        """Return the number of chunks into which `kv_length` keys are cut."""
        return -(-kv_length // self.chunk)

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        """Raise `ValueError` if a query stands beyond the last key: every query needs a chunk of its own."""
        if self.offset + q_length > kv_length:
            raise ValueError(
                f"moba: the last query is at position {self.offset + q_length - 1}, beyond the last of {kv_length} "
                f"keys: every query needs a chunk of its own, so offset + T must be at most S"
            )

    def choose(self, q: np.ndarray, k: np.ndarray) -> Chosen:
        return _choose_for_all(self, q, k)

    def find_earlier(self, q_length: int, kv_length: int) -> np.ndarray:
        """Return which chunks lie before each query's own chunk, booleans `[T, C]`: gates choose among these chunks."""
        own = (np.arange(q_length) + self.offset) // self.chunk
        return np.arange(self.count_chunks(kv_length)) < own[:, None]


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen(Dense):
    """The pairs that a mask with which queries choose keys allows, once q and k are known, `[B, N, T, S]`."""

    # Queries for which rounding of the f32 gates or scores cannot change the chosen chunks, booleans `[B, N, T]`.
    decided: np.ndarray
    choosing: np.ndarray  # keys that influence what a query chooses, booleans `[1, 1, T, S]`


def depends_on_data(mask: Mask) -> bool:
    """Return whether the allowed pairs depend on q and k."""
    return any(isinstance(leaf, ChoosingMask) for leaf in iter_leaves(mask))


def resolve_choices(mask: Mask, q: np.ndarray, k: np.ndarray) -> Mask:
    """Replace each mask with which queries choose keys by the pairs that it allows for `q` and `k`.

    `q` is `[B, T, N, H]` and `k` is `[B, S, K, H]`.
    """
    if isinstance(mask, And | Or):
        return type(mask)(resolve_choices(mask.left, q, k), resolve_choices(mask.right, q, k))
    return mask.choose(q, k) if isinstance(mask, ChoosingMask) else mask


def list_choices(mask: Mask) -> Iterator[Chosen]:
    """Iterate over the `Chosen` masks within a mask that `resolve_choices` returned."""
    return (leaf for leaf in iter_leaves(mask) if isinstance(leaf, Chosen))


def _choose_for_all(mask: Moba, q: np.ndarray, k: np.ndarray) -> Chosen:
    """Choose the chunks of all queries, in all batch rows and heads."""
    batch, q_length, num_q_heads, _ = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    mask.check_lengths(q_length, kv_length)
    earlier = mask.find_earlier(q_length, kv_length)
    taken = np.zeros((batch, num_q_heads, q_length, earlier.shape[1]), bool)
    decided = np.zeros((batch, num_q_heads, q_length), bool)
    for b in range(batch):
        for n in range(num_q_heads):
            keys = k[b, :, n // (num_q_heads // num_kv_heads)].astype(np.float64)
            taken[b, n], decided[b, n] = _choose(mask, q[b, :, n].astype(np.float64), keys, earlier)
    position = np.arange(q_length)[:, None] + mask.offset
    key = np.arange(kv_length)
    taken[:, :, np.arange(q_length), position[:, 0] // mask.chunk] = True
    by_key = key // mask.chunk
    return Chosen(
        taken[..., by_key] & (key <= position),
        decided=decided,
        choosing=(earlier[:, by_key] & (mask.topk > 1))[None, None],
    )


def _choose(mask: Moba, q: np.ndarray, k: np.ndarray, earlier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose among the earlier chunks for each query of one head, as booleans `[T, C]`.

    Also return booleans `[T]`, true for queries whose choice no rounding can change.
    """
    pieces = [k[start : start + mask.chunk] for start in range(0, len(k), mask.chunk)]
    same = _find_first_equal_chunk(pieces)
    means = np.stack([piece.mean(axis=0) for piece in pieces])  # [C, H]
    gates = (q @ means.T)[:, same]  # equal chunks get one gate, although the last bits of their products may differ
    order = np.argsort(np.where(earlier, -gates, np.inf), axis=1, kind="stable")  # ties go to the lower index
    taken = np.zeros(gates.shape, bool)
    np.put_along_axis(taken, order[:, : mask.topk - 1], True, axis=1)
    taken &= earlier
    error = np.sqrt(q**2 @ np.stack([(piece**2).mean(axis=0) for piece in pieces]).T) * max(1, mask.chunk**0.5 / 4)
    error += (np.abs(q) @ np.abs(means).T) * (1 + max(1, q.shape[1] ** 0.5 / 4))
    error *= _LIMIT * _U
    # A query's choice is in doubt if one chunk is taken and another is not, although their gates differ by less than
    # the sum of their errors. Equal chunks cause no doubt: their gates are equal however they round.
    doubt = np.zeros(len(q), bool)
    for c in range(gates.shape[1]):
        other = (earlier & ~taken) & (np.asarray(same) != same[c])
        close = gates[:, c, None] - gates <= error[:, c, None] + error
        tied = (error[:, c, None] + error) == 0
        doubt |= taken[:, c] & (other & close & ~tied).any(axis=1)
    return taken, ~doubt


def _find_first_equal_chunk(pieces: list[np.ndarray]) -> list[int]:
    """Return, for each chunk, the first one with the same keys in the same order."""
    first: dict[bytes, int] = {}
    return [first.setdefault(piece.tobytes(), c) for c, piece in enumerate(pieces)]
