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


def writing(
    q_nope: jax.Array,  # [total_q, N, V]
    q_pe: jax.Array,  # [total_q, N, R]
    c_kv: jax.Array,  # [total_q, V]
    k_pe: jax.Array,  # [total_q, R]
    latent_pages: jax.Array,  # [pages, page_size, V + R]
    *,
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
    """Write new latents to their rows of the pages one by one, in two parts, then attend sequence by sequence."""
    rank, size, total = q_nope.shape[-1], latent_pages.shape[1], len(q_nope)
    most, width = page_indices.shape
    capacity = width * size

    def write_sequence(b: jax.Array, pool: jax.Array) -> jax.Array:
        start, stop = cu_q_lens[b], cu_q_lens[b + 1]

        def write_token(token: jax.Array, pool: jax.Array) -> jax.Array:
            j = kv_lens[b] - stop + token
            page, row = page_indices[b, j // size], j % size
            return pool.at[page, row, :rank].set(c_kv[token]).at[page, row, rank:].set(k_pe[token])

        return jax.lax.fori_loop(start, stop, write_token, pool)

    pool = jax.lax.fori_loop(0, num_seqs[0], write_sequence, latent_pages)
    j, token = jnp.arange(capacity), jnp.arange(total)
    out = jnp.zeros((total, q_nope.shape[1], rank), jnp.float32)
    lse = jnp.full(out.shape[:2], -jnp.inf)
    top = jnp.full(out.shape[:2], -jnp.inf)
    own = jnp.full(out.shape[1], -jnp.inf) if sinks is None else sinks.astype(jnp.float32)

    def attend_to_sequence(b: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = pool[jnp.clip(page_indices[b], 0, len(pool) - 1)].reshape(capacity, -1)
        position = kv_lens[b] - cu_q_lens[b + 1] + token
        allowed = (j <= position[:, None]) & (j < kv_lens[b])
        if window is not None:
            allowed &= j >= position[:, None] - window[0]
        mine = (token >= cu_q_lens[b]) & (token < cu_q_lens[b + 1])
        rows = jnp.where((allowed & mine[:, None]).any(axis=0)[:, None], rows, 0)
        values = rows[:, :rank].astype(jnp.float32)
        high = jax.lax.Precision.HIGHEST
        x = jnp.einsum("tnv,sv->tns", q_nope.astype(jnp.float32), values, precision=high)
        x += jnp.einsum("tnr,sr->tns", q_pe.astype(jnp.float32), rows[:, rank:].astype(jnp.float32), precision=high)
        x *= scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(allowed[:, None], x, -jnp.inf)
        largest = x.max(axis=-1)
        shift = jnp.maximum(largest, own)
        shift = jnp.where(jnp.isfinite(shift), shift, 0)
        weights = jnp.exp(x - shift[..., None])
        whole = weights.sum(axis=-1) + jnp.exp(own - shift)
        some = jnp.where(whole > 0, whole, 1)
        found = jnp.einsum("tns,sv->tnv", weights, values, precision=high) / some[..., None]
        new = found, jnp.where(whole > 0, shift + jnp.log(some), -jnp.inf), largest
        return tuple(jnp.where(mine.reshape(-1, *(1,) * (y.ndim - 1)), x, y) for x, y in zip(new, results, strict=True))

    out, lse, top = jax.lax.fori_loop(0, jnp.minimum(num_seqs[0], most), attend_to_sequence, (out, lse, top))
    out = out.astype(q_nope.dtype)
    return (out, {"logsumexp": lse, "max_logits": top}, pool) if save_residuals else (out, pool)


def writing_whole(
    q: jax.Array,  # [total_q, N, H]
    latent: jax.Array,  # [total_q, H]
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
    """Write new latents, each in one array, then attend as `in_pages` does."""
    tables: Any = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    size = latent_pages.shape[1]
    sequence = jnp.searchsorted(
        jnp.where(jnp.arange(len(kv_lens)) < num_seqs[0], cu_q_lens[1:], len(q)), jnp.arange(len(q)), side="right"
    )
    sequence = jnp.minimum(sequence, len(kv_lens) - 1)
    j = kv_lens[sequence] - cu_q_lens[sequence + 1] + jnp.arange(len(q))
    there = jnp.arange(len(q)) < cu_q_lens[num_seqs[0]]
    page = jnp.where(there, page_indices[sequence, j // size], len(latent_pages))
    pool = latent_pages.at[page, j % size].set(latent, mode="drop")
    options: Any = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "save_residuals": save_residuals}
    found = in_pages(q, pool, value_dim=value_dim, scale=scale, **tables, **options)
    return (*found, pool) if save_residuals else (found, pool)


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
