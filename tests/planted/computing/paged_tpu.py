"""Bugs that only a paged kernel can have that copies its pages by itself, each one passage of ours changed."""

from __future__ import annotations

import functools

from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.paged_bug import in_pages, several, windowed
from tests.planted.planting.source_change import Change, build_changed

_build = functools.partial(build_changed, "impls.paged", "build_implementation", backend="tpu")
_bug = functools.partial(stored_bug.bug, family="paged tpu", build=_build, trigger=in_pages)

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "paged-tpu-first-block-not-awaited",
        Change(
            "paged_tpu",
            "        wait_for_block(cache, tiles, blocks, number, block)\n",
            "        pl.when(block > 0)(functools.partial(wait_for_block, cache, tiles, blocks, number, block))\n",
        ),
        kind="pipeline.missing-wait",
        reference="inferred: the wait for what the tile before had asked for is forgotten",
        shows="races out",
    ),
    _bug(
        "paged-tpu-buffer-of-the-other-parity",
        Change("paged_tpu", "find_buffer(blocks, number, block)\n", "find_buffer(blocks, number, block + 1)\n"),
        kind="pipeline.parity",
        reference="inferred from jax ragged_paged_attention (buffer index carried between steps)",
        shows="out logsumexp max_logits",
    ),
    _bug(
        "paged-tpu-buffers-counted-anew-by-each-tile",
        Change("page_copies", "blocks.before[tile] + block, jnp", "block, jnp"),
        kind="pipeline.parity",
        reference="inferred from jax ragged_paged_attention (buffer index carried between steps)",
        shows="races out logsumexp max_logits",
    ),
    _bug(
        "paged-tpu-next-pages-by-the-table-of-the-tile-before",
        Change(
            "page_copies",
            "tiles.sequence[tile] * cache",
            "tiles.sequence[jnp.where(block == 0, jnp.maximum(tile - 1, 0), tile)] * cache",
        ),
        kind="pipeline.prefetch-row",
        reference="inferred from jax 10dbfcf747 (paged attention, length of another row)",
        shows="out logsumexp max_logits forward",
        trigger=several,
    ),
    _bug(
        "paged-tpu-all-rows-of-a-tile-written",
        Change("page_copies", "tiles.queries[tile], every", "jnp.int32(results.tile[0].shape[0]), every"),
        kind="tile.straddles",
        reference="inferred: rows behind a sequence's last query are those of the next one",
        shows="out logsumexp max_logits forward",
    ),
    _bug(
        "paged-tpu-rows-overwritten-on-their-way",
        Change("paged_tpu", "pl.when(number > 0)(lambda: wait", "pl.when(number < 0)(lambda: wait"),
        kind="pipeline.missing-wait",
        reference="inferred: one place for the rows of all tiles, and no wait before it is filled again",
        shows="races out",
    ),
    _bug(
        "paged-tpu-pages-past-the-last-copied",
        Change("page_copies", "jnp.minimum(blocks.end[tile] - slot, block_pages)", "jnp.int32(block_pages)"),
        kind="table.past-the-end",
        reference="vllm-project/flash-attention#42, page numbers read for the whole tile",
        shows="forward out logsumexp max_logits",
    ),
    _bug(
        "paged-tpu-values-of-pages-not-copied-kept",
        Change("paged_tpu", "jnp.where((j >= low) & (j < high), v", "jnp.where(j >= low, v"),
        kind="tail",
        reference="vllm-project/vllm#936",
        shows="out",
    ),
    _bug(
        "paged-tpu-softmax-of-the-tile-before-kept",
        Change(
            "paged_tpu",
            "    tile.sized(functools.partial(_clear, plan, tile, heads))\n",
            "    pl.when(number == 0)(lambda: tile.sized(functools.partial(_clear, plan, tile, heads)))\n",
        ),
        kind="init.masked-store",
        reference="vllm-project/tpu-inference PR 3426, state carried between stages",
        shows="out logsumexp max_logits",
    ),
    _bug(
        "paged-tpu-first-page-of-a-window-left-out",
        Change(
            "page_copies",
            "slot=jnp.broadcast_to(slot,",
            "slot=jnp.broadcast_to(slot + (0 if plan.left is None else 1),",
        ),
        kind="window.skip",
        reference="vllm-project/tpu-inference PR 1954, a window's first block taken for another",
        shows="out logsumexp max_logits",
        trigger=windowed,
    ),
)
