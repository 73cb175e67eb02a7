"""Async copies between HBM and VMEM: prefetch pages into a buffer, and write the rows of a tile back.

Every copy that is started must be waited for, with the same number of bytes. So starting and waiting iterate over the
same description of the copies. Whole blocks are the exception: one wait covers all of their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.jax_compat import Scalar
from impls.paged.page_blocks import NUM_BUFFERS, PageBlocks
from impls.paged.query_tiles import QueryTiles

PAGES_AT_ONCE = 4
"""Pages whose copies are started together, so that their scalar computations overlap."""
Copy = Any
"""The result of `pltpu.make_async_copy`."""


class PageCache(NamedTuple):
    """Refs of the pages in HBM, and the VMEM buffers of a block: for keys, and for values if they have their own pages.

    A buffer of pages with heads holds the tokens of a block one after another, `[BUFFERS, block, K, .]`. A buffer of
    latents keeps the axis of pages, `[BUFFERS, block_pages, page_size, .]`: a memory tile spans several tokens, and a
    copy must begin at the start of a memory tile.
    """

    page_indices: Any  # SMEM [max_seqs * pages_per_seq]
    pages: tuple[Any, ...]  # HBM [pages, page_size, ...]
    held: tuple[Any, ...]  # VMEM buffers, one for each array of `pages`
    arrived: Any  # semaphores of the copies, [len(held), BUFFERS]
    pages_per_seq: int
    block_pages: int

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        size: int = self.pages[0].shape[1]
        return size

    @property
    def block(self) -> int:
        """Tokens per block."""
        return self.block_pages * self.page_size


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
        for n, held in enumerate(cache.held):
            there = held.at[buffer]
            copy: Copy = pltpu.make_async_copy(there, there, cache.arrived.at[n, buffer])
            copy.wait()

    pl.when(whole)(at_once)

    @pl.when(jnp.logical_not(whole))
    def page_by_page() -> None:
        _for_each_page(cache, tiles, blocks, tile, block, lambda copy: copy.wait())


def _for_each_page(
    cache: PageCache, tiles: QueryTiles, blocks: PageBlocks, tile: Scalar, block: Scalar, do: Callable[[Copy], None]
) -> None:
    size, block_pages = cache.page_size, cache.block_pages
    buffer = find_buffer(blocks, tile, block)
    slot = blocks.slot[tile] + block * block_pages
    entry = tiles.sequence[tile] * cache.pages_per_seq + slot

    def keys_and_values(number: Scalar, _: None) -> None:
        page = cache.page_indices[entry + number]
        for n, (pages, held) in enumerate(zip(cache.pages, cache.held, strict=True)):
            whole = len(held.shape) > len(pages.shape)
            place = held.at[buffer, number] if whole else held.at[buffer, pl.ds(number * size, size)]
            do(pltpu.make_async_copy(pages.at[page], place, cache.arrived.at[n, buffer]))

    def several(number: Scalar, _: None) -> None:
        for n in range(PAGES_AT_ONCE):
            keys_and_values(number * PAGES_AT_ONCE + n, None)

    # Entries past the last page that a query sees may hold any value, and are never read.
    pages = jnp.minimum(blocks.end[tile] - slot, block_pages)
    together = pages // PAGES_AT_ONCE if block_pages >= PAGES_AT_ONCE else jnp.int32(0)
    lax.fori_loop(jnp.int32(0), together, several, None)
    lax.fori_loop(together * PAGES_AT_ONCE, pages, keys_and_values, None)


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
