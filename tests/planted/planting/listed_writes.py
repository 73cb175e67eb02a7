"""Attention to listed keys in pages that writes its new keys first, made of steps that a bug may replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance.execution.plain_functions import build_implementation
from impls.contract.declarations import declare
from impls.contract.implementation import Implementation
from tests.planted.planting import listed

Array = jax.Array
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListWriteSteps:
    """The steps; the defaults are correct. Lists are `[total_q, e]`, and positions `[total_q, 1]`."""

    store: Step = lambda x: x  # new keys or values, as they are stored
    read: Step = lambda lists, position, queries: lists
    pick_pages: Step = lambda before, after: after  # the pages that attention reads


def writing(steps: ListWriteSteps = ListWriteSteps()) -> Callable[..., Any]:
    """The kernel made of `steps`."""
    attend = listed.paging()

    @declare(behind_mask="any", empty_rows="zero")
    def attention(
        q: Array,
        k: Array,
        v: Array,
        k_pages: Array,
        v_pages: Array,
        *,
        indices: Array,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        window: tuple[int | None, int] | None = None,
        sinks: Array | None = None,
        scale: float | None = None,
    ) -> Any:
        """Write new keys and values, then attend to the keys of each list."""
        token, count, (pages, size) = jnp.arange(len(q)), num_seqs[0], k_pages.shape[:2]
        starts = jnp.where(jnp.arange(len(cu_q_lens)) <= count, cu_q_lens, cu_q_lens[count])
        sequence = jnp.minimum((token[:, None] >= starts[1:]).sum(axis=1), len(kv_lens) - 1)
        queries = (starts[sequence + 1] - starts[sequence])[:, None]
        position = (kv_lens[sequence] - (starts[sequence + 1] - token))[:, None]
        place = jnp.maximum(position[:, 0], 0)
        page = jnp.where(token < starts[-1], page_indices[sequence, place // size], pages)
        after = [
            pool.at[page, place % size].set(steps.store(x), mode="drop")
            for pool, x in zip((k_pages, v_pages), (k, v), strict=True)
        ]
        lists = steps.read(indices, position, queries)
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        read = steps.pick_pages([k_pages, v_pages], after)
        out = attend(q, *read, indices=lists, window=window, sinks=sinks, scale=scale, **tables)
        return out, *after

    return attention


def written(name: str, steps: ListWriteSteps = ListWriteSteps()) -> Implementation:
    """The kernel as an implementation."""
    return build_implementation(writing(steps), name)
