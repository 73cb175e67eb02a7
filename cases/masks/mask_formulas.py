"""Mask classes that are a formula of query and key positions, the same for every batch row and head."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from cases.masks.mask_base import Mask, Pair
from cases.masks.mask_numbers import FAR, clip_to_far, require_integer

__all__ = ["Bidirectional", "Causal", "Chunked", "Full", "LoadBalancedCausal", "OffsetMask", "Window", "relax_to_known"]


SEQUENCE = "sequence order"
"""The `query_order` of masks that take query `i` to come after query `i - 1` in the sequence."""


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """The mask that lets every query attend to every key."""

    feature: ClassVar[str] = "full"
    relative: ClassVar[bool] = True

    def allowed(self, i: Any, j: Any) -> Any:
        return (i >= 0) & (j >= 0)

    def select_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        return self

    def select_keys(self, start: int, stop: int) -> Mask | None:
        return self


class OffsetMask(Mask):
    """Base of masks that put query `i` at position `i + offset`, and key `j` at position `j`."""

    offset: int

    @property
    def query_order(self) -> str:
        return SEQUENCE

    @property
    def features(self) -> tuple[str, ...]:
        return (self.feature, "offset") if self.offset else (self.feature,)

    def shift(self, by: int) -> Self:
        """Return the same mask with all queries `by` positions later in the sequence."""
        changed: dict[str, Any] = {"offset": self.offset + by}
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]  # every subclass is a dataclass

    def select_queries(self, start: int, stop: int, lengths: tuple[int, int]) -> Mask:
        return self.shift(start)

    def select_keys(self, start: int, stop: int) -> Mask | None:
        return self.shift(-start) if self.relative else None


@dataclasses.dataclass(frozen=True)
class Causal(OffsetMask):
    """The causal mask `j <= i + offset`; `offset = S - T` aligns the last query with the last key (bottom right)."""

    offset: int = 0
    feature: ClassVar[str] = "causal"
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", clip_to_far(require_integer("causal offset", self.offset)))

    def allowed(self, i: Any, j: Any) -> Any:
        return j <= i + self.offset


@dataclasses.dataclass(frozen=True)
class Window(OffsetMask):
    """The window `i + offset - left <= j <= i + offset + right`; None leaves a side unbounded.

    A causal sliding window of `w` keys, with the key at the query's own position, is `Window(w - 1, 0)`. A side that
    reaches to `FAR` or beyond hides no key and becomes None: `Window(4, 2**31 - 1)` equals `Window(4, None)`.
    """

    left: int | None
    right: int | None
    offset: int = 0
    feature: ClassVar[str] = "window"
    relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        offset = require_integer("window offset", self.offset)
        left = None if self.left is None else require_integer("window left", self.left)
        right = None if self.right is None else require_integer("window right", self.right)
        for name, value in (("left", left), ("right", right)):
            if value is not None and value < 0:
                raise ValueError(f"window {name} must be >= 0 or None (unbounded), got {value}")
        # Query `i` sees the keys from `i + first` to `i + last`. Clipping the offset must not change these two.
        first = -FAR if left is None else clip_to_far(offset - left)
        last = FAR if right is None else clip_to_far(offset + right)
        object.__setattr__(self, "offset", clip_to_far(offset))
        object.__setattr__(self, "left", None if first == -FAR else self.offset - first)
        object.__setattr__(self, "right", None if last == FAR else last - self.offset)

    def allowed(self, i: Any, j: Any) -> Any:
        position = i + self.offset
        ok = (i >= 0) & (j >= 0)
        if self.left is not None:
            ok = ok & (j >= position - self.left)
        if self.right is not None:
            ok = ok & (j <= position + self.right)
        return ok


@dataclasses.dataclass(frozen=True)
class Chunked(OffsetMask):
    """Causal inside chunks of `size` positions: `p // size == j // size and j <= p`, with `p = i + offset`."""

    size: int
    offset: int = 0
    feature: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        size, offset = require_integer("chunk size", self.size), require_integer("chunk offset", self.offset)
        _check_positive("chunk size", size)
        if abs(offset) > FAR // 2:
            raise ValueError(f"chunk offset must be at most {FAR // 2} from 0, got {offset}")
        object.__setattr__(self, "size", min(size, FAR))
        object.__setattr__(self, "offset", offset)

    def allowed(self, i: Any, j: Any) -> Any:
        position = i + self.offset
        return (position // self.size == j // self.size) & (j <= position)

    def select_keys(self, start: int, stop: int) -> Mask | None:
        return None if start % self.size else self.shift(-start)

    @property
    def key_step(self) -> int | None:
        return self.size


@dataclasses.dataclass(frozen=True)
class Bidirectional(Mask):
    """The mask that allows a query and a key inside the same span `[start, stop)`.

    Image tokens in a causal sequence attend to each other both ways: `Causal() | Bidirectional(spans)`.
    """

    spans: tuple[tuple[int, int], ...]
    feature: ClassVar[str] = "bidirectional"

    def __post_init__(self) -> None:
        spans = tuple(
            (require_integer("a span's start", start), require_integer("a span's stop", stop))
            for start, stop in self.spans
        )
        for start, stop in spans:
            if not 0 <= start < stop:
                raise ValueError(f"a span must satisfy 0 <= start < stop, got ({start}, {stop})")
        object.__setattr__(self, "spans", tuple((min(start, FAR - 1), min(stop, FAR)) for start, stop in spans))

    @property
    def query_order(self) -> str:
        return SEQUENCE

    def allowed(self, i: Any, j: Any) -> Any:
        ok = (i < 0) & (j < 0)
        for start, stop in self.spans:
            ok = ok | ((i >= start) & (i < stop) & (j >= start) & (j < stop))
        return ok


@dataclasses.dataclass(frozen=True)
class LoadBalancedCausal(Mask):
    """The causal mask for queries in load-balanced context-parallel order; keys stay in sequence order.

    The `length` queries are cut into `2 * cp_size` chunks. Device `r` holds chunks `r` and `2 * cp_size - 1 - r`, in
    that order. The queries of device 0 come first along the query axis, then those of device 1, and so on. The mask
    combines with masks that assume the same order of queries, or no order. It does not combine with masks that assume
    sequence order, such as a window.
    """

    cp_size: int
    length: int
    feature: ClassVar[str] = "balanced"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cp_size", require_integer("cp_size", self.cp_size))
        object.__setattr__(self, "length", require_integer("length of LoadBalancedCausal", self.length))
        _check_positive("cp_size", self.cp_size)
        if self.length % (2 * self.cp_size):
            raise ValueError(f"length {self.length} must be a multiple of 2 * cp_size = {2 * self.cp_size}")

    @property
    def query_order(self) -> str:
        return f"load-balanced order of {self.cp_size} devices"

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        if q_length != self.length:
            raise ValueError(f"mask is load-balanced for length {self.length}, the operands have T={q_length}")

    def check_operands(self, batch: int, num_q_heads: int, q_length: int, kv_length: int) -> None:
        if q_length != self.length:
            raise ValueError(
                f"mask length must be the query length {q_length}, got {self.length} in LoadBalancedCausal"
            )

    def compute_position(self, i: Any) -> Any:
        """Return the sequence position of the query at index `i` of the load-balanced order."""
        chunk_length = self.length // (2 * self.cp_size)
        slot = i // chunk_length
        rank, second = slot // 2, slot % 2
        chunk = rank + second * (2 * self.cp_size - 1 - 2 * rank)
        return chunk * chunk_length + i % chunk_length

    def allowed(self, i: Any, j: Any) -> Any:
        return j <= self.compute_position(i)


def relax_to_known(mask: Mask) -> Mask:
    """Replace each part of `mask` that is unknown before run time by `Full`, which allows every pair."""
    if isinstance(mask, Pair):
        return type(mask)(relax_to_known(mask.left), relax_to_known(mask.right))
    return Full() if mask.at_run_time else mask


def _check_positive(name: str, value: int) -> None:
    """Raise `ValueError` unless `value` is positive; the message calls it `name`."""
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
