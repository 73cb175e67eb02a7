"""List the blocks of pages that the TPU kernel copies, and choose default sizes of tiles and blocks.

A block is a number of pages that are consecutive in the table of a tile's sequence. The first block begins with the
page of the first key that the tile sees. The blocks of all tiles are one list. So the pages of the next block are
copied while a block is computed, also across tiles and sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.paged.paged_plan import Operands, PagedPlan, find_block_range
from impls.paged.query_tiles import QueryTiles
from impls.pallas_tpu.tpu_tiles import DEFAULT_SCOPED, find_limit

LANES = 128
NUM_BUFFERS = 2
"""Blocks of pages in VMEM: one is being computed, one is being copied."""
LATENT_ROWS = 2048
"""Queries times heads of a tile over latents. From this number on, products take longer than copying the pages."""


class VmemRoom(NamedTuple):
    """Largest sizes that fit the VMEM of a chip."""

    vmem: int  # bytes of VMEM that the kernel may take
    rows: int  # rows of a tile: queries times heads
    keys: int  # bytes of keys and values per block; VMEM has three such: two buffers, and a copy split by head


class PageBlocks(NamedTuple):
    """Page blocks that each query tile copies, int32 `[L]`, with one entry per tile.

    `L` is the largest possible number of tiles. Entries past the last tile in use have no blocks.
    """

    slot: jax.Array  # start of the tile's first block: an index into the page table row of the tile's sequence
    end: jax.Array  # one past the last index into this row that the tile needs
    length: jax.Array  # number of the tile's blocks
    before: jax.Array  # number of blocks of all earlier tiles
    following: jax.Array  # index of the next tile that has a block; `L` if no later tile has one


def build_blocks(plan: PagedPlan, operands: Operands, tiles: QueryTiles) -> PageBlocks:
    """Build the blocks of a call. Pages without a key that the tile's queries see are in no block."""
    slot, end = find_block_range(plan, tiles.position, tiles.queries, operands.k_pages.shape[1])
    number = jnp.arange(len(tiles.row), dtype=jnp.int32)
    pages = jnp.where(number < tiles.total, jnp.maximum(end - slot, 0), 0)
    count = (pages + (plan.block_pages - 1)) // plan.block_pages
    latest = lax.cummin(jnp.where(count > 0, number, len(number)), reverse=True)
    return PageBlocks(
        slot=jnp.broadcast_to(slot, number.shape).astype(jnp.int32),
        end=end.astype(jnp.int32),
        length=count,
        before=jnp.cumsum(count, dtype=jnp.int32) - count,
        following=jnp.append(latest[1:], jnp.int32(len(number))),
    )


def find_chip_room() -> VmemRoom:
    """Find the sizes that fit the target chip.

    A row is one head of one query. At depth 128 it takes 3.6 KiB beside its logits: accumulators, queries, and results
    that are being written. The more queries a tile has, the less often pages are copied and split by head. By the
    compiler's schedule, four sequences of 4,096 keys with 512 queries each take 3,871 kilocycles on v5e in tiles of 64
    queries, and 2,952 in tiles of 128.
    """
    capacity = find_limit(None).bytes
    if capacity >= 4 * DEFAULT_SCOPED:
        return VmemRoom(vmem=3 * capacity // 4, rows=8192, keys=2 * 2**20)
    return VmemRoom(vmem=DEFAULT_SCOPED, rows=3072, keys=2**20)


def choose_block_q(total_q: int, heads: int, *, latent: bool = False) -> int:
    """Choose the default queries per tile: as many as fit VMEM, at most 128.

    A row of a latent of 512 + 64 takes 9.3 KiB, less than three times what a row at depth 128 takes.
    """
    rows = min(find_chip_room().rows // 3, LATENT_ROWS) if latent else find_chip_room().rows
    return max(1, min(total_q, 128, rows // heads))


def choose_block_kv(num_kv_heads: int, depths: Sequence[int], itemsize: int) -> int:
    """Choose the default keys per block: as many as fit VMEM, from 16 to 512. Latents have a single depth."""
    width = sum(-(-depth // LANES) * LANES for depth in depths)
    return max(16, min(512, find_chip_room().keys // (num_kv_heads * width * itemsize)))
