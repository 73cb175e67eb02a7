"""Attention masks as small value objects.

A mask answers three questions (docs/contract.md, section 3): may query `i` attend to key `j` (`allowed`), what does
that look like as booleans (`dense`), and which blocks of it are empty, partial or full (`blocks`). They compose with
`&` and `|`.

Positions are operand positions: `i` indexes the query axis `T` and `j` the key axis `S`; an `offset` moves queries to
their absolute position (`offset = S - T` aligns the last query with the last key).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2


class Mask:
    """Base of all masks.

    `computed` masks are a formula of `(i, j)`, the same for every batch row and head; `allowed` then works on any array
    type with operators (NumPy, JAX, a Pallas tile). The others are backed by an array `[b, n, T, S]`.
    """

    computed: ClassVar[bool] = True

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

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        """Raise `ValueError` if the mask is for other lengths."""

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        """Booleans `[b, n, T, S]`, where `b` and `n` are 1 unless the mask differs by batch row or head."""
        self.check_lengths(q_length, kv_length)
        i = np.arange(q_length)[:, None]
        j = np.arange(kv_length)[None, :]
        allowed = np.asarray(self.allowed(i, j), bool)
        return np.array(np.broadcast_to(allowed, (*_leading(allowed.shape), q_length, kv_length)))

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
            strip = np.broadcast_to(strip, (*_leading(strip.shape), len(i), kv_length))
            some = np.logical_or.reduceat(strip.any(axis=-2), starts, axis=-1)
            every = np.logical_and.reduceat(strip.all(axis=-2), starts, axis=-1)
            rows.append(some.astype(np.int8) + every)
        return np.stack(rows, axis=-2)

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)


def _leading(shape: tuple[int, ...]) -> tuple[int, int]:
    return (1, 1) if len(shape) <= 2 else (shape[0], shape[1])


def _positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query may attend to every key."""

    def allowed(self, i: Any, j: Any) -> Any:
        return (i >= 0) & (j >= 0)


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """`j <= i + offset`. `offset = S - T` is bottom-right alignment."""

    offset: int = 0

    def allowed(self, i: Any, j: Any) -> Any:
        return j <= i + self.offset


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """`i + offset - left <= j <= i + offset + right`; `None` leaves a side unbounded.

    A sliding window of `w` keys that includes the query's own is `Window(w - 1, 0)`.
    """

    left: int | None
    right: int | None
    offset: int = 0

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and value < 0:
                raise ValueError(f"window {name} must be >= 0 or None (unbounded), got {value}")

    def allowed(self, i: Any, j: Any) -> Any:
        position = i + self.offset
        ok = (i >= 0) & (j >= 0)
        if self.left is not None:
            ok = ok & (j >= position - self.left)
        if self.right is not None:
            ok = ok & (j <= position + self.right)
        return ok


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """Causal inside chunks of `size` absolute positions: `p // size == j // size and j <= p`, `p = i + offset`."""

    size: int
    offset: int = 0

    def __post_init__(self) -> None:
        _positive("chunk size", self.size)

    def allowed(self, i: Any, j: Any) -> Any:
        position = i + self.offset
        return (position // self.size == j // self.size) & (j <= position)


@dataclasses.dataclass(frozen=True)
class Bidirectional(Mask):
    """Query and key inside the same span `[start, stop)`; or-ed with `Causal` for image tokens."""

    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for start, stop in self.spans:
            if not 0 <= start < stop:
                raise ValueError(f"a span must satisfy 0 <= start < stop, got ({start}, {stop})")

    def allowed(self, i: Any, j: Any) -> Any:
        ok = (i < 0) & (j < 0)
        for start, stop in self.spans:
            ok = ok | ((i >= start) & (i < stop) & (j >= start) & (j < stop))
        return ok


@dataclasses.dataclass(frozen=True)
class LoadBalancedCausal(Mask):
    """Causal for queries in load-balanced context-parallel order; keys stay in sequence order.

    The `length` queries are cut into `2 * cp_size` chunks; device `r` holds chunks `r` and `2 * cp_size - 1 - r`, in
    that order, and devices follow one another along the query axis.
    """

    cp_size: int
    length: int

    def __post_init__(self) -> None:
        _positive("cp_size", self.cp_size)
        if self.length % (2 * self.cp_size):
            raise ValueError(f"length {self.length} must be a multiple of 2 * cp_size = {2 * self.cp_size}")

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        if q_length != self.length:
            raise ValueError(f"mask is load-balanced for length {self.length}, the operands have T={q_length}")

    def position(self, i: Any) -> Any:
        """Sequence position of the query at permuted index `i`."""
        chunk_length = self.length // (2 * self.cp_size)
        slot = i // chunk_length
        rank, second = slot // 2, slot % 2
        chunk = rank + second * (2 * self.cp_size - 1 - 2 * rank)
        return chunk * chunk_length + i % chunk_length

    def allowed(self, i: Any, j: Any) -> Any:
        return j <= self.position(i)


@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean array `[T, S]`, or `[b, n, T, S]` with `b` and `n` either 1 or the batch size and `num_q_heads`."""

    array: np.ndarray
    computed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        array = np.array(self.array, bool)  # a copy: the caller's array may change, and stays writable
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

    def allowed(self, i: Any, j: Any) -> Any:
        return self.array[:, :, i, j]

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        if self.array.shape[2:] != (q_length, kv_length):
            raise ValueError(
                f"mask array is for lengths {self.array.shape[2:]}, the operands have T={q_length}, S={kv_length}"
            )

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        self.check_lengths(q_length, kv_length)
        return np.array(self.array)


@dataclasses.dataclass(frozen=True, eq=False)
class Indexer(Dense):
    """Token selection per batch row `[B, 1, T, S]`, given at run time.

    No kernel may rely on its structure at trace time, so every block of it counts as partial. Its array may be of
    another library, and traced; such a mask is no value yet and can be neither compared nor hashed.
    """

    def __post_init__(self) -> None:
        if not self.at_run_time:
            super().__post_init__()
        elif self.array.ndim != 4:
            raise ValueError(f"mask array must be [b, n, T, S], got shape {self.array.shape}")

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


@dataclasses.dataclass(frozen=True)
class Lengths(Mask):
    """`j < lengths[b]`: the keys of batch row `b` that exist (ragged prefill and decode)."""

    lengths: tuple[int, ...]
    computed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.lengths):
            raise ValueError(f"lengths must be >= 0, got {self.lengths}")

    def allowed(self, i: Any, j: Any) -> Any:
        lengths = np.asarray(self.lengths).reshape((-1, 1) + (1,) * np.ndim(j))
        return (j < lengths) & (i >= 0)


@dataclasses.dataclass(frozen=True)
class OwnWindow(Mask):
    """`p - left <= j <= p` with `p = positions[b] + i`: the queries of each batch row have a place of their own.

    A window in ragged decode, where every sequence ends elsewhere; causal with `left=None`. A position may be negative:
    such a query sees nothing.
    """

    left: int | None
    positions: tuple[int, ...]
    computed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.left is not None and self.left < 0:
            raise ValueError(f"window left must be >= 0 or None (unbounded), got {self.left}")

    def allowed(self, i: Any, j: Any) -> Any:
        position = np.asarray(self.positions).reshape((-1, 1) + (1,) * np.ndim(j)) + i
        ok = j <= position
        return ok if self.left is None else ok & (j >= position - self.left)


@dataclasses.dataclass(frozen=True)
class _Pair(Mask):
    left: Mask
    right: Mask

    @property
    def is_computed(self) -> bool:
        return self.left.is_computed and self.right.is_computed

    @property
    def at_run_time(self) -> bool:
        return self.left.at_run_time or self.right.at_run_time

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        self.left.check_lengths(q_length, kv_length)
        self.right.check_lengths(q_length, kv_length)


class And(_Pair):
    """Both masks allow the pair."""

    def allowed(self, i: Any, j: Any) -> Any:
        return self.left.allowed(i, j) & self.right.allowed(i, j)

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        return self.left.dense(q_length, kv_length) & self.right.dense(q_length, kv_length)


class Or(_Pair):
    """Either mask allows the pair."""

    def allowed(self, i: Any, j: Any) -> Any:
        return self.left.allowed(i, j) | self.right.allowed(i, j)

    def dense(self, q_length: int, kv_length: int) -> np.ndarray:
        return self.left.dense(q_length, kv_length) | self.right.dense(q_length, kv_length)


def conjuncts(mask: Mask) -> tuple[Mask, ...]:
    """The masks whose conjunction `mask` is: `a & b & c` gives `(a, b, c)`."""
    if isinstance(mask, And):
        return conjuncts(mask.left) + conjuncts(mask.right)
    return (mask,)


def known(mask: Mask) -> Mask:
    """What is known of `mask` before run time: it allows all that `mask` may turn out to allow."""
    if isinstance(mask, _Pair):
        return type(mask)(known(mask.left), known(mask.right))
    return Full() if mask.at_run_time else mask


def leaves(mask: Mask) -> Iterator[Mask]:
    """The masks that `mask` is composed of by `&` and `|`."""
    if isinstance(mask, _Pair):
        yield from leaves(mask.left)
        yield from leaves(mask.right)
    else:
        yield mask
