"""Packed sequences: which keys each query sees, and which blocks a program visits for that.

A query sees the keys `low` to `high - 1` of the pack, and of queries that see any, both numbers grow (`impls.packs`).
So the blocks that hold a pair of a program's block lie between two borders, and those that hold no other pair follow
one another. Both are found at run time, before the kernels, by a few operations on each query.

Between the borders may lie blocks that hold no pair, of sequences without queries or before their windows. Whether one
does is asked where it is visited (`impls.flash_gpu.triton.tiles`), for a list of them would grow with the square of the
pack.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.flash_gpu.block_sizes import Tiles
from impls.packs import Side, Tables, keys_of_queries


class Ranges(NamedTuple):
    """What each query of a pack sees, int32."""

    low: jax.Array  # [T], 0 for a query that sees nothing
    high: jax.Array  # [T], likewise
    tokens: jax.Array  # [1], how many queries sequences have; those behind belong to nobody


class Stretch(NamedTuple):
    """The blocks of each program, int32 `[programs]` each: `first` to `end - 1`, some of which hold no pair.

    Of these, `full_first` to `full_end - 1` hold no pair that may not attend.
    """

    first: jax.Array
    end: jax.Array
    full_first: jax.Array
    full_end: jax.Array


def ranges_of(tables: Tables, sides: tuple[Side, Side], q_length: int) -> Ranges:
    """The ranges of a call over `q_length` queries. Entries of the tables past the last sequence may be anything."""
    low, high = keys_of_queries(tables, sides, q_length)
    return Ranges(low, high, tokens=tables.cu_q_lens[tables.num_seqs])


def stretches_of_queries(ranges: Ranges, tiles: Tiles, kv_length: int) -> Stretch:
    """The blocks of keys that each block of queries visits."""
    missing = -len(ranges.low) % tiles.block_q
    low, high = (jnp.pad(x, (0, missing)).reshape(-1, tiles.block_q) for x in (ranges.low, ranges.high))
    some = low < high
    # A query that sees nothing bounds nothing, and leaves no block full.
    first = jnp.where(some, low, kv_length).min(axis=1) // tiles.block_kv
    end = _blocks(high.max(axis=1), tiles.block_kv)
    full_first = jnp.where(some.all(axis=1), _blocks(low.max(axis=1), tiles.block_kv), end)
    return _in_order(first, end, full_first, high.min(axis=1) // tiles.block_kv)


def stretches_of_keys(ranges: Ranges, tiles: Tiles, kv_length: int) -> Stretch:
    """The blocks of queries that each block of keys visits.

    A query that sees nothing takes the numbers of its neighbours here. If these see a block whole, they are of one
    sequence, and so is every query between them: then it sees the block too.
    """
    some = ranges.low < ranges.high
    reached = lax.cummax(jnp.where(some, ranges.high, 0))  # by queries up to this one
    ahead = lax.cummin(jnp.where(some, ranges.low, kv_length), reverse=True)  # of queries from this one on
    start = jnp.arange(0, kv_length, tiles.block_kv, dtype=jnp.int32)
    end = jnp.minimum(start + tiles.block_kv, kv_length)
    # The numbers of the first queries that reach beyond the block's first key and to its last one, and of those behind
    # the last queries that see any of its keys and its first one.
    into, through = _place(reached, start, "right"), _place(reached, end, "left")
    past, behind = _place(ahead, end, "left"), _place(ahead, start, "right")
    return _in_order(
        into // tiles.block_q, _blocks(past, tiles.block_q), _blocks(through, tiles.block_q), behind // tiles.block_q
    )


def _place(grown: jax.Array, x: jax.Array, side: str) -> jax.Array:
    # Unrolled, since on a GPU a loop is a launch for each of its steps.
    return jnp.searchsorted(grown, x, side=side, method="scan_unrolled").astype(jnp.int32)


def _blocks(length: jax.Array, block: int) -> jax.Array:
    """How many blocks hold so many tokens."""
    return (length + (block - 1)) // block


def _in_order(first: jax.Array, end: jax.Array, full_first: jax.Array, full_end: jax.Array) -> Stretch:
    """The four with no more between two of them than there is: none in place of fewer than none."""
    first = jnp.minimum(first, end)
    full_first = jnp.clip(full_first, first, end)
    return Stretch(first, end, full_first, full_end=jnp.clip(full_end, full_first, end))
