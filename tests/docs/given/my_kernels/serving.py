"""Kernels over pages, packed sequences and latents, as the how-to pages import them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_HIGH = jax.lax.Precision.HIGHEST


def paged_attention(
    q: jax.Array,  # [total_q, N, H]
    k_pages: jax.Array,  # [pages, page_size, K, H]
    v_pages: jax.Array,  # [pages, page_size, K, V]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    q_lens: jax.Array,  # [max_seqs]
    kv_lens: jax.Array,  # [max_seqs]
    *,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Compute causal attention of packed queries to keys and values in pages: `out [total_q, N, V]`."""
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens)])
    sequence, place = _locate(len(q), starts)
    k, v = (x[jnp.clip(page_indices, 0, len(x) - 1)] for x in (k_pages, v_pages))
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (k, v))  # [max_seqs, S, K, .]
    j = jnp.arange(k.shape[1])
    position = (kv_lens - q_lens)[sequence] + place
    allowed = (j <= position[:, None]) & (jnp.arange(len(q)) < starts[-1])[:, None]
    if window is not None:
        allowed &= j >= position[:, None] - window[0]
    seen = jnp.zeros((len(kv_lens), len(j)), bool).at[sequence].max(allowed)[..., None, None]
    k, v = (jnp.where(seen, x, 0)[sequence] for x in (k, v))
    return _attend(q, k, v, allowed, scale)


def write_pages(
    k: jax.Array,  # [total_q, K, H]
    v: jax.Array,  # [total_q, K, V]
    k_pages: jax.Array,  # [pages, page_size, K, H]
    v_pages: jax.Array,  # [pages, page_size, K, V]
    *,
    kv_lens: jax.Array,  # [max_seqs]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
) -> tuple[jax.Array, jax.Array]:
    """Write the key and value of each query's token to its row of the pages."""
    sequence, place = _locate(len(k), cu_q_lens)
    size = k_pages.shape[1]

    def write(token: jax.Array, pages: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        b = sequence[token]
        j = kv_lens[b] - cu_q_lens[b + 1] + cu_q_lens[b] + place[token]
        at = (page_indices[b, j // size], j % size, 0, 0)
        put = jax.lax.dynamic_update_slice
        return put(pages[0], k[token][None, None], at), put(pages[1], v[token][None, None], at)

    pages: tuple[jax.Array, jax.Array] = jax.lax.fori_loop(0, cu_q_lens[num_seqs[0]], write, (k_pages, v_pages))
    return pages


def write_latents(
    latent: jax.Array,  # [total_q, H]
    latent_pages: jax.Array,  # [pages, page_size, H]
    *,
    kv_lens: jax.Array,  # [max_seqs]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
) -> jax.Array:
    """Write the latent of each query's token to its row of the pages."""
    sequence, place = _locate(len(latent), cu_q_lens)
    size = latent_pages.shape[1]
    j = (kv_lens - cu_q_lens[1:] + cu_q_lens[:-1])[sequence] + place
    there = jnp.arange(len(latent)) < cu_q_lens[num_seqs[0]]
    page = jnp.where(there, page_indices[sequence, j // size], len(latent_pages))
    return latent_pages.at[page, j % size].set(latent, mode="drop")


def varlen_attention(
    q: jax.Array,  # [total_q, N, H]
    k: jax.Array,  # [total_kv, K, H]
    v: jax.Array,  # [total_kv, K, V]
    cu_seqlens_q: jax.Array,  # [max_seqs + 1]
    cu_seqlens_k: jax.Array,  # [max_seqs + 1]
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """Compute attention within each sequence of a pack: `out [total_q, N, V]`."""
    sequence, place = _locate(len(q), cu_seqlens_q)
    key_sequence, key_place = _locate(len(k), cu_seqlens_k)
    used, key_used = jnp.arange(len(q)) < cu_seqlens_q[-1], jnp.arange(len(k)) < cu_seqlens_k[-1]
    allowed = (sequence[:, None] == key_sequence) & used[:, None] & key_used
    if is_causal:
        allowed &= key_place <= (place + (jnp.diff(cu_seqlens_k) - jnp.diff(cu_seqlens_q))[sequence])[:, None]
    seen = allowed.any(axis=0)[:, None, None]
    k, v = (jnp.broadcast_to(jnp.where(seen, x, 0), (len(q), *x.shape)) for x in (k, v))
    return _attend(jnp.where(used[:, None, None], q, 0), k, v, allowed, scale)


def mla_attention(
    q_nope: jax.Array,  # [total_q, N, rank]
    q_pe: jax.Array,  # [total_q, N, rotary]
    kv_c: jax.Array,  # [pages, page_size, rank]
    k_pe: jax.Array,  # [pages, page_size, rotary]
    kv_lens: jax.Array,  # [max_seqs]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
    *,
    sm_scale: float,
) -> jax.Array:
    """Compute attention to latents in pages, in absorbed form: `out [total_q, N, rank]`."""
    used = jnp.arange(len(kv_lens)) < num_seqs[0]
    q_lens, kv_lens = (jnp.where(used, x, 0) for x in (jnp.diff(cu_q_lens), kv_lens))
    q, k = (jnp.concatenate(pair, axis=-1) for pair in ((q_nope, q_pe), (kv_c, k_pe)))
    return paged_attention(q, k[:, :, None], kv_c[:, :, None], page_indices, q_lens, kv_lens, scale=sm_scale)


def _locate(rows: int, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sequence of each row, and its place in the sequence."""
    row = jnp.arange(rows)
    sequence = jnp.clip(jnp.searchsorted(starts, row, side="right") - 1, 0, len(starts) - 2)
    return sequence, row - starts[sequence]


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array, scale: float | None) -> jax.Array:
    """Compute `out [rows, N, V]` of queries `[rows, N, H]` with keys and values `[rows, S, K, .]` of each."""
    dtype, group = q.dtype, q.shape[1] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    x = jnp.einsum("tnh,tsnh->tns", q, k, precision=_HIGH) * (q.shape[-1] ** -0.5 if scale is None else scale)
    x = jnp.where(allowed[:, None], x, -jnp.inf)
    top = x.max(axis=-1, keepdims=True)
    weights = jnp.exp(x - jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0)))
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("tns,tsnv->tnv", weights / jnp.where(total == 0, 1, total), v, precision=_HIGH).astype(dtype)
