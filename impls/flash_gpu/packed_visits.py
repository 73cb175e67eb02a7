"""Compute for packed sequences which keys each query sees, and which blocks each program visits.

A query sees the keys `low` to `high - 1` of the pack. Both numbers grow along the queries that see any key
(`impls.packed_sequences`). So the pairs of blocks with an allowed pair of positions lie along a path. For each program
these blocks lie between two borders. The full blocks among them are consecutive, so a kernel counts them up from the
first. The partial blocks are listed. A block is partial where `low` or `high` changes, and each passes through the pack
once. So the number of partial blocks grows with the number of blocks, not with its square. The list has room for the
largest possible number of partial blocks.

All of this is computed at run time, before the kernels, by a few operations on each query and block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from impls.flash_gpu.block_sizes import Axis, Tiles
from impls.packed_sequences import SequenceTables, Side, compute_key_ranges


class KeyRanges(NamedTuple):
    """Range of keys that each query sees, int32."""

    low: Int32[Array, " T"]  # first key; 0 for a query that sees none
    high: Int32[Array, " T"]  # one past the last key; 0 for a query that sees none
    tokens: Int32[Array, "1"]  # number of queries in sequences; later ones are padding


class PackedVisits(NamedTuple):
    """Blocks that each program visits, int32."""

    table: Int32[Array, "programs 4"]  # first full block, number of full blocks, start in `partial`, count there
    partial: Int32[Array, " places"]  # the partial blocks of all programs one after another


class _Interval(NamedTuple):
    """Interval `first` to `end - 1` along the other axis, for each block of one axis; int32."""

    first: Int32[Array, " blocks"]
    end: Int32[Array, " blocks"]


def compute_ranges(tables: SequenceTables, sides: tuple[Side, Side], q_length: int) -> KeyRanges:
    """Compute the key ranges of `q_length` queries. Table entries past the last sequence may be any integers."""
    low, high = compute_key_ranges(tables, sides, q_length)
    return KeyRanges(low, high, tokens=tables.cu_q_lens[tables.num_seqs])


def compute_visits(ranges: KeyRanges, tiles: Tiles, axis: Axis, kv_length: int) -> PackedVisits:
    """For each program, list every block with an allowed pair once. A program owns one block along `axis`."""
    some = ranges.low < ranges.high
    reached = lax.cummax(jnp.where(some, ranges.high, 0))  # largest end among the queries up to this one
    ahead = lax.cummin(jnp.where(some, ranges.low, kv_length), reverse=True)  # smallest start from this query on
    start = jnp.arange(0, kv_length, tiles.block_kv, dtype=jnp.int32)
    end = jnp.minimum(start + tiles.block_kv, kv_length)
    # For each block of keys: from the first query whose range reaches into it to the last whose range does not begin
    # after it. All of these queries that see any key see a key of the block.
    seeing = _Interval(_search_sorted(reached, start, "right"), _search_sorted(ahead, end, "left"))
    if axis == "q":
        found, full = _find_key_intervals(ranges, tiles, kv_length)
    else:
        found = _Interval(seeing.first // tiles.block_q, _count_blocks(seeing.end, tiles.block_q))
        # For each block of keys: from the first query whose range reaches the block's last key to the last query whose
        # range begins at or before its first key. If there are any, they belong to one sequence, and each sees a key.
        whole = _Interval(_search_sorted(reached, end, "left"), _search_sorted(ahead, start, "right"))
        full = _Interval(_count_blocks(whole.first, tiles.block_q), whole.end // tiles.block_q)
    first = jnp.minimum(found.first, found.end)
    full_first = jnp.clip(full.first, first, found.end)
    full = _Interval(full_first, jnp.clip(full.end, full_first, found.end))
    return _list_partial_blocks(some, tiles, axis, seeing, _Interval(first, found.end), full)


def _find_key_intervals(ranges: KeyRanges, tiles: Tiles, kv_length: int) -> tuple[_Interval, _Interval]:
    """Find the interval of key blocks that each block of queries visits, and the interval of full ones."""
    missing = -len(ranges.low) % tiles.block_q
    low, high = (jnp.pad(x, (0, missing)).reshape(-1, tiles.block_q) for x in (ranges.low, ranges.high))
    # A query that sees no key must not widen the interval. Since its range ends at 0, no block is full for it.
    first = jnp.where(low < high, low, kv_length).min(axis=1) // tiles.block_kv
    found = _Interval(first, _count_blocks(high.max(axis=1), tiles.block_kv))
    return found, _Interval(_count_blocks(low.max(axis=1), tiles.block_kv), high.min(axis=1) // tiles.block_kv)


def _list_partial_blocks(
    some: jax.Array, tiles: Tiles, axis: Axis, seeing: _Interval, found: _Interval, full: _Interval
) -> PackedVisits:
    """Build the table, listing the visited blocks that are not full but have an allowed pair.

    An interval may contain empty blocks: with keys of sequences without queries, or with keys before windows.
    """
    full_count = full.end - full.first
    beside = (found.end - found.first) - full_count
    behind = jnp.cumsum(beside, dtype=jnp.int32)
    place = jnp.arange(_bound_partial_blocks(-(-len(some) // tiles.block_q), len(seeing.first)), dtype=jnp.int32)
    program = jnp.minimum(_search_sorted(behind, place, "right"), len(behind) - 1)
    block = found.first[program] + place - (behind - beside)[program]
    block = jnp.where(block < full.first[program], block, block + full_count[program])
    q_block, kv_block = (program, block) if axis == "q" else (block, program)
    before = _count_before(some)
    first = jnp.maximum(seeing.first[kv_block], q_block * tiles.block_q)
    end = jnp.minimum(seeing.end[kv_block], (q_block + 1) * tiles.block_q)
    holds = (place < behind[-1]) & (before[end] > before[first])
    kept = _count_before(holds)
    partial = jnp.zeros_like(place).at[jnp.where(holds, kept[:-1], len(place))].set(block, mode="drop")
    begin = kept[behind - beside]
    return PackedVisits(jnp.stack([full.first, full_count, begin, kept[behind] - begin], axis=-1), partial)


def _bound_partial_blocks(num_q: int, num_kv: int) -> int:
    """Bound the number of partial blocks for this many blocks of queries and of keys.

    Consider a block of queries whose first query sees the keys `l` to `h - 1` and whose last sees `L` to `H - 1`. It
    has fewer than `(L - l + H - h) / block_kv + 4` partial blocks. Since `l` and `h` only grow, these sum to less than
    `2 num_kv + 4 num_q`.

    If some query of the block sees no key, no block of keys is full for it, and there are fewer than
    `(H - l) / block_kv + 2` partial blocks. A key lies between `l` and `H` of at most two such blocks of queries. With
    three, all queries of the middle one would belong to the key's sequence, with queries before and after that see some
    key. So these sum to `2 num_kv` more.

    The same bound holds with the axes exchanged. Blocks with a query that sees no key do not occur then.
    """
    return 4 * (num_q + num_kv)


def _count_before(x: Bool[Array, " n"]) -> Int32[Array, " n+1"]:
    """Count the true values of `[n]` booleans before each index, and in total at the end: int32 `[n + 1]`."""
    return jnp.pad(jnp.cumsum(x, dtype=jnp.int32), (1, 0))


def _search_sorted(grown: Int32[Array, " n"], x: Int32[Array, " m"], side: str) -> Int32[Array, " m"]:
    # Unrolled, since on a GPU each step of a loop is a kernel launch.
    return jnp.searchsorted(grown, x, side=side, method="scan_unrolled").astype(jnp.int32)


def _count_blocks(length: jax.Array, block: int) -> jax.Array:
    """Count the blocks that hold `length` tokens."""
    return (length + (block - 1)) // block
