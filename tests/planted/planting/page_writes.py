"""A call that writes pages, made of steps that a planted bug replaces one of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from impls.contract.implementation import Implementation
from tests.planted.planting import stored_bug
from tests.planted.planting.paged_bug import in_pages
from tests.planted.planting.served import Call, PagedSteps, paged, paged_by, sequences

Array = jax.Array
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Of each packed token its sequence, its place in there, the key that it is, and whether there is a sequence."""

    sequence: Array
    place: Array
    j: Array
    there: Array


def _slot(tokens: Tokens, call: Call) -> tuple[Array, Array]:
    assert call.page_indices is not None
    return call.page_indices[tokens.sequence, tokens.j // call.page_size], tokens.j % call.page_size


def scattered(pool: Array, x: Array, page: Array, row: Array) -> Array:
    """The pool with each token in its row; pages that there are not are left out."""
    return pool.at[page, row].set(x, mode="drop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSteps:
    """Steps of writing, in order; the defaults are correct."""

    slot: Step = _slot  # (tokens, call) -> page and row
    padding: Step = lambda page, tokens, call: jnp.where(tokens.there, page, call.pages)
    values: Step = lambda k, v: (k, v)  # what is written
    write: Step = scattered
    after: Step = lambda pool, x, tokens, call: pool  # what else is done to a pool
    attended: Step = lambda before, after: after
    returned: Step = lambda before, after: after


def find_tokens(q: Array, pool: Array, tables: dict[str, Array]) -> tuple[Tokens, Call]:
    """The place of each packed token in its sequence, and the tables of the call that steps may read."""
    kv_lens, count = tables["kv_lens"], tables["num_seqs"][0]
    call = Call(
        q=q,
        cu_q_lens=tables["cu_q_lens"],
        count=count,
        kv_lens=jnp.where(jnp.arange(len(kv_lens)) < count, kv_lens, 0),
        page_indices=tables["page_indices"],
        pages=len(pool),
        page_size=pool.shape[1],
    )
    sequence, place = sequences(call.cu_q_lens, call, len(q))
    at = jnp.minimum(sequence, call.rows - 1)
    j = jnp.maximum(call.kv_lens[at] - call.q_lens[at] + place, 0)
    return Tokens(sequence=at, place=place, j=j, there=sequence < call.count), call


def writing_by(steps: WriteSteps, reads: PagedSteps | None = None) -> Callable[..., Any]:
    """The call made of `steps`, which reads by the steps `reads`."""
    attend = paged_by(reads or PagedSteps())

    def attention(
        q: Array,
        k: Array,
        v: Array,
        k_pages: Array,
        v_pages: Array,
        *,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        save_residuals: bool = False,
        **options: Any,
    ) -> Any:
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        tokens, call = find_tokens(q, k_pages, tables)
        page, row = steps.slot(tokens, call)
        page = steps.padding(page, tokens, call)
        before = k_pages, v_pages
        after = tuple(
            steps.after(steps.write(pool, x, page, row), x, tokens, call)
            for pool, x in zip(before, steps.values(k, v), strict=True)
        )
        found = attend(q, *steps.attended(before, after), **tables, **options, save_residuals=save_residuals)
        return (*(found if save_residuals else (found,)), *steps.returned(before, after))

    return attention


def writing(name: str, steps: WriteSteps = WriteSteps()) -> Implementation:
    """The call made of `steps` as the gate takes it."""
    return dataclasses.replace(paged(name), call=writing_by(steps), writes_pages=True)


bug = functools.partial(stored_bug.bug, family="paged", build=writing, shows="k_pages v_pages out", trigger=in_pages)
"""A call that writes pages of which one of `WriteSteps` is wrong."""
