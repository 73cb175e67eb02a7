"""Bugs of calls that write new keys and values into pages: where, which, when, and what else."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cases.case import Case
from tests.bank import PlantedBug
from tests.planted.planting.page_writes import Tokens, WriteSteps, bug, scattered
from tests.planted.planting.paged_bug import in_pages
from tests.planted.planting.served import Call

Array = jax.Array
_SLOT = "slot of a new token"
_UNASKED = "unasked tokens written"
_ORDER = "order of writing and reading"
_ROWS = "what is in written pages"
_LONG = "tokens beyond a buffer"
_BUFFER = 256


def _table(call: Call) -> Array:
    assert call.page_indices is not None
    return call.page_indices


def _page_before(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    """The first token of a page goes to the page before."""
    slot = jnp.maximum(-(-tokens.j // call.page_size) - 1, 0)
    return _table(call)[tokens.sequence, slot], tokens.j % call.page_size


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


def _last_of_prompt(page: Array, tokens: Tokens, call: Call) -> Array:
    """Write only the last 256 new tokens of a sequence."""
    fits = tokens.place >= call.q_lens[tokens.sequence] - _BUFFER
    return jnp.where(tokens.there & fits, page, call.pages)


def _whole_buffers(pool: Array, x: Array, page: Array, row: Array) -> Array:
    """Tokens are written by buffers of 256, and those that fill none are left where there is a whole one."""
    count = max(len(x) // _BUFFER * _BUFFER, min(len(x), _BUFFER))
    return scattered(pool, x[:count], page[:count], row[:count])


def _as_other_pool(k: Array, v: Array) -> tuple[Array, Array]:
    """Values in both, where keys are as deep."""
    return (v if k.shape == v.shape else k), v


def _idle(case: Case) -> bool:
    return in_pages(case) and any(
        keys and not queries for queries, keys in zip(case.q_lengths, case.kv_lengths, strict=True)
    )


def _chunks(case: Case) -> bool:
    """Several tokens of a sequence, and several rows in a page."""
    return in_pages(case) and case.phase == "prefill" and case.stored is not None and case.stored.size != 1


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
        "nan-of-other-rows-cleared",
        WriteSteps(after=lambda pool, x, tokens, call: jnp.where(jnp.isnan(pool), 0, pool)),
        kind=_ROWS,
        reference="inferred from vllm-project/vllm#47305, where NaN in slots that nobody wrote was cleared",
        shows="k_pages v_pages",
    ),
    bug(
        "first-tokens-of-a-long-prompt-not-written",
        WriteSteps(padding=_last_of_prompt),
        kind=_LONG,
        reference="inferred from windows that have passed a prompt's own first keys, which are then not written",
        trigger=_chunks,
    ),
    bug(
        "tokens-beyond-whole-buffers-not-written",
        WriteSteps(write=_whole_buffers),
        kind=_LONG,
        reference="inferred: a loop over buffers that leaves the rest",
        trigger=_chunks,
    ),
)
