"""Division of the key blocks of a call between the programs of a GPU.

A call may have tiles of long sequences, with many blocks of keys, and tiles of short ones. So a share is a fixed number
of blocks of one tile; the number follows from the total of all blocks. A program computes one share, whether its tile
is a part of a prompt or a single token over a long cache. Sharing one query's keys between programs follows Dao,
Haziza, Massa and Sizov 2023, "Flash-Decoding".

The list has the maximal length for the shapes. It is built on the device from tables that may differ in every call.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from impls.paged.paged_plan import PagedPlan, find_block_range
from impls.paged.query_tiles import QueryTiles


class KeyShares(NamedTuple):
    """Lists of shares `[W]`, and the shares of each tile `[L]`; int32. Entries past the last share have no block."""

    tile: jax.Array  # [W], tile that the share belongs to
    first: jax.Array  # [W], index of the share's first block in its sequence
    end: jax.Array  # [W], one past the share's last block
    before: jax.Array  # [L], number of shares of all earlier tiles
    own: jax.Array  # [L], number of the tile's shares; 0 if its queries see no key


def build_shares(plan: PagedPlan, tiles: QueryTiles, *, block: int, programs: int) -> KeyShares:
    """Build the shares of a call with blocks of `block` keys: about `programs`, plus at most one per tile."""
    number = jnp.arange(len(tiles.row), dtype=jnp.int32)
    first, end = find_block_range(plan, tiles.position, tiles.queries, block)
    first = jnp.broadcast_to(first, number.shape)
    blocks = jnp.where(number < tiles.total, jnp.maximum(end - first, 0), 0)
    size = jnp.maximum((blocks.sum(dtype=jnp.int32) + (programs - 1)) // programs, 1)
    count = (blocks + (size - 1)) // size
    ends = jnp.cumsum(count, dtype=jnp.int32)
    share = jnp.arange(len(number) + programs, dtype=jnp.int32)
    tile = jnp.minimum(jnp.searchsorted(ends, share, side="right", method="scan_unrolled"), len(number) - 1).astype(
        jnp.int32
    )
    begin = first[tile] + (share - (ends - count)[tile]) * size
    return KeyShares(
        tile=tile,
        first=begin.astype(jnp.int32),
        end=jnp.where(share < ends[-1], jnp.minimum(begin + size, end[tile]), begin).astype(jnp.int32),
        before=ends - count,
        own=count,
    )
