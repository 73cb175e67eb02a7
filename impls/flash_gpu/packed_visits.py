"""Packed sequences: which keys each query sees, and which blocks a program visits for that.

A query sees the keys `low` to `high - 1` of the pack, and of queries that see any, both numbers grow (`impls.packed_sequences`).
So the pairs of blocks that hold a pair of query and key lie along a path. For each program they lie between two
borders, and those that hold nothing but such pairs follow one another: a kernel counts them up. The others are listed.
They lie where `low` or `high` moves on, and each does so once along the pack. So their number grows with the number of
blocks and not with its square, and the list has as many places as there can be of them.

All of that is found at run time, before the kernels, by a few operations on each query and block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.flash_gpu.block_sizes import Axis, Tiles
from impls.packed_sequences import SequenceTables, Side, compute_key_ranges


class KeyRanges(NamedTuple):
    """What each query of a pack sees, int32."""

    low: jax.Array  # [T], 0 for a query that sees nothing
    high: jax.Array  # [T], likewise
    tokens: jax.Array  # [1], how many queries sequences have; those behind belong to nobody


class PackedVisits(NamedTuple):
    """Blocks that each program visits, int32."""

    table: jax.Array  # [programs, 4]: first and count of the full blocks, then where its partial ones are listed
    partial: jax.Array  # [places], the partial blocks of all programs one after another


class _Interval(NamedTuple):
    """`first` to `end - 1` of the other axis for each block of one, int32."""

    first: jax.Array
    end: jax.Array


def compute_ranges(tables: SequenceTables, sides: tuple[Side, Side], q_length: int) -> KeyRanges:
    """The ranges of a call over `q_length` queries. Entries of the tables past the last sequence may be anything."""
    low, high = compute_key_ranges(tables, sides, q_length)
    return KeyRanges(low, high, tokens=tables.cu_q_lens[tables.num_seqs])


def compute_visits(ranges: KeyRanges, tiles: Tiles, axis: Axis, kv_length: int) -> PackedVisits:
    """What the programs of a kernel visit, each having one block along `axis`: every block that holds a pair, once."""
    some = ranges.low < ranges.high
    reached = lax.cummax(jnp.where(some, ranges.high, 0))  # by queries up to this one
    ahead = lax.cummin(jnp.where(some, ranges.low, kv_length), reverse=True)  # of queries from this one on
    start = jnp.arange(0, kv_length, tiles.block_kv, dtype=jnp.int32)
    end = jnp.minimum(start + tiles.block_kv, kv_length)
    # The queries from the first that reaches into a block of keys to the last that does not begin behind it. Those of
    # them that see anything see a key of the block.
    seeing = _Interval(_search_sorted(reached, start, "right"), _search_sorted(ahead, end, "left"))
    if axis == "q":
        found, full = _find_key_intervals(ranges, tiles, kv_length)
    else:
        found = _Interval(seeing.first // tiles.block_q, _count_blocks(seeing.end, tiles.block_q))
        # From the first that reaches its last key to the last that begins at its first one: they are of one sequence,
        # or none is between them, so each sees something.
        whole = _Interval(_search_sorted(reached, end, "left"), _search_sorted(ahead, start, "right"))
        full = _Interval(_count_blocks(whole.first, tiles.block_q), whole.end // tiles.block_q)
    first = jnp.minimum(found.first, found.end)
    full_first = jnp.clip(full.first, first, found.end)
    full = _Interval(full_first, jnp.clip(full.end, full_first, found.end))
    return _list_partial_blocks(some, tiles, axis, seeing, _Interval(first, found.end), full)


def _find_key_intervals(ranges: KeyRanges, tiles: Tiles, kv_length: int) -> tuple[_Interval, _Interval]:
    """The blocks of keys between the borders of each block of queries, and the full ones."""
    missing = -len(ranges.low) % tiles.block_q
    low, high = (jnp.pad(x, (0, missing)).reshape(-1, tiles.block_q) for x in (ranges.low, ranges.high))
    # A query that sees nothing bounds nothing. Since it ends at 0, no block is full for it.
    first = jnp.where(low < high, low, kv_length).min(axis=1) // tiles.block_kv
    found = _Interval(first, _count_blocks(high.max(axis=1), tiles.block_kv))
    return found, _Interval(_count_blocks(low.max(axis=1), tiles.block_kv), high.min(axis=1) // tiles.block_kv)


def _list_partial_blocks(
    some: jax.Array, tiles: Tiles, axis: Axis, seeing: _Interval, found: _Interval, full: _Interval
) -> PackedVisits:
    """The table and its list: of the blocks beside the full ones, those that hold a pair.

    Of keys of sequences without queries, and of those before windows, blocks may lie between the borders and hold none.
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
    """Places for the blocks beside full ones, of so many blocks of queries and of keys.

    Beside the full blocks of a block of queries, whose queries see the keys `l` to `h - 1` at first and `L` to `H - 1`
    at last, lie fewer than `(L - l + H - h) / block_kv + 4`. Since `l` and `h` only grow, these sum to less than
    `2 num_kv + 4 num_q`. If one of the queries sees nothing, no block is full, and there are fewer than
    `(H - l) / block_kv + 2`. A key lies between `l` and `H` of two such blocks at most: between three, all queries of
    the second were of its sequence, with queries before and behind that see something. So these sum to `2 num_kv`
    more. Blocks of keys are as those of queries, and none is of the second kind.
    """
    return 4 * (num_q + num_kv)


def _count_before(x: jax.Array) -> jax.Array:
    """How many of `[n]` booleans are true before each place, and behind the last: int32 `[n + 1]`."""
    return jnp.pad(jnp.cumsum(x, dtype=jnp.int32), (1, 0))


def _search_sorted(grown: jax.Array, x: jax.Array, side: str) -> jax.Array:
    # Unrolled, since on a GPU a loop is a launch for each of its steps.
    return jnp.searchsorted(grown, x, side=side, method="scan_unrolled").astype(jnp.int32)


def _count_blocks(length: jax.Array, block: int) -> jax.Array:
    """How many blocks hold so many tokens."""
    return (length + (block - 1)) // block
