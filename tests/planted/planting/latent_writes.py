"""A call that writes latents into pages, made of steps that a planted bug replaces one of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from impls.contract.implementation import Implementation
from tests.planted.planting import stored_bug
from tests.planted.planting.latent import in_pages, paged_latent
from tests.planted.planting.page_writes import Step, WriteSteps, find_tokens
from tests.planted.planting.served import PagedSteps, paged_by

Array = jax.Array


def _concatenate(content: Array, rotary: Array) -> Array:
    return jnp.concatenate([content, rotary], axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentWriteSteps:
    """Steps of the call; the defaults are correct."""

    writes: WriteSteps = dataclasses.field(default_factory=WriteSteps)  # where tokens go; `values` is not used
    latent: Step = lambda c_kv, k_pe, pool, page, row: _concatenate(c_kv, k_pe)  # what is written
    queries: Step = _concatenate
    keys: Step = lambda latent, rank: latent
    values: Step = lambda latent, rank: latent[..., :rank]
    scale: Step = lambda scale, rank, depth: scale


def writing_by(steps: LatentWriteSteps) -> Callable[..., Any]:
    """The call made of `steps`."""
    attend = paged_by(PagedSteps())

    def attention(
        q_nope: Array,
        q_pe: Array,
        c_kv: Array,
        k_pe: Array,
        latent_pages: Array,
        *,
        scale: float,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        save_residuals: bool = False,
        **options: Any,
    ) -> Any:
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        rank, how = q_nope.shape[-1], steps.writes
        q = steps.queries(q_nope, q_pe)
        tokens, call = find_tokens(q, latent_pages, tables)
        page, row = how.slot(tokens, call)
        page = how.padding(page, tokens, call)
        latent = steps.latent(c_kv, k_pe, latent_pages, page, row)
        after = how.after(how.write(latent_pages, latent, page, row), latent, tokens, call)
        attended = how.attended(latent_pages, after)[:, :, None]
        found = attend(
            q,
            steps.keys(attended, rank),
            steps.values(attended, rank),
            scale=steps.scale(scale, rank, q.shape[-1]),
            save_residuals=save_residuals,
            **tables,
            **options,
        )
        return (*(found if save_residuals else (found,)), how.returned(latent_pages, after))

    return attention


def writing(name: str, steps: LatentWriteSteps = LatentWriteSteps()) -> Implementation:
    """The call made of `steps` as the gate takes it."""
    return dataclasses.replace(paged_latent(name), call=writing_by(steps), writes_pages=True)


bug = functools.partial(stored_bug.bug, family="latent", build=writing, shows="latent_pages out", trigger=in_pages)
"""A call that writes latents into pages of which one of `LatentWriteSteps` is wrong."""
