"""Latent attention in absorbed form as users write it: plain functions, paged and dense."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare
from tests.kernels import naive, serving_attention


def in_pages(
    q: jax.Array,  # [total_q, N, H]
    latent_pages: jax.Array,  # [pages, page_size, H]
    *,
    value_dim: int,
    scale: float,
    kv_lens: jax.Array,  # [max_seqs]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
    window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Compute paged attention with one key head, whose first coordinates are the values."""
    pages = latent_pages[:, :, None]
    return serving_attention.paged(
        q,
        pages,
        pages[..., :value_dim],
        kv_lens=kv_lens,
        page_indices=page_indices,
        cu_q_lens=cu_q_lens,
        num_seqs=num_seqs,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        save_residuals=save_residuals,
    )


@declare(behind_mask="finite")
def dense(
    q: jax.Array,  # [B, T, N, H]
    latent: jax.Array,  # [B, S, H]
    *,
    value_dim: int,
    scale: float,
    mask: Any = None,
    segment_ids: Any = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Compute attention to a dense latent, differentiated by JAX."""
    k = latent[:, :, None]
    operands = {"mask": mask, "segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "scale": scale}
    return naive.attention(q, k, k[..., :value_dim], **operands, save_residuals=save_residuals)


def mla_ragged_paged_attention(
    q_nope: jax.Array,  # [total_q, N, R]
    q_pe: jax.Array,  # [total_q, N, P]
    kv_c: jax.Array,  # [pages, page_size, R]
    k_pe: jax.Array,  # [pages, page_size, P]
    lens: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    count: jax.Array,
    *,
    sm_scale: float,
) -> jax.Array:
    """Compute it with separate operands for the rank and the rotary part, as published kernels do."""
    q, latent = (jnp.concatenate(pair, axis=-1) for pair in ((q_nope, q_pe), (kv_c, k_pe)))
    named: Any = {"kv_lens": lens, "page_indices": tables, "cu_q_lens": starts, "num_seqs": count}
    out: jax.Array = in_pages(q, latent, value_dim=q_nope.shape[-1], scale=sm_scale, **named)
    return out
