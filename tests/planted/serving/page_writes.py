"""Bugs of calls that write new keys and values into pages: where, which, when, and what else."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cases.case import Case
from tests.bank import PlantedBug
from tests.planted.planting.page_writes import Tokens, WriteSteps, bug, scattered
from tests.planted.planting.paged_bug import in_pages, several
from tests.planted.planting.served import Call

Array = jax.Array
_SLOT = "slot of a new token"
_UNASKED = "unasked tokens written"
_ORDER = "order of writing and reading"
_ROWS = "what is in written pages"


def _table(call: Call) -> Array:
    assert call.page_indices is not None
    return call.page_indices


def _page_before(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    """The first token of a page goes to the page before."""
    slot = jnp.maximum(-(-tokens.j // call.page_size) - 1, 0)
    return _table(call)[tokens.sequence, slot], tokens.j % call.page_size


def _next_row(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    row = jnp.minimum(tokens.sequence + 1, call.count - 1)
    return _table(call)[row, tokens.j // call.page_size], tokens.j % call.page_size


def _counted_on(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    """From the slot of a sequence's first token on, without the table."""
    size = call.page_size
    first = tokens.j - tokens.place
    flat = _table(call)[tokens.sequence, first // size] * size + first % size + tokens.place
    return flat // size, flat % size


def _cursor_stuck(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    """All tokens of a sequence go where its first one does."""
    first = tokens.j - tokens.place
    return _table(call)[tokens.sequence, first // call.page_size], first % call.page_size


def _row_of_table_alone(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    """The row is right, and the page that of the sequence's first key."""
    return _table(call)[tokens.sequence, 0], tokens.j % call.page_size


def _whole_pages(pool: Array, x: Array, page: Array, row: Array) -> Array:
    """Pages that a token goes to are written anew, zeros where there is no token."""
    return scattered(pool.at[page].set(0, mode="drop"), x, page, row)


def _cleared_last_row(pool: Array, x: Array, tokens: Tokens, call: Call) -> Array:
    """A sequence without queries has its last key written too, with whatever token comes next in the pack."""
    j = jnp.maximum(call.kv_lens - 1, 0)
    number = jnp.arange(call.rows)
    idle = (call.q_lens == 0) & (call.kv_lens > 0) & (number < call.count)
    page = jnp.where(idle, _table(call)[number, j // call.page_size], call.pages)
    token = jnp.clip(call.cu_q_lens[:-1], 0, len(x) - 1)
    return scattered(pool, x[token], page, j % call.page_size)


def _as_other_pool(k: Array, v: Array) -> tuple[Array, Array]:
    """Values in both, where keys are as deep."""
    return (v if k.shape == v.shape else k), v


def _through_bf16(k: Array, v: Array) -> tuple[Array, Array]:
    return k.astype(jnp.bfloat16).astype(k.dtype), v.astype(jnp.bfloat16).astype(v.dtype)


def _without_tail(page: Array, tokens: Tokens, call: Call) -> Array:
    """What is past the last whole 32 tokens of a call is left out, where there are 32."""
    token = jnp.arange(len(page))
    whole = len(page) // 32 * 32 or len(page)
    return jnp.where(tokens.there & (token < whole), page, call.pages)


def _idle(case: Case) -> bool:
    return in_pages(case) and any(
        keys and not queries for queries, keys in zip(case.q_lengths, case.kv_lengths, strict=True)
    )


def _many(case: Case) -> bool:
    return in_pages(case) and sum(case.q_lengths) > 40


def _chunks(case: Case) -> bool:
    """Several tokens of a sequence, and several rows in a page."""
    return in_pages(case) and case.phase == "prefill" and case.stored is not None and case.stored.size != 1


def _not_bf16(case: Case) -> bool:
    return in_pages(case) and case.dtype != "bf16"


def _equal_depths(case: Case) -> bool:
    return in_pages(case) and case.head_dim == case.v_head_dim


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "first-token-of-a-page-written-to-the-page-before",
        WriteSteps(slot=_page_before),
        kind=_SLOT,
        reference="inferred from MinivLLM#87, where a length that is whole pages has none in the last",
        trigger=_chunks,
    ),
    bug(
        "written-to-the-table-row-of-the-next-sequence",
        WriteSteps(slot=_next_row),
        kind=_SLOT,
        reference="inferred from attention-gym#189, a table looked up at the row and not at its slot",
        trigger=several,
    ),
    bug(
        "written-at-the-place-in-the-chunk",
        WriteSteps(key=lambda place, q_lens, kv_lens: place),
        kind=_SLOT,
        reference="inferred from jax-ml/jax#24491, where a query's place in its chunk is taken for its position",
        trigger=_chunks,
    ),
    bug(
        "slots-counted-on-from-the-first",
        WriteSteps(slot=_counted_on),
        kind=_SLOT,
        reference="huggingface/text-generation-inference#2711, next slots without a look into the table",
        trigger=_chunks,
    ),
    bug(
        "slot-of-the-first-token-for-all",
        WriteSteps(slot=_cursor_stuck),
        kind=_SLOT,
        reference="ml-explore/mlx-swift-lm#90, a cursor that is not advanced",
        trigger=_chunks,
    ),
    bug(
        "written-to-the-first-page-of-the-sequence",
        WriteSteps(slot=_row_of_table_alone),
        kind=_SLOT,
        reference="inferred from vllm-project/vllm#38719, where slots of a first call are kept",
        trigger=_chunks,
    ),
    bug(
        "tokens-after-the-last-32-not-written",
        WriteSteps(padding=_without_tail),
        kind=_SLOT,
        reference="tenstorrent/tt-metal#52671, by its title",
        trigger=_many,
    ),
    bug(
        "padding-written-to-page-zero",
        WriteSteps(padding=lambda page, tokens, call: jnp.where(tokens.there, page, 0)),
        kind=_UNASKED,
        reference="sgl-project/sglang#36207, padding poisons the page that is kept for it",
    ),
    bug(
        "padding-written-to-the-last-page",
        WriteSteps(padding=lambda page, tokens, call: jnp.where(tokens.there, page, -1)),
        kind=_UNASKED,
        reference="sgl-project/sglang#33816, a slot of -1 is written",
    ),
    bug(
        "last-key-of-an-idle-sequence-overwritten",
        WriteSteps(after=_cleared_last_row),
        kind=_UNASKED,
        reference="inferred from vllm-project/vllm#45005, where a row without queries gets a slot",
        trigger=_idle,
    ),
    bug(
        "attends-to-pages-as-they-were",
        WriteSteps(attended=lambda before, after: before),
        kind=_ORDER,
        reference="inferred from sgl-project/sglang#19636, where live keys are not those that are stored",
        shows="out",
    ),
    bug(
        "pages-returned-as-they-were",
        WriteSteps(returned=lambda before, after: before),
        kind=_ORDER,
        reference="inferred: the pages of a functional update are dropped",
    ),
    bug(
        "pages-of-values-returned-as-they-were",
        WriteSteps(returned=lambda before, after: (after[0], before[1])),
        kind=_ORDER,
        reference="inferred from NVIDIA/TensorRT-LLM#4943, where one pool is taken for both",
        shows="v_pages",
    ),
    bug(
        "whole-page-written-for-a-token",
        WriteSteps(write=_whole_pages),
        kind=_ROWS,
        reference="inferred: a block of a page is written back of which one row was filled",
        trigger=_chunks,
    ),
    bug(
        "values-written-into-pages-of-keys",
        WriteSteps(values=_as_other_pool),
        kind=_ROWS,
        reference="inferred from vllm-project/vllm#17362, the axis of keys and values in another place",
        shows="k_pages out",
        trigger=_equal_depths,
    ),
    bug(
        "new-tokens-rounded-to-bf16",
        WriteSteps(values=_through_bf16),
        kind=_ROWS,
        reference="inferred from vllm-project/vllm#46997, a plan for another dtype of the cache",
        trigger=_not_bf16,
    ),
    bug(
        "nan-of-other-rows-cleared",
        WriteSteps(after=lambda pool, x, tokens, call: jnp.where(jnp.isnan(pool), 0, pool)),
        kind=_ROWS,
        reference="inferred from vllm-project/vllm#47305, where NaN in slots that nobody wrote was cleared",
        shows="k_pages v_pages",
    ),
)
