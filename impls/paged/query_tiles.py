"""Tiles of queries: the queries of each sequence, `block_q` at a time, one sequence after the other.

The list has the maximal length for the shapes, and only the first `total` tiles are computed. So the work grows with
the actual queries, not with `max_seqs`. The list is built on the device from tables that may differ in every call.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from impls.paged.paged_plan import Operands


class QueryTiles(NamedTuple):
    """Lists of tiles; int32."""

    total: Int32[Array, ""]  # number of tiles
    sequence: Int32[Array, " L"]  # sequence of the tile
    row: Int32[Array, " L"]  # index of the tile's first query in `q`
    queries: Int32[Array, " L"]  # number of the tile's queries
    position: Int32[Array, " L"]  # position of the tile's first query in its sequence


def build_tiles(operands: Operands, block_q: int) -> QueryTiles:
    """Build the tiles of a call. Table entries past the last sequence may be any integers."""
    most = len(operands.kv_lens)
    number_of = jnp.arange(most, dtype=jnp.int32)
    q_lens = jnp.where(number_of < operands.num_seqs[0], jnp.diff(operands.cu_q_lens), 0)
    tiles = (q_lens + (block_q - 1)) // block_q
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    longest = min(-(-len(operands.q) // block_q) + most, len(operands.q))  # each tile has a query
    number = jnp.arange(longest, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, number, side="right", method="scan_unrolled"), most - 1).astype(
        jnp.int32
    )
    inside = (number - (ends - tiles)[sequence]) * block_q
    return QueryTiles(
        total=ends[-1],
        sequence=sequence,
        row=operands.cu_q_lens[sequence] + inside,
        queries=jnp.minimum(q_lens[sequence] - inside, block_q),
        position=(operands.kv_lens - q_lens)[sequence] + inside,
    )
