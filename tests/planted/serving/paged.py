"""Bugs of paged caches: which page, which row of it, and how long a sequence is."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from tests.bank import PlantedBug
from tests.planted.planting.paged_bug import bug, several
from tests.planted.planting.served import Call, PagedSteps

Array = jax.Array


def _table(call: Call) -> Array:
    assert call.page_indices is not None
    return call.page_indices


def _with_table(call: Call, table: Array) -> Call:
    return dataclasses.replace(call, page_indices=table)


def _without_prefix_at_zero(call: Call) -> Call:
    fresh = (call.q_lens == call.kv_lens)[:, None]
    return _with_table(call, jnp.where(fresh, 0, _table(call)))


def _heads_as_page(j: Array, call: Call) -> tuple[Array, Array]:
    return j // call.kv_heads, jnp.minimum(j % call.kv_heads, call.page_size - 1)


def _first_rows_of_a_page(limit: int) -> PagedSteps:
    def kept(allowed: Array, call: Call) -> Array:
        j = jnp.arange(allowed.shape[1])
        return allowed & (j % call.page_size < limit)

    return PagedSteps(allowed=kept)


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "only-nan-behind-the-length-cleared",
        PagedSteps(clean_values=lambda x, seen: jnp.where(jnp.isnan(x), 0, x)),
        kind="tail",
        reference="inferred from vllm-project/vllm#47305, where NaN in slots that nobody wrote was cleared",
        shows="out",
    ),
    bug(
        "pages-in-order-of-memory",
        PagedSteps(pages=lambda slot, call: _table(call)[:, :1] + slot),
        kind="table ignored",
        reference="flashinfer-ai/flashinfer#3219, where results depend on where pages lie",
    ),
    bug(
        "table-row-left-at-zero-without-a-prefix",
        PagedSteps(tables=_without_prefix_at_zero),
        kind="row of the table",
        reference="vllm-project/vllm#7018",
        trigger=several,
    ),
    bug(
        "table-row-of-the-first-sequence",
        PagedSteps(pages=lambda slot, call: jnp.broadcast_to(_table(call)[:1, slot], (call.rows, len(slot)))),
        kind="row of the table",
        reference="vllm-project/flash-attention#176, all rows folded onto the first",
        trigger=several,
    ),
    bug(
        "first-page-of-the-first-sequence-for-all",
        PagedSteps(
            pages=lambda slot, call: jnp.where(slot == 0, _table(call)[0, 0], _table(call)[:, slot]),
        ),
        kind="shared prefix",
        reference="vllm-project/vllm#17283, a prefix planned as if all had it",
        trigger=several,
    ),
    bug(
        "values-of-the-next-page",
        PagedSteps(values=lambda x, pages, row: x[jnp.clip(pages + 1, 0, len(x) - 1), row]),
        kind="off by one page",
        reference="NVIDIA/TensorRT-LLM#4943, which touches the page behind",
        shows="out",
    ),
    bug(
        "page-size-read-from-the-axis-of-heads",
        PagedSteps(locate=_heads_as_page),
        kind="unit of a page",
        reference="vllm-project/vllm#53681",
    ),
    bug(
        "only-128-rows-of-a-page",
        _first_rows_of_a_page(128),
        kind="unit of a page",
        reference="flashinfer-ai/flashinfer#4347",
    ),
    bug(
        "only-the-first-four-pages",
        PagedSteps(ends=lambda call: jnp.minimum(call.kv_lens, 4 * call.page_size)),
        kind="width of the table",
        reference="sgl-project/sglang#9675, a table narrower than the longest row",
    ),
    bug(
        "page-off-by-one-at-exact-multiples",
        PagedSteps(locate=lambda j, call: (jnp.maximum(j - 1, 0) // call.page_size, j % call.page_size)),
        kind="off by one page",
        reference="inferred",
    ),
    bug(
        "length-rounded-up-to-pages",
        PagedSteps(ends=lambda call: -(-call.kv_lens // call.page_size) * call.page_size),
        kind="tail",
        reference="openvinotoolkit/openvino#37377, pages times page size for the length",
    ),
    bug(
        "length-without-the-new-tokens",
        PagedSteps(ends=lambda call: jnp.maximum(call.kv_lens - call.q_lens, 0)),
        kind="lengths",
        reference="sgl-project/sglang#40214, the committed length where drafts are verified",
    ),
)
