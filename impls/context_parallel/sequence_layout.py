"""Distribute a sequence over devices in one of three orders, and compute the masks between two devices."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from cases.masks import And, Dense, Full, HeadWindow, Lengths, Mask, Or

TokenOrder = Literal["contiguous", "balanced", "striped"]


@dataclasses.dataclass(frozen=True)
class SequencePlaces:
    """Sequence positions of a device: one or two runs of `chunk` positions, `stride` apart.

    Positions past `length` are padding.
    """

    starts: tuple[int, ...]
    chunk: int
    length: int
    stride: int = 1

    @property
    def size(self) -> int:
        """Number of positions that the device has, padding included."""
        return len(self.starts) * self.chunk

    @property
    def padded(self) -> bool:
        """Whether some of the positions are padding."""
        return max(self.starts) + (self.chunk - 1) * self.stride >= self.length

    def position(self, i: Any) -> Any:
        """Compute the sequence position of local index `i`, for any array type with operators."""
        if len(self.starts) == 1:
            return i * self.stride + self.starts[0]
        first, second = self.starts
        return i + first + (i // self.chunk) * (second - first - self.chunk)

    def count_below(self, position: int) -> int:
        """Count the positions below `position`, for one run."""
        return int(np.clip(-(-(position - self.starts[0]) // self.stride), 0, self.size))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Distribution of a sequence of `length` over `devices`, padded to equal chunks of a multiple of `multiple`.

    The order of tokens is one of

    - `"contiguous"`: each device has one chunk;
    - `"balanced"`: there are `2 * devices` chunks, and device `r` has chunks `r` and `2 * devices - 1 - r`. Under a
      causal mask the queries of the first chunk see few keys and those of the second many. Together they see the same
      number of keys on every device;
    - `"striped"`: token `t` is on device `t % devices` (Brandon et al. 2023, arXiv:2311.09431). Under a causal mask
      the queries of two devices see the same keys of a third, except for the diagonal.
    """

    length: int
    devices: int
    order: TokenOrder = "balanced"
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "devices", "multiple"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.order not in get_args(TokenOrder):
            raise ValueError(f"order must be one of {get_args(TokenOrder)}, got {self.order!r}")

    @property
    def chunk(self) -> int:
        """Number of positions per chunk."""
        return -(-self.length // (len(self.chunks) * self.multiple)) * self.multiple

    @property
    def local(self) -> int:
        """Number of positions per device, padding included."""
        return self.chunk * len(self.chunks) // self.devices

    @property
    def chunks(self) -> tuple[int, ...]:
        """Indices of the chunks, in the order of the devices that have them. A stripe counts as a chunk."""
        if self.order != "balanced":
            return tuple(range(self.devices))
        return tuple(chunk for rank in range(self.devices) for chunk in (rank, 2 * self.devices - 1 - rank))

    def places(self, rank: int) -> SequencePlaces:
        """Compute the sequence positions that device `rank` has."""
        if self.order == "striped":
            return SequencePlaces((rank,), self.chunk, self.length, self.devices)
        each = len(self.chunks) // self.devices
        chunks = self.chunks[rank * each : (rank + 1) * each]
        return SequencePlaces(tuple(chunk * self.chunk for chunk in chunks), self.chunk, self.length)

    def deal(self, x: Any, axis: int) -> Any:
        """Pad `x` along `axis` with zeros, and reorder it so that the positions of each device are contiguous."""
        padding = self.chunk * len(self.chunks) - self.length
        x = jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)]) if padding else jnp.asarray(x)
        if self.order == "striped":
            return self._transposed(x, axis, (self.chunk, self.devices))
        return self._taken(x, axis, np.asarray(self.chunks))

    def collect(self, x: Any, axis: int) -> Any:
        """Restore the sequence order that `deal` changed, and drop the padding."""
        if self.order == "striped":
            whole = self._transposed(x, axis, (self.devices, self.chunk))
        else:
            whole = self._taken(x, axis, np.argsort(self.chunks))
        return whole[(slice(None),) * axis + (slice(self.length),)]

    def _taken(self, x: Any, axis: int, order: np.ndarray) -> Any:
        if (order == np.arange(len(order))).all():
            return x
        cut = x.reshape(*x.shape[:axis], len(order), self.chunk, *x.shape[axis + 1 :])
        return jnp.take(cut, order, axis=axis).reshape(x.shape)

    @staticmethod
    def _transposed(x: Any, axis: int, sizes: tuple[int, int]) -> Any:
        """Transpose `axis`, taken as a matrix of these sizes."""
        cut = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
        return cut.swapaxes(axis, axis + 1).reshape(x.shape)


# Rows of a mask that are evaluated at once, which bounds the memory.
_STRIP_LENGTH = 512


@dataclasses.dataclass(frozen=True)
class PlacedMask(Mask):
    """A mask given by a formula, restricted to the sequence positions of some queries and keys. Padding is hidden."""

    mask: Mask
    rows: SequencePlaces
    columns: SequencePlaces

    def allowed(self, i: Any, j: Any) -> Any:
        """Evaluate the formula at the sequence positions of the local indices `i` and `j`."""
        row, column = self.rows.position(i), self.columns.position(j)
        allowed = self.mask.allowed(row, column)
        if self.rows.padded:
            allowed = allowed & (row < self.rows.length)
        if self.columns.padded:
            allowed = allowed & (column < self.columns.length)
        return allowed

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        """Raise `ValueError` if the mask is for other numbers of queries and keys."""
        if (q_length, kv_length) != (self.rows.size, self.columns.size):
            raise ValueError(
                f"mask is for T={self.rows.size} queries and S={self.columns.size} keys of a device, "
                f"the operands have T={q_length}, S={kv_length}"
            )


def restrict_mask(mask: Mask, rows: SequencePlaces, columns: SequencePlaces) -> Mask:
    """Restrict `mask` to the queries at `rows` and the keys at `columns`, as a mask over their local indices."""
    if isinstance(mask, And | Or):
        return type(mask)(restrict_mask(mask.left, rows, columns), restrict_mask(mask.right, rows, columns))
    if isinstance(mask, Dense):
        return Dense(_cut_array(mask.array, rows, columns))
    if isinstance(mask, Lengths):
        if len(columns.starts) == 1:
            return Lengths(tuple(map(columns.count_below, mask.lengths)))
        return Dense(_cut_array(mask.dense(1, columns.length), None, columns).repeat(rows.size, axis=2))
    return PlacedMask(mask, rows, columns)


def restrict_to_heads(mask: Mask, heads: slice) -> Mask:
    """Restrict `mask` to some of the query heads."""
    if isinstance(mask, And | Or):
        return type(mask)(restrict_to_heads(mask.left, heads), restrict_to_heads(mask.right, heads))
    if isinstance(mask, Dense) and mask.array.shape[1] > 1:
        return Dense(mask.array[:, heads])
    return HeadWindow(mask.lefts[heads]) if isinstance(mask, HeadWindow) else mask


def _cut_array(array: np.ndarray, rows: SequencePlaces | None, columns: SequencePlaces) -> np.ndarray:
    """Select the `rows` and `columns` of a boolean mask `array [b, n, T, S]`, with False in padding."""
    for axis, places in ((2, rows), (3, columns)):
        if places is not None:
            positions = places.position(np.arange(places.size))
            inside = (positions < places.length).reshape((-1,) + (1,) * (3 - axis))
            array = np.take(array, np.minimum(positions, places.length - 1), axis=axis) & inside
    return array


@dataclasses.dataclass(frozen=True)
class MaskSchedule:
    """Masks of all pairs of devices.

    `masks[table[rank][source]]` is the mask between the queries of device `rank` and the keys of device `source`. It is
    None if no query may attend to any of the keys.

    Masks that allow the same pairs are shared, so that a program has one kernel for each distinct mask. A causal mask
    in balanced order has three distinct masks, for any number of devices.
    """

    masks: tuple[Mask | None, ...]
    table: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=256)
def build_schedule(mask: Mask, queries: Layout, keys: Layout) -> MaskSchedule:
    """Build the masks between the queries of each device of `queries` and the keys of each device of `keys`."""
    masks: list[Mask | None] = []
    known: dict[bytes, int] = {}
    table = []
    for rank in range(queries.devices):
        row = []
        for source in range(keys.devices):
            part = restrict_mask(mask, queries.places(rank), keys.places(source))
            digest, found = _identify_mask(part, queries.local, keys.local)
            if digest not in known:
                known[digest] = len(masks)
                masks.append(found)
            row.append(known[digest])
        table.append(tuple(row))
    return MaskSchedule(tuple(masks), tuple(table))


def _identify_mask(mask: Mask, q_length: int, kv_length: int) -> tuple[bytes, Mask | None]:
    """Compute a digest of the allowed pairs, and simplify the mask: None if it allows no pair, `Full` if all."""
    digest = hashlib.sha256()
    some, every = False, True
    j = np.arange(kv_length)[None, :]
    for start in range(0, q_length, _STRIP_LENGTH):
        i = np.arange(start, min(start + _STRIP_LENGTH, q_length))[:, None]
        allowed = np.asarray(mask.allowed(i, j), bool)
        leading = allowed.shape[:-2] or (1, 1)
        strip = np.broadcast_to(allowed, (*leading, i.size, kv_length))
        some, every = some or bool(strip.any()), every and bool(strip.all())
        digest.update(repr(strip.shape).encode() + np.packbits(strip).tobytes())
    if every:
        return b"full", Full()
    return (digest.digest(), mask) if some else (b"empty", None)
