"""Blocks of pages that the TPU kernel copies to VMEM ahead of its products, and rows that it writes back.

A block is a number of pages that are consecutive in the table of a tile's sequence. The first block begins with the
page of the first key that the tile sees. The blocks of all tiles are one list. So the pages of the next block are
copied while a block is computed, also across tiles and sequences.

Every copy that is started must be waited for, with the same number of bytes. So starting and waiting iterate over the
same description of the copies. Whole blocks are the exception: one wait covers all of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.jax_compat import Scalar
from impls.paged.paged_plan import Operands, PagedPlan, QueryTiles, find_block_range
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
    keys: int  # bytes of keys and values per block; VMEM has up to three such: two buffers, and a copy split by head


class PageBlocks(NamedTuple):
    """Page blocks that each of up to `L` query tiles copies, int32 `[L]`. Unused tiles have no blocks."""

    slot: jax.Array  # start of the tile's first block: an index into the page table row of the tile's sequence
    end: jax.Array  # one past the last index into this row that the tile needs
    length: jax.Array  # number of the tile's blocks
    before: jax.Array  # number of blocks of all earlier tiles
    following: jax.Array  # index of the next tile that has a block; `L` if no later tile has one


def build_blocks(plan: PagedPlan, operands: Operands, tiles: QueryTiles) -> PageBlocks:
    """Build the page blocks of each tile, from the first page that its queries see to the last."""
    keys = None if plan.right == 0 else operands.kv_lens[tiles.sequence]
    slot, end = find_block_range(plan, tiles.position, tiles.queries, operands.k_pages.shape[1], keys)
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
    that are being written. The more queries a tile has, the less often pages are copied.
    """
    capacity = find_limit(None).bytes
    if capacity >= 4 * DEFAULT_SCOPED:
        return VmemRoom(vmem=3 * capacity // 4, rows=8192, keys=2 * 2**20)
    return VmemRoom(vmem=DEFAULT_SCOPED, rows=3072, keys=2**20)


def choose_block_q(total_q: int, heads: int, *, latent: bool = False, pairwise: bool = False, columns: int = 0) -> int:
    """Choose the default queries per tile: as many as fit VMEM, at most 128.

    A row of a latent of 512 + 64 takes 9.3 KiB, less than three times what a row at depth 128 takes.

    Args:
      pairwise: whether logits or masks differ by pair, beside causal masks and windows. The positions of all pairs are
        then in VMEM too, and the compiler takes longer.
      columns: those of masks that are arrays. Of each, a query takes 2 bytes in each of two buffers.
    """
    if columns:
        total_q = min(total_q, find_chip_room().keys // (2 * NUM_BUFFERS * columns))
    rows = find_chip_room().rows // (3 if latent else 2 if pairwise else 1)
    if latent or pairwise:
        rows = min(rows, LATENT_ROWS)
    return max(1, min(total_q, 128, rows // heads))


def choose_block_kv(num_kv_heads: int, depths: Sequence[int], itemsize: int) -> int:
    """Choose the default keys per block: as many as fit VMEM, from 16 to 512. Latents have a single depth."""
    width = sum(-(-depth // LANES) * LANES for depth in depths)
    return max(16, min(512, find_chip_room().keys // (num_kv_heads * width * itemsize)))


def side_by_side(k_scales: jax.Array, v_scales: jax.Array) -> jax.Array:
    """Convert scales `[pages, page_size, K]` to the layout of the TPU kernel: those of a token in one row of lanes.

    Copies must be whole tiles of 8 by 128 numbers. XLA lays out `[pages, page_size, K]` with the pages in the lanes, so
    the scales of one page are not contiguous. Pages of `[page_size, 128]` are contiguous. So scales are stored in that
    layout from the start, and a row is written with its token. Converting the layout in every call would touch all
    pages, also those that are not read.

    Returns:
      f32 `[pages, page_size, W]` with W lanes, a multiple of 128: the first K lanes hold the scales of the keys, the
      next K lanes the scales of the values, and the others zeros.
    """
    both = jnp.concatenate([k_scales, v_scales], axis=-1)
    return jnp.pad(both, ((0, 0), (0, 0), (0, -both.shape[-1] % LANES)))


def check_page_scales(page_scales: Any, k_pages: Any) -> None:
    """Raise `ValueError` if `page_scales` has a wrong shape or dtype for the TPU kernel; the message says which."""
    *rows, num_kv_heads, _ = k_pages.shape
    if page_scales.ndim != 3 or [*page_scales.shape[:2]] != rows or page_scales.shape[2] % LANES:
        wanted = f"[{rows[0]}, {rows[1]}, a multiple of {LANES}]"
        raise ValueError(f"page_scales must have shape {wanted}, as side_by_side gives, got {page_scales.shape}")
    if page_scales.shape[2] < 2 * num_kv_heads:
        raise ValueError(
            f"page_scales must have lanes for keys and values of {num_kv_heads} heads, got {page_scales.shape[2]}"
        )
    if page_scales.dtype != jnp.float32:
        raise ValueError(f"page_scales must be float32, got {page_scales.dtype}: cast with astype")


PAGES_AT_ONCE = 4
"""Pages whose copies are started together, so that their scalar computations overlap."""
Copy = Any
"""The result of `pltpu.make_async_copy`."""


class PageCache(NamedTuple):
    """Refs of the pages in HBM, and the VMEM buffers of a block: for keys, and for values if they have their own pages.

    A buffer of pages with heads holds the tokens of a block one after another, `[BUFFERS, block, K, .]`. With pairs of
    heads (`holds_pairs`) it is `[BUFFERS, block, stride, 2, .]`, with room for `find_pair_stride` pairs. A buffer of
    latents keeps the axis of pages, `[BUFFERS, block_pages, page_size, .]`: a memory tile spans several tokens, and a
    copy must begin at the start of a memory tile.
    """

    page_indices: Any  # SMEM [max_seqs * pages_per_seq]
    pages: tuple[Any, ...]  # HBM [pages, page_size, ...]
    held: tuple[Any, ...]  # VMEM buffers, one for each array of `pages`
    arrived: Any  # semaphores of the copies, [len(held), BUFFERS]
    pages_per_seq: int
    block_pages: int
    reshapes: bool = True  # whether references can be reshaped: on a TPU, and in the fast interpreter

    @property
    def paired(self) -> bool:
        """True if the buffers hold pairs of heads."""
        return len(self.held[0].shape) == 5

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        size: int = self.pages[0].shape[1]
        return size

    @property
    def block(self) -> int:
        """Tokens per block."""
        return self.block_pages * self.page_size


def holds_pairs(operands: Operands) -> bool:
    """Check whether the kernel loads the heads of these pages in pairs: bf16 without scales, in whole lanes."""
    k, v = operands.k_pages, operands.v_pages
    if v is None or operands.page_scales is not None or not operands.q.dtype == k.dtype == jnp.bfloat16:
        return False
    return k.shape[2] % 2 == 0 and k.shape[3] % LANES == 0 and v.shape[3] % LANES == 0


def split_pairs(pages: jax.Array) -> jax.Array:
    """Split the axis of heads into pairs, `[pages, page_size, K / 2, 2, H]`; on a TPU this moves nothing in memory.

    A TPU stores two rows of bf16 in one row of 32-bit words, each word with a number of either row.
    """
    first, size, heads, depth = pages.shape
    return pages.reshape(first, size, heads // 2, 2, depth)


def find_pair_stride(num_kv_heads: int) -> int:
    """Find the number of pairs of heads from token to token in VMEM.

    Loads of one pair skip the other pairs. VMEM has banks, and with an odd stride consecutive tokens lie in different
    ones. (`has_bank_conflicts` of tpu-inference 0.32.0 counts 32 banks and avoids even strides too.)
    """
    return num_kv_heads // 2 | 1


def load_pair(cache: PageCache, which: int, buffer: Scalar, pair: Scalar) -> jax.Array:
    """Load a pair of heads of a whole block as 32-bit words, `[block, H]`: the first head's numbers are the low halves.

    The words of consecutive tokens are a fixed number of rows apart, which a TPU loads at once.

    Args:
      which: 0 for keys, 1 for values.
    """
    held = cache.held[which]
    _, block, stride, _, depth = held.shape
    if not cache.reshapes:  # the interpreter that detects races cannot reshape references
        return lax.bitcast_convert_type(held[buffer, :, pair].swapaxes(1, 2), jnp.uint32)
    parts = depth // LANES
    words = held.bitcast(jnp.uint32).at[buffer].reshape(block * stride * parts, LANES)
    found = [words[pl.ds(pair * parts + part, block, stride * parts)] for part in range(parts)]
    return found[0] if parts == 1 else jnp.concatenate(found, axis=1)


def take_head(pair: jax.Array, odd: int) -> jax.Array:
    """Take one head of a pair, `[block, H]` in bf16."""
    return pltpu.bitcast((pair >> jnp.uint32(16 * odd)).astype(jnp.uint16), jnp.bfloat16)


class Results(NamedTuple):
    """Refs of a tile's results, `[block_q, N, .]` in VMEM, and of their destination, `[total_q, N, .]` in HBM."""

    tile: tuple[Any, ...]
    all: tuple[Any, ...]
    written: Any  # semaphores of the copies to HBM, one for each array


def find_buffer(blocks: PageBlocks, tile: Scalar, block: Scalar) -> Any:
    """Find the buffer of a block. Blocks alternate between buffers, counted over all tiles."""
    return lax.rem(blocks.before[tile] + block, jnp.int32(NUM_BUFFERS))


def start_block(cache: PageCache, tiles: QueryTiles, blocks: PageBlocks, tile: Scalar, block: Scalar) -> None:
    """Start the copies of a block's pages, all at once."""
    _for_each_page(cache, tiles, blocks, tile, block, lambda copy: copy.start())


def wait_for_block(cache: PageCache, tiles: QueryTiles, blocks: PageBlocks, tile: Scalar, block: Scalar) -> None:
    """Wait until all pages of a block have arrived. One wait suffices for a whole block: semaphores count bytes."""
    buffer, block_pages = find_buffer(blocks, tile, block), cache.block_pages
    whole = blocks.end[tile] - (blocks.slot[tile] + block * block_pages) >= block_pages

    def at_once() -> None:
        for n, (pages, held) in enumerate(zip(cache.pages, cache.held, strict=True)):
            there = held.at[buffer, :, : pages.shape[2]] if cache.paired else held.at[buffer]
            copy: Copy = pltpu.make_async_copy(there, there, cache.arrived.at[n, buffer])
            copy.wait()

    pl.when(whole)(at_once)

    @pl.when(jnp.logical_not(whole))
    def page_by_page() -> None:
        _for_each_page(cache, tiles, blocks, tile, block, lambda copy: copy.wait())


def is_whole(cache: PageCache, blocks: PageBlocks, tile: Scalar, block: Scalar) -> Any:
    """Check whether a block has all of its pages; the last block of a tile may have fewer."""
    return blocks.end[tile] - (blocks.slot[tile] + block * cache.block_pages) >= cache.block_pages


def build_starts(
    cache: PageCache, tiles: QueryTiles, blocks: PageBlocks, tile: Scalar, block: Scalar
) -> Callable[[int, int], None]:
    """Build the function that starts part `number` of the copies of a whole block, divided into `of` parts."""
    buffer, block_pages = find_buffer(blocks, tile, block), cache.block_pages
    entry = _find_entry(cache, tiles, blocks, tile, block)

    def start(number: int, of: int) -> None:
        for at in range(number * block_pages // of, (number + 1) * block_pages // of):
            for copy in _list_copies(cache, buffer, entry, at):
                copy.start()

    return start


def _for_each_page(
    cache: PageCache, tiles: QueryTiles, blocks: PageBlocks, tile: Scalar, block: Scalar, do: Callable[[Copy], None]
) -> None:
    buffer, block_pages = find_buffer(blocks, tile, block), cache.block_pages
    entry = _find_entry(cache, tiles, blocks, tile, block)

    def keys_and_values(number: Scalar, _: None) -> None:
        for copy in _list_copies(cache, buffer, entry, number):
            do(copy)

    def several(number: Scalar, _: None) -> None:
        for n in range(PAGES_AT_ONCE):
            keys_and_values(number * PAGES_AT_ONCE + n, None)

    # Entries past the last page that a query sees may hold any value, and are never read.
    slot = blocks.slot[tile] + block * block_pages
    pages = jnp.minimum(blocks.end[tile] - slot, block_pages)
    together = pages // PAGES_AT_ONCE if block_pages >= PAGES_AT_ONCE else jnp.int32(0)
    lax.fori_loop(jnp.int32(0), together, several, None)
    lax.fori_loop(together * PAGES_AT_ONCE, pages, keys_and_values, None)


def _find_entry(cache: PageCache, tiles: QueryTiles, blocks: PageBlocks, tile: Scalar, block: Scalar) -> Any:
    """Find the index in the flat page table of a block's first page."""
    return tiles.sequence[tile] * cache.pages_per_seq + blocks.slot[tile] + block * cache.block_pages


def _list_copies(cache: PageCache, buffer: Scalar, entry: Scalar, number: Scalar) -> list[Copy]:
    """List the copies of a block's page `number`, one for each array of pages; `entry` is that of the first page."""
    page, size, copies = cache.page_indices[entry + number], cache.page_size, []
    for n, (pages, held) in enumerate(zip(cache.pages, cache.held, strict=True)):
        if cache.paired:
            place = held.at[buffer, pl.ds(number * size, size), : pages.shape[2]]
        elif len(held.shape) > len(pages.shape):
            place = held.at[buffer, number]
        else:
            place = held.at[buffer, pl.ds(number * size, size)]
        copies.append(pltpu.make_async_copy(pages.at[page], place, cache.arrived.at[n, buffer]))
    return copies


def start_rows(results: Results, tiles: QueryTiles, tile: Scalar) -> None:
    """Start the copies of a tile's rows. Only valid rows are copied: later rows belong to another sequence."""
    _for_each_row(results, tiles, tile, lambda copy: copy.start())


def wait_for_rows(results: Results, tiles: QueryTiles, tile: Scalar) -> None:
    """Wait until a tile's rows are written back."""
    _for_each_row(results, tiles, tile, lambda copy: copy.wait())


def _for_each_row(results: Results, tiles: QueryTiles, tile: Scalar, do: Callable[[Copy], None]) -> None:
    row = tiles.row[tile]

    def every(number: Scalar, _: None) -> None:
        for n, (from_tile, to_all) in enumerate(zip(results.tile, results.all, strict=True)):
            do(pltpu.make_async_copy(from_tile.at[number], to_all.at[row + number], results.written.at[n]))

    lax.fori_loop(jnp.int32(0), tiles.queries[tile], every, None)
