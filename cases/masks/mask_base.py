"""What every mask can be asked, masks that are written out, and masks that are composed of others."""

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

    `computed` masks are a formula of `(i, j)`, the same for every batch row and head; `allowed` then works on any array
    type with operators (NumPy, JAX, a Pallas tile). The others are backed by an array `[b, n, T, S]`.

    Attributes:
      feature: what an implementation must be able to do to take it (`cases.case.FEATURES`).
      refusal: what an implementation does that does not offer the feature; empty if it need not be offered.
      relative: whether it goes by `i - j` alone, so that it stays when queries and keys move along together.
      traced: its fields that are masks or arrays of any library, for JAX to trace; the others are static.
    """

    computed: ClassVar[bool] = True
    feature: ClassVar[str] = ""
    refusal: ClassVar[str] = ""
    relative: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ()

    def allowed(self, i: Any, j: Any) -> Any:
        """Whether query `i` may attend to key `j`; shape `broadcast(i, j)`, with `[b, n]` in front if not computed."""
        raise NotImplementedError

    @property
    def is_computed(self) -> bool:
        """True if `allowed` is a formula, the same for every batch row and head."""
        return self.computed

    @property
    def at_run_time(self) -> bool:
        """True if what is allowed is not known yet: an `Indexer` of an array that is not NumPy's."""
        return False

    @property
    def query_order(self) -> str:
        """The order in which it takes queries to lie along their axis; empty if it may be any."""
        return ""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what a call with it asks for; those of a case's mask spec are the same or more."""
        return (self.feature or ("dense" if self.is_computed else "dense_batch"),)

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        """Raise `ValueError` if the mask is for other lengths."""

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        """Raise `ValueError`, naming the mask, if it is for other operands (docs/contract.md, section 7)."""

    def of_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        """What the mask, for `lengths` T and S, allows queries `start` to `stop - 1`, as if there were no others."""
        return Dense(self.dense(*lengths)[:, :, start:stop])

    def of_keys(self, start: int, stop: int) -> Mask | None:
        """What the mask allows of keys `start` to `stop - 1`, as if there were no others; none if it has no form."""
        return None

    @property
    def key_step(self) -> int | None:
        """Keys may be masked apart (`of_keys`) before and behind multiples of this; none if it may be any key."""
        return None

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        """Booleans `[b, n, T, S]`, where `b` and `n` are 1 unless the mask differs by batch row or head."""
        self.check_lengths(q_length, kv_length)
        i = np.arange(q_length)[:, None]
        j = np.arange(kv_length)[None, :]
        allowed = np.asarray(self.allowed(i, j), bool)
        return np.array(np.broadcast_to(allowed, (*_get_leading_shape(allowed.shape), q_length, kv_length)))

    def blocks(self, q_length: int, kv_length: int, block_q: int, block_kv: int) -> np.ndarray:
        """Block summary `[b, n, ceil(T / block_q), ceil(S / block_kv)]` of `EMPTY`, `PARTIAL` and `FULL`.

        A tail block is judged by the pairs that exist. Memory is one strip of `block_q` rows, not `T * S`.
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
    return (1, 1) if len(shape) <= 2 else (shape[0], shape[1])


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array `[T, S]`, or `[b, n, T, S]` with `b` and `n` either 1 or the batch size and `num_q_heads`."""

    array: np.ndarray
    computed: ClassVar[bool] = False
    feature: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        try:
            given = np.asarray(self.array)
        except TypeError as error:  # what JAX raises of an array that is traced
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
    """Two masks that make one. Both must take the queries to lie in the same order, or be for any."""

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
    """Both masks allow the pair."""

    def allowed(self, i: Any, j: Any) -> Any:
        return self.left.allowed(i, j) & self.right.allowed(i, j)

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        return self.left.dense(q_length, kv_length) & self.right.dense(q_length, kv_length)

    def of_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        return self.left.of_queries(start, stop, lengths) & self.right.of_queries(start, stop, lengths)

    def of_keys(self, start: int, stop: int) -> Mask | None:
        left, right = self.left.of_keys(start, stop), self.right.of_keys(start, stop)
        return None if left is None or right is None else left & right

    @property
    def key_step(self) -> int | None:
        steps = [step for step in (self.left.key_step, self.right.key_step) if step is not None]
        return math.lcm(*steps) if steps else None


class Or(Pair):
    """Either mask allows the pair."""

    def allowed(self, i: Any, j: Any) -> Any:
        return self.left.allowed(i, j) | self.right.allowed(i, j)

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        return self.left.dense(q_length, kv_length) | self.right.dense(q_length, kv_length)


def list_conjuncts(mask: Mask) -> tuple[Mask, ...]:
    """The masks whose conjunction `mask` is: `a & b & c` gives `(a, b, c)`."""
    if isinstance(mask, And):
        return list_conjuncts(mask.left) + list_conjuncts(mask.right)
    return (mask,)


def iter_leaves(mask: Mask) -> Iterator[Mask]:
    """The masks that `mask` is composed of by `&` and `|`."""
    if isinstance(mask, Pair):
        yield from iter_leaves(mask.left)
        yield from iter_leaves(mask.right)
    else:
        yield mask
