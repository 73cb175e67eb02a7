"""Mask classes that differ by batch row or head: lengths, windows of a row or of a head, keys selected at run time.

Keys are selected at run time by booleans (`Indexer`) or by lists of their places (`Listed`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from cases.masks.mask_base import PARTIAL, Dense, Mask, Pair
from cases.masks.mask_formulas import SEQUENCE, Causal, Full, Window
from cases.masks.mask_numbers import FAR, require_integer, require_integers

__all__ = [
    "FIRST_TOKENS",
    "HeadWindow",
    "Indexer",
    "Lengths",
    "Listed",
    "OwnWindow",
    "Placed",
    "Tree",
    "VaryingWindow",
    "place",
]

FIRST_TOKENS = "first_tokens"
"""The feature of a window that also shows the first tokens of each sequence, besides that of the window."""


@dataclasses.dataclass(frozen=True, eq=False)
class Indexer(Dense):
    """Booleans `[B, 1, T, S]` that select keys for each query, known only at run time (sparse attention's indexer).

    No kernel may rely on the values at trace time, so `blocks` calls every block partial. The array may be a traced
    array of JAX or another library. Then the mask has no values yet, and can be neither compared nor hashed.
    """

    feature: ClassVar[str] = "indexer"
    traced: ClassVar[tuple[str, ...]] = ("array",)

    def __post_init__(self) -> None:
        if not self.at_run_time:
            super().__post_init__()
        elif self.array.ndim != 4:
            raise ValueError(f"mask array must be [b, n, T, S], got shape {self.array.shape}")

    @property
    def features(self) -> tuple[str, ...]:
        return (self.feature,)

    @property
    def at_run_time(self) -> bool:
        return not isinstance(self.array, np.ndarray)

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        self.check_lengths(q_length, kv_length)
        return self.array if self.at_run_time else super().dense(q_length, kv_length)

    def blocks(self, q_length: int, kv_length: int, block_q: int, block_kv: int) -> np.ndarray:
        if block_q <= 0 or block_kv <= 0:
            raise ValueError(f"block sizes must be positive, got block_q={block_q}, block_kv={block_kv}")
        self.check_lengths(q_length, kv_length)
        return np.full((*self.array.shape[:2], -(-q_length // block_q), -(-kv_length // block_kv)), PARTIAL, np.int8)

    def select_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        return Indexer(self.dense(*lengths)[:, :, start:stop])


@dataclasses.dataclass(frozen=True, eq=False)
class Listed(Mask):
    """The keys whose places are listed for each query, int32 `[B, T, k]`, known only at run time.

    All heads have the same lists. An entry of -1 names no key, and may stand anywhere in a list. The other entries are
    distinct places along the axis `S`, in any order. As in `Indexer`, the array may be a traced one of any library, and
    `blocks` calls every block partial.
    """

    indices: np.ndarray
    computed: ClassVar[bool] = False
    feature: ClassVar[str] = "indices"
    refusal: ClassVar[str] = "takes no lists of keys"
    traced: ClassVar[tuple[str, ...]] = ("indices",)

    def __post_init__(self) -> None:
        if self.indices.ndim != 3:
            raise ValueError(f"mask indices must be [B, T, k], got shape {self.indices.shape}")
        if np.dtype(self.indices.dtype).kind != "i":
            raise ValueError(f"mask indices must be signed integers, got {self.indices.dtype}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listed) and np.array_equal(self.indices, other.indices)

    def __hash__(self) -> int:
        return hash((self.indices.shape, self.indices.tobytes()))

    @property
    def at_run_time(self) -> bool:
        return not isinstance(self.indices, np.ndarray)

    def allowed(self, i: Any, j: Any) -> Any:
        return (self.indices[:, i] == j[..., None]).any(axis=-1)[:, None]

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        self.check_lengths(q_length, kv_length)
        found: np.ndarray = (self.indices[..., None] == np.arange(kv_length)).any(axis=2)[:, None]
        return found

    def blocks(self, q_length: int, kv_length: int, block_q: int, block_kv: int) -> np.ndarray:
        if block_q <= 0 or block_kv <= 0:
            raise ValueError(f"block sizes must be positive, got block_q={block_q}, block_kv={block_kv}")
        self.check_lengths(q_length, kv_length)
        return np.full((len(self.indices), 1, -(-q_length // block_q), -(-kv_length // block_kv)), PARTIAL, np.int8)

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        if self.indices.shape[1] != q_length:
            raise ValueError(f"mask indices are for {self.indices.shape[1]} queries, the operands have T={q_length}")

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        if self.indices.shape[:2] != (batch, q_length):
            raise ValueError(f"mask indices must be [{batch}, {q_length}, k], got shape {self.indices.shape}")
        if not self.at_run_time and not ((self.indices >= -1) & (self.indices < kv_length)).all():
            raise ValueError(f"mask indices must be -1, or places of the {kv_length} keys")

    def select_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        return Listed(self.indices[:, start:stop])

    def select_keys(self, start: int, stop: int) -> Mask | None:
        is_there = (self.indices >= start) & (self.indices < stop)
        return Listed(np.where(is_there, self.indices - start, -1))


@dataclasses.dataclass(frozen=True)
class Lengths(Mask):
    """The mask `j < lengths[b]`: batch row `b` has only `lengths[b]` keys (ragged prefill and decode)."""

    lengths: tuple[int, ...]
    computed: ClassVar[bool] = False
    feature: ClassVar[str] = "lengths"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", require_integers("mask lengths", self.lengths))
        if any(n < 0 for n in self.lengths):
            raise ValueError(f"lengths must be >= 0, got {self.lengths}")

    def allowed(self, i: Any, j: Any) -> Any:
        lengths = np.asarray(self.lengths).reshape((-1, 1) + (1,) * np.ndim(j))
        return (j < lengths) & (i >= 0)

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        if len(self.lengths) != batch:
            raise ValueError(f"mask lengths must be {batch}, one a batch row, got {len(self.lengths)}")
        if max(self.lengths) > kv_length:
            raise ValueError(f"mask lengths must be at most the key length {kv_length}, got {self.lengths}")

    def select_keys(self, start: int, stop: int) -> Mask | None:
        return Lengths(tuple(min(max(n - start, 0), stop - start) for n in self.lengths))


@dataclasses.dataclass(frozen=True)
class OwnWindow(Mask):
    """The window `p - left <= j <= p` with `p = positions[b] + i`: each batch row has its own first position.

    The keys `j < first` with `j <= p` are seen too, wherever the window is (StreamingLLM, arXiv:2309.17453).

    Query 0 of batch row `b` stands at `positions[b]`. Ragged decode needs this window, because sequences have different
    lengths. With `left=None` it is a causal mask. A query at a negative position sees no key.
    """

    left: int | None
    positions: tuple[int, ...]
    first: int = 0
    computed: ClassVar[bool] = False
    feature: ClassVar[str] = "own_window"
    refusal: ClassVar[str] = "takes no window that moves with each batch row"

    def __post_init__(self) -> None:
        left = None if self.left is None else require_integer("window left", self.left)
        positions = require_integers("mask positions", self.positions)
        first = require_integer("window first", self.first)
        if left is not None and left < 0:
            raise ValueError(f"window left must be >= 0 or None (unbounded), got {left}")
        if first < 0:
            raise ValueError(f"window first must be >= 0, got {first}")
        if any(abs(position) > FAR for position in positions):
            raise ValueError(f"mask positions must be at most {FAR} from 0, got {positions}")
        # A window of `2 * FAR` keys reaches all keys from any of these positions, so it is unbounded.
        object.__setattr__(self, "left", None if left is None or left >= 2 * FAR else left)
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "first", 0 if self.left is None else min(first, FAR))

    @property
    def features(self) -> tuple[str, ...]:
        return (self.feature, FIRST_TOKENS) if self.first else (self.feature,)

    @property
    def query_order(self) -> str:
        return SEQUENCE

    def allowed(self, i: Any, j: Any) -> Any:
        position = np.asarray(self.positions).reshape((-1, 1) + (1,) * np.ndim(j)) + i
        ok = j <= position
        return ok if self.left is None else ok & ((j >= position - self.left) | (j < self.first))

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        if len(self.positions) != batch:
            raise ValueError(f"the mask must have {batch} positions, one for each batch row, got {len(self.positions)}")

    def select_keys(self, start: int, stop: int) -> Mask | None:
        positions = tuple(n - start for n in self.positions)
        return dataclasses.replace(self, positions=positions, first=max(0, self.first - start))


@dataclasses.dataclass(frozen=True)
class HeadWindow(Mask):
    """The window `i - lefts[n] <= j <= i`: each query head `n` has its own left side."""

    lefts: tuple[int, ...]
    computed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lefts", require_integers("window lefts", self.lefts))
        if any(left < 0 for left in self.lefts):
            raise ValueError(f"window lefts must be >= 0, got {self.lefts}")

    def allowed(self, i: Any, j: Any) -> Any:
        lefts = np.asarray(self.lefts).reshape((1, -1) + (1,) * np.ndim(j))
        return (j <= i) & (j >= i - lefts)

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        if len(self.lefts) != num_q_heads:
            raise ValueError(f"the mask must have {num_q_heads} sides, one for each query head, got {len(self.lefts)}")


@dataclasses.dataclass(frozen=True)
class Placed(Mask):
    """A formula of places whose queries begin at another position in each batch row.

    Query 0 of batch row `b` stands at `positions[b]`. So `i` of the formula is the query's position in its sequence.
    """

    mask: Mask
    positions: tuple[int, ...]
    computed: ClassVar[bool] = False
    feature: ClassVar[str] = "placed"
    refusal: ClassVar[str] = "takes no mask that moves with each batch row"

    def __post_init__(self) -> None:
        if not self.mask.is_computed:
            raise ValueError(f"only a formula of places has positions, got {self.mask}")
        object.__setattr__(self, "positions", require_integers("mask positions", self.positions))

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.mask.features, self.feature)

    @property
    def query_order(self) -> str:
        return SEQUENCE

    def allowed(self, i: Any, j: Any) -> Any:
        return self.mask.allowed(np.asarray(self.positions).reshape((-1, 1) + (1,) * np.ndim(j)) + i, j)

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        if len(self.positions) != batch:
            raise ValueError(f"the mask must have {batch} positions, one for each batch row, got {len(self.positions)}")


@dataclasses.dataclass(frozen=True)
class VaryingWindow(Mask):
    """The window `p - left_bn <= j <= p`, whose left side differs by batch row and by query head.

    `left_bn` is `left + (5 b + 3 n) % 8`, and `p` is `positions[b] + i`, or `i` where there are no positions.
    """

    left: int
    positions: tuple[int, ...]
    num_q_heads: int
    computed: ClassVar[bool] = False
    feature: ClassVar[str] = Placed.feature
    refusal: ClassVar[str] = Placed.refusal

    @property
    def query_order(self) -> str:
        return SEQUENCE

    def compute_left(self, b: Any, n: Any) -> Any:
        """Compute the left side of the window for batch row `b` and query head `n`."""
        return self.left + (5 * b + 3 * n) % 8

    def allowed(self, i: Any, j: Any) -> Any:
        ones = (1,) * np.ndim(j)
        b = np.arange(len(self.positions)).reshape((-1, 1, *ones))
        n = np.arange(self.num_q_heads).reshape((1, -1, *ones))
        position = np.asarray(self.positions).reshape((-1, 1, *ones)) + i
        return (j <= position) & (j >= position - self.compute_left(b, n))

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        if (len(self.positions), self.num_q_heads) != (batch, num_q_heads):
            given = f"{len(self.positions)} batch rows and {self.num_q_heads} heads"
            raise ValueError(f"the mask is for {given}, the operands have {batch} and {num_q_heads}")


@dataclasses.dataclass(frozen=True, eq=False)
class Tree(Dense):
    """Booleans `[B, 1, T, S]` of speculative decoding: a drafted token sees all keys before the draft, and ancestors.

    The drafted tokens of a sequence are its last queries and its last keys, and form a tree (SpecInfer,
    arXiv:2305.09781). Each sees itself, the tokens from which it follows, and all keys before the drafted ones.
    """

    feature: ClassVar[str] = "tree"
    refusal: ClassVar[str] = "takes no tree of drafted tokens"

    @property
    def features(self) -> tuple[str, ...]:
        return (self.feature,)


def place(mask: Mask, positions: tuple[int, ...]) -> Mask:
    """Return `mask` with queries that begin at `positions[b]` in batch row `b`; arrays and `Full` stay as they are."""
    if isinstance(mask, Pair):
        return type(mask)(place(mask.left, positions), place(mask.right, positions))
    if not mask.is_computed or isinstance(mask, Full):
        return mask
    if isinstance(mask, Causal | Window) and mask.offset == 0 and getattr(mask, "right", 0) == 0:
        return OwnWindow(getattr(mask, "left", None), positions)
    return Placed(mask, positions)
