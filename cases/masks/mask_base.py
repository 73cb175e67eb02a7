"""The base class of masks, masks given as arrays, and masks composed of others."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

__all__ = ["EMPTY", "FULL", "PARTIAL", "And", "Dense", "Mask", "Or", "Pair", "iter_leaves", "list_conjuncts"]

EMPTY, PARTIAL, FULL = 0, 1, 2


class Mask:
    """Base of all masks.

    `computed` masks are a formula of `(i, j)`, the same for every batch row and head. Their `allowed` works on any
    array type with operators (NumPy, JAX, a Pallas tile). The others are backed by an array `[b, n, T, S]`.

    Attributes:
      feature: what an implementation must support to take the mask (`cases.case.FEATURES`).
      refusal: how a message goes on that says why an implementation without the feature refuses the mask. It is empty
        if the feature is not opt-in.
      relative: whether the mask depends on `i - j` alone, so that it stays the same when queries and keys move
        together.
      traced: the fields that are masks or arrays of any library, which JAX traces; the others are static.
    """

    computed: ClassVar[bool] = True
    feature: ClassVar[str] = ""
    refusal: ClassVar[str] = ""
    relative: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ()

    def allowed(self, i: Any, j: Any) -> Any:
        """Return whether query `i` may attend to key `j`.

        The shape is that of `i` and `j` broadcast together, with `[b, n]` in front if the mask is not computed.
        """
        raise NotImplementedError

    @property
    def is_computed(self) -> bool:
        """True if `allowed` is one formula for every batch row and head."""
        return self.computed

    @property
    def at_run_time(self) -> bool:
        """True if the mask is unknown until run time: an `Indexer` whose array is not NumPy's."""
        return False

    @property
    def query_order(self) -> str:
        """The order of queries along their axis that the mask assumes; empty if it assumes none."""
        return ""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that a call with this mask needs.

        Those of a case's mask spec are the same or more.
        """
        return (self.feature or ("dense" if self.is_computed else "dense_batch"),)

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        """Raise `ValueError` if the mask is for other lengths."""

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        """Raise `ValueError`, naming the mask, if it is for other operands (docs/contract.md, section 7)."""

    def select_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        """Return the mask of queries `start` to `stop - 1` alone; `lengths` are T and S of the whole."""
        return Dense(self.dense(*lengths)[:, :, start:stop])

    def select_keys(self, start: int, stop: int) -> Mask | None:
        """Return the mask of keys `start` to `stop - 1` alone, or None if that has no form."""
        return None

    @property
    def key_step(self) -> int | None:
        """`select_keys` may cut at multiples of this; None if it may cut at any key."""
        return None

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        """Return booleans `[b, n, T, S]`, where `b` and `n` are 1 unless the mask differs by batch row or head."""
        self.check_lengths(q_length, kv_length)
        i = np.arange(q_length)[:, None]
        j = np.arange(kv_length)[None, :]
        allowed = np.asarray(self.allowed(i, j), bool)
        return np.array(np.broadcast_to(allowed, (*_get_leading_shape(allowed.shape), q_length, kv_length)))

    def blocks(self, q_length: int, kv_length: int, block_q: int, block_kv: int) -> np.ndarray:
        """Summarise blocks as `EMPTY`, `PARTIAL` and `FULL`, `[b, n, ceil(T / block_q), ceil(S / block_kv)]`.

        A block at the end counts only the pairs that exist. Memory is one strip of `block_q` rows, not `T * S`.

        Raises:
          ValueError: a block size is not positive, or the mask is for other lengths.
        """
        if block_q <= 0 or block_kv <= 0:
            raise ValueError(f"block sizes must be positive, got block_q={block_q}, block_kv={block_kv}")
        self.check_lengths(q_length, kv_length)
        starts = np.arange(0, kv_length, block_kv)
        j = np.arange(kv_length)[None, :]
        rows = []
        for row in range(0, q_length, block_q):
            i = np.arange(row, min(row + block_q, q_length))[:, None]
            strip = np.asarray(self.allowed(i, j), bool)
            strip = np.broadcast_to(strip, (*_get_leading_shape(strip.shape), len(i), kv_length))
            some = np.logical_or.reduceat(strip.any(axis=-2), starts, axis=-1)
            every = np.logical_and.reduceat(strip.all(axis=-2), starts, axis=-1)
            rows.append(some.astype(np.int8) + every)
        return np.stack(rows, axis=-2)

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)


def _get_leading_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the sizes of the axes in front of `T` and `S`."""
    return (1, 1) if len(shape) <= 2 else (shape[0], shape[1])


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array `[T, S]`, or `[b, n, T, S]` with `b` 1 or the batch size and `n` 1 or `num_q_heads`."""

    array: np.ndarray
    computed: ClassVar[bool] = False
    feature: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        try:
            given = np.asarray(self.array)
        except TypeError as error:  # JAX raises it for a traced array
            raise TypeError(
                f"mask array of {type(self).__name__} must be known before tracing, got {type(self.array).__name__}; "
                f"wrap an array that is traced in Indexer"
            ) from error
        if given.dtype.kind not in "bui":
            raise ValueError(f"mask array must be booleans, true where a query may attend, got {given.dtype}")
        array = np.array(given, bool)  # a copy: the caller's array may change, and stays writable
        if array.ndim == 2:
            array = array[None, None]
        if array.ndim != 4:
            raise ValueError(f"mask array must be [T, S] or [b, n, T, S], got shape {array.shape}")
        array.setflags(write=False)
        object.__setattr__(self, "array", array)

    @functools.cached_property
    def _digest(self) -> bytes:
        """A hash of the array, which compares large masks quickly."""
        return hashlib.sha256(repr(self.array.shape).encode() + np.packbits(self.array).tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Dense) and other._digest == self._digest

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._digest))

    @property
    def features(self) -> tuple[str, ...]:
        b, n = self.array.shape[:2]
        return ("dense_batch",) * (b > 1) + ("dense_head",) * (n > 1) or (self.feature,)

    def allowed(self, i: Any, j: Any) -> Any:
        return self.array[:, :, i, j]

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        if self.array.shape[2:] != (q_length, kv_length):
            raise ValueError(
                f"mask array is for lengths {self.array.shape[2:]}, the operands have T={q_length}, S={kv_length}"
            )

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        full = (batch, num_q_heads, q_length, kv_length)
        shape = self.array.shape
        if shape[0] not in (1, batch) or shape[1] not in (1, num_q_heads) or shape[2:] != full[2:]:
            raise ValueError(f"mask array must have shape {full}, the first two axes may be 1, got {shape}")

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        self.check_lengths(q_length, kv_length)
        return np.array(self.array)


@dataclasses.dataclass(frozen=True)
class Pair(Mask):
    """Two masks combined into one. Both must assume the same order of queries, or one of them none."""

    left: Mask
    right: Mask
    traced: ClassVar[tuple[str, ...]] = ("left", "right")

    def __post_init__(self) -> None:
        orders = {leaf.query_order: type(leaf).__name__ for leaf in iter_leaves(self) if leaf.query_order}
        if len(orders) > 1:
            said = " and ".join(f"{name} takes the queries to lie in {order}" for order, name in orders.items())
            raise ValueError(
                f"mask: {said}, so that together they mean neither; write the other mask in that order too, "
                f"as Dense(mask.dense(T, S)[:, :, order]), with order the position of each query"
            )

    @property
    def is_computed(self) -> bool:
        return self.left.is_computed and self.right.is_computed

    @property
    def at_run_time(self) -> bool:
        return self.left.at_run_time or self.right.at_run_time

    @property
    def query_order(self) -> str:
        return self.left.query_order or self.right.query_order

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.left.features, *self.right.features)

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        self.left.check_lengths(q_length, kv_length)
        self.right.check_lengths(q_length, kv_length)

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        self.left.check_operands(batch, num_q_heads, q_length, kv_length)
        self.right.check_operands(batch, num_q_heads, q_length, kv_length)


class And(Pair):
    """Pairs that both masks allow."""

    def allowed(self, i: Any, j: Any) -> Any:
        return self.left.allowed(i, j) & self.right.allowed(i, j)

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        return self.left.dense(q_length, kv_length) & self.right.dense(q_length, kv_length)

    def select_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        return self.left.select_queries(start, stop, lengths) & self.right.select_queries(start, stop, lengths)

    def select_keys(self, start: int, stop: int) -> Mask | None:
        left, right = self.left.select_keys(start, stop), self.right.select_keys(start, stop)
        return None if left is None or right is None else left & right

    @property
    def key_step(self) -> int | None:
        steps = [step for step in (self.left.key_step, self.right.key_step) if step is not None]
        return math.lcm(*steps) if steps else None


class Or(Pair):
    """Pairs that either mask allows."""

    def allowed(self, i: Any, j: Any) -> Any:
        return self.left.allowed(i, j) | self.right.allowed(i, j)

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        return self.left.dense(q_length, kv_length) | self.right.dense(q_length, kv_length)


def list_conjuncts(mask: Mask) -> tuple[Mask, ...]:
    """List the masks whose conjunction `mask` is: `a & b & c` gives `(a, b, c)`."""
    if isinstance(mask, And):
        return list_conjuncts(mask.left) + list_conjuncts(mask.right)
    return (mask,)


def iter_leaves(mask: Mask) -> Iterator[Mask]:
    """Iterate over the masks that `&` and `|` combine in `mask`."""
    if isinstance(mask, Pair):
        yield from iter_leaves(mask.left)
        yield from iter_leaves(mask.right)
    else:
        yield mask
