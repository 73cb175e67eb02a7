"""The base class of all attention masks, masks given as boolean arrays, and masks combined by `&` and `|`."""

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

    A mask with `computed=True` is a formula of `(i, j)`, the same for every batch row and head. Its `allowed` works on
    any array type with operators (NumPy, JAX, a Pallas tile). Any other mask is given by values `[b, n, T, S]`,
    where `b` and `n` are 1 or the full size.
    """

    computed: ClassVar[bool] = True
    feature: ClassVar[str] = ""  # what an implementation must support to take the mask (`cases.case.FEATURES`)
    # The end of the message with which an implementation without the feature refuses the mask, such as "takes no window
    # that moves with each batch row". It is empty if the feature is not opt-in.
    refusal: ClassVar[str] = ""
    # Whether the mask depends only on `i - j`. Then it stays the same if all queries and keys move by the same number
    # of positions.
    relative: ClassVar[bool] = False
    # The names of the fields that JAX traces: masks, or arrays of any library. All other fields are static.
    traced: ClassVar[tuple[str, ...]] = ()

    def allowed(self, i: Any, j: Any) -> Any:
        """Return whether query `i` may attend to key `j`.

        The result has the shape of `i` and `j` broadcast together. If the mask is not `computed`, the axes `[b, n]`
        come before that shape.
        """
        raise NotImplementedError

    @property
    def is_computed(self) -> bool:
        """Whether `allowed` is the same formula for every batch row and head."""
        return self.computed

    @property
    def at_run_time(self) -> bool:
        """Whether the mask is unknown until run time, as an `Indexer` is whose array is not a NumPy array."""
        return False

    @property
    def query_order(self) -> str:
        """The order in which the mask assumes the queries along the axis `T`; empty if any order will do."""
        return ""

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that an implementation must support to be called with this mask."""
        return (self.feature or ("dense" if self.is_computed else "dense_batch"),)

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        """Raise `ValueError` if the mask is not for `q_length` queries and `kv_length` keys."""

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        """Raise `ValueError`, naming the mask, if it does not fit these sizes (docs/contract.md, section 7)."""

    def select_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        """Return the mask for only the queries `start` to `stop - 1`; `lengths` are T and S before the cut."""
        return Dense(self.dense(*lengths)[:, :, start:stop])

    def select_keys(self, start: int, stop: int) -> Mask | None:
        """Return the mask for only the keys `start` to `stop - 1`, or None if no mask class can express it."""
        return None

    @property
    def key_step(self) -> int | None:
        """The step whose multiples are the keys where `select_keys` may cut; None if it may cut at any key."""
        return None

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        """Return booleans `[b, n, T, S]`, where `b` and `n` are 1 unless the mask differs by batch row or head."""
        self.check_lengths(q_length, kv_length)
        i = np.arange(q_length)[:, None]
        j = np.arange(kv_length)[None, :]
        allowed = np.asarray(self.allowed(i, j), bool)
        return np.array(np.broadcast_to(allowed, (*_get_leading_shape(allowed.shape), q_length, kv_length)))

    def blocks(self, q_length: int, kv_length: int, block_q: int, block_kv: int) -> np.ndarray:
        """Classify each block as `EMPTY`, `PARTIAL` or `FULL`, `[b, n, ceil(T / block_q), ceil(S / block_kv)]`.

        In a block that reaches past the last query or key, only existing pairs of query and key count. The memory in
        use at any time is one strip of `block_q` rows, not `T * S`.

        Raises:
          ValueError: a block size is not positive, or the mask is not for these lengths.
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
    """Return the sizes of the axes before `T` and `S`: `(1, 1)` if `shape` has only these two axes."""
    return (1, 1) if len(shape) <= 2 else (shape[0], shape[1])


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A mask given as booleans `[T, S]` or `[b, n, T, S]`; `b` is 1 or the batch size, `n` is 1 or `num_q_heads`."""

    array: np.ndarray
    computed: ClassVar[bool] = False
    feature: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        try:
            given = np.asarray(self.array)
        except TypeError as error:  # JAX raises a TypeError if the array is traced
            raise TypeError(
                f"mask array of {type(self).__name__} must be known before tracing, got {type(self.array).__name__}; "
                f"wrap an array that is traced in Indexer"
            ) from error
        if given.dtype.kind not in "bui":
            raise ValueError(f"mask array must be booleans, true where a query may attend, got {given.dtype}")
        array = np.array(given, bool)  # copied, so that the caller may go on writing to the original
        if array.ndim == 2:
            array = array[None, None]
        if array.ndim != 4:
            raise ValueError(f"mask array must be [T, S] or [b, n, T, S], got shape {array.shape}")
        array.setflags(write=False)
        object.__setattr__(self, "array", array)

    @functools.cached_property
    def _digest(self) -> bytes:
        """A hash of the array, so that large masks can be compared quickly."""
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
    """Two masks combined into one. If both assume an order of the queries, it must be the same order."""

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
    """A mask that allows a query and a key if both `left` and `right` allow them."""

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
    """A mask that allows a query and a key if `left` or `right` allows them."""

    def allowed(self, i: Any, j: Any) -> Any:
        return self.left.allowed(i, j) | self.right.allowed(i, j)

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        return self.left.dense(q_length, kv_length) | self.right.dense(q_length, kv_length)


def list_conjuncts(mask: Mask) -> tuple[Mask, ...]:
    """List the masks that `&` combines into `mask`: `a & b & c` gives `(a, b, c)`."""
    if isinstance(mask, And):
        return list_conjuncts(mask.left) + list_conjuncts(mask.right)
    return (mask,)


def iter_leaves(mask: Mask) -> Iterator[Mask]:
    """Yield the masks that `&` and `|` combine into `mask`: `a & (b | c)` gives `a`, `b`, `c`."""
    if isinstance(mask, Pair):
        yield from iter_leaves(mask.left)
        yield from iter_leaves(mask.right)
    else:
        yield mask
