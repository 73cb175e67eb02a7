"""Compute the masks between one device's queries and another device's keys, from the mask of the whole sequence."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np

from cases.masks import And, Dense, Full, Lengths, Mask, Or
from impls.context_parallel.sequence_layout import Layout, SequencePlaces

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
            return Lengths(tuple(int(np.clip(n - columns.starts[0], 0, columns.size)) for n in mask.lengths))
        return Dense(_cut_array(mask.dense(1, columns.length), None, columns).repeat(rows.size, axis=2))
    return PlacedMask(mask, rows, columns)


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
