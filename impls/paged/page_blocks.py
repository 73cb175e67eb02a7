"""Which pages the TPU kernel copies, and how large its tiles and blocks are.

A block is so many pages of one tile's sequence, one behind the other in its row of the table, beginning with the page
of the first key that the tile sees. The blocks of all tiles are one list, so that the pages of the next block are on
their way while one is computed, across the border of two tiles and of two sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.paged.paged_plan import Operands, PagedPlan, find_block_range
from impls.paged.query_tiles import QueryTiles
from impls.splash_tpu.vmem import DEFAULT_SCOPED, find_limit

LANES = 128
SUBLANES = 8
NUM_BUFFERS = 2
"""Blocks of pages that VMEM holds: one is computed, one is on its way."""
LATENT_ROWS = 2048
"""Queries times heads of a tile of latents: from there on its products take longer than its pages to come."""


class VmemRoom(NamedTuple):
    """What fits into the VMEM of a chip."""

    vmem: int  # bytes that the kernel may take
    rows: int  # queries times heads of a tile
    keys: int  # bytes of the keys and values of a block, of which there are three: two buffers and heads apart


class PageBlocks(NamedTuple):
    """Lists of what each tile has copied; int32 `[L]`. A tile past the last has nothing."""

    slot: jax.Array  # entry of its sequence's row of the table with which its first block begins
    end: jax.Array  # one past the last entry
    length: jax.Array  # how many blocks it has
    before: jax.Array  # how many all tiles before it have
    following: jax.Array  # the next tile that has a block; L if none has


def build_blocks(plan: PagedPlan, operands: Operands, tiles: QueryTiles) -> PageBlocks:
    """The blocks of a call: pages of which a tile's queries see no key are in none."""
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
    """What fits on the chip that is traced for.

    At depth 128 a row takes 3.6 KiB beside its logits: accumulators, queries, and results on their way. The more
    queries a tile has, the less often pages are copied and their heads taken apart. By the compiler's schedule, 512
    queries of each of four sequences of 4,096 keys take 3,871 kilocycles on v5e in tiles of 64, 2,952 in tiles of 128.
    """
    capacity = find_limit(None).bytes
    if capacity >= 4 * DEFAULT_SCOPED:
        return VmemRoom(vmem=3 * capacity // 4, rows=8192, keys=2 * 2**20)
    return VmemRoom(vmem=DEFAULT_SCOPED, rows=3072, keys=2**20)


def choose_block_q(total_q: int, heads: int, *, latent: bool = False) -> int:
    """Queries of a tile by default: as many as VMEM has room for, at most 128.

    A row of a latent of 512 + 64 takes 9.3 KiB, less than three times what a row at depth 128 takes.
    """
    rows = min(find_chip_room().rows // 3, LATENT_ROWS) if latent else find_chip_room().rows
    return max(1, min(total_q, 128, rows // heads))


def choose_block_kv(num_kv_heads: int, depths: Sequence[int], itemsize: int) -> int:
    """Keys of a block by default: as many as VMEM has room for, from 16 to 512; of a latent there is but one depth."""
    width = sum(-(-depth // LANES) * LANES for depth in depths)
    return max(16, min(512, find_chip_room().keys // (num_kv_heads * width * itemsize)))
