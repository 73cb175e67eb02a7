"""Serving attention as users write it: plain functions over pages and over packed sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_NEVER = -jnp.inf


def paged(
    q: jax.Array,  # [total_q, N, H]
    k_pages: jax.Array,  # [pages, page_size, K, H]
    v_pages: jax.Array,  # [pages, page_size, K, V]
    *,
    kv_lens: jax.Array,  # [max_seqs]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Gather all pages of all sequences, then mask: `out [total_q, N, V]`, `logsumexp [total_q, N]`."""
    sequence, place = _locate_tokens(q, cu_q_lens, num_seqs)
    k, v = (x[jnp.clip(page_indices, 0, len(x) - 1)] for x in (k_pages, v_pages))
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (k, v))  # [max_seqs, S, K, .]
    j = jnp.arange(k.shape[1])
    q_lens = jnp.diff(cu_q_lens)
    position = (kv_lens - q_lens)[sequence] + place
    allowed = (j <= position[:, None]) & (sequence < num_seqs[0])[:, None]
    if window is not None:
        allowed &= j >= position[:, None] - window[0]
    here = (j < kv_lens[:, None]) & (jnp.arange(len(kv_lens)) < num_seqs[0])[:, None]
    seen = jnp.zeros(here.shape, bool).at[sequence].max(allowed) & here  # keys that no query sees may be NaN
    k, v = (jnp.where(seen[..., None, None], x, 0) for x in (k, v))
    return _attend(q, k[sequence], v[sequence], allowed, scale, soft_cap, sinks, save_residuals)


def scaled(
    q: jax.Array,  # [total_q, N, H]
    k_pages: jax.Array,  # [pages, page_size, K, H]
    v_pages: jax.Array,  # [pages, page_size, K, V]
    *,
    kv_lens: jax.Array,  # [max_seqs]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
    k_scales: jax.Array | None = None,  # [pages, page_size, K]
    v_scales: jax.Array | None = None,  # [pages, page_size, K]
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Dequantise all pages by the scales of their tokens, if there are any, then call `paged`."""
    if k_scales is not None and v_scales is not None:
        k_pages = k_pages.astype(jnp.float32) * k_scales[..., None]
        v_pages = v_pages.astype(jnp.float32) * v_scales[..., None]
    return paged(
        q,
        k_pages,
        v_pages,
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


def scaled_whole(
    q: jax.Array,  # [total_q, N, H]
    k_pages: jax.Array,  # [pages, page_size, K, H]
    v_pages: jax.Array,  # [pages, page_size, K, V]
    *,
    kv_lens: jax.Array,  # [max_seqs]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
    k_scale: float | None = None,
    v_scale: float | None = None,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Dequantise all pages by one scale for keys and one for values, then call `paged`."""
    if k_scale is not None and v_scale is not None:
        k_pages = k_pages.astype(jnp.float32) * k_scale
        v_pages = v_pages.astype(jnp.float32) * v_scale
    return paged(
        q,
        k_pages,
        v_pages,
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
    q: jax.Array,  # [total_q, N, H]
    k: jax.Array,  # [total_q, K, H]
    v: jax.Array,  # [total_q, K, V]
    k_pages: jax.Array,  # [pages, page_size, K, H]
    v_pages: jax.Array,  # [pages, page_size, K, V]
    *,
    kv_lens: jax.Array,  # [max_seqs]
    page_indices: jax.Array,  # [max_seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Write new keys and values to their rows of the pages one by one, then call `paged`."""
    sequence, place = _locate_tokens(q, cu_q_lens, num_seqs)
    size = k_pages.shape[1]

    def with_token(token: jax.Array, pools: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        b = sequence[token]
        j = kv_lens[b] - cu_q_lens[b + 1] + cu_q_lens[b] + place[token]
        at = (page_indices[b, j // size], j % size, 0, 0)
        put = jax.lax.dynamic_update_slice
        return put(pools[0], k[token][None, None], at), put(pools[1], v[token][None, None], at)

    pools = jax.lax.fori_loop(0, cu_q_lens[num_seqs[0]], with_token, (k_pages, v_pages))
    found = paged(
        q,
        *pools,
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
    return (*(found if save_residuals else (found,)), *pools)


def packed(
    q: jax.Array,  # [total_q, N, H]
    k: jax.Array,  # [total_kv, K, H]
    v: jax.Array,  # [total_kv, K, V]
    *,
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    cu_kv_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Compute every query against every key of the pack, and mask those of other sequences."""
    sequence, place = _locate_tokens(q, cu_q_lens, num_seqs)
    of_key, at = _locate_tokens(k, cu_kv_lens, num_seqs)
    position = place + (jnp.diff(cu_kv_lens) - jnp.diff(cu_q_lens))[sequence]
    allowed = (sequence[:, None] == of_key) & (sequence < num_seqs[0])[:, None]
    left, right = (None, 0) if causal else (None, None) if window is None else window
    if right is not None:
        allowed &= at <= position[:, None] + right
    if left is not None:
        allowed &= at >= position[:, None] - left
    seen = allowed.any(axis=0)[:, None, None]
    q = jnp.where((sequence < num_seqs[0])[:, None, None], q, 0)  # padding rows get gradients too, which must be zero
    k, v = (jnp.broadcast_to(jnp.where(seen, x, 0), (len(q), *x.shape)) for x in (k, v))
    return _attend(q, k, v, allowed, scale, soft_cap, sinks, save_residuals)


def packed_by_sequence(
    q: jax.Array,  # [total_q, N, H]
    k: jax.Array,  # [total_kv, K, H]
    v: jax.Array,  # [total_kv, K, V]
    *,
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    cu_kv_lens: jax.Array,  # [max_seqs + 1]
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
) -> jax.Array:
    """Loop over the sequences: each one's queries see its own keys only. Tables end with the last sequence."""
    out = jnp.zeros((*q.shape[:2], v.shape[-1]), q.dtype)
    rows, keys = jnp.arange(len(q)), jnp.arange(len(k))
    left, right = (None, 0) if causal else (None, None) if window is None else window
    for b in range(len(cu_q_lens) - 1):
        mine = (rows >= cu_q_lens[b]) & (rows < cu_q_lens[b + 1])
        here = (keys >= cu_kv_lens[b]) & (keys < cu_kv_lens[b + 1])
        # Positions count from the end of the sequence, where its last query and last key align.
        i, j = rows - cu_q_lens[b + 1], keys - cu_kv_lens[b + 1]
        allowed = mine[:, None] & here
        if right is not None:
            allowed &= j <= i[:, None] + right
        if left is not None:
            allowed &= j >= i[:, None] - left
        seen = allowed.any(axis=0)[:, None, None]
        own = jnp.where(mine[:, None, None], q, 0)
        wide_k, wide_v = (jnp.broadcast_to(jnp.where(seen, x, 0), (len(q), *x.shape)) for x in (k, v))
        found = _attend(own, wide_k, wide_v, allowed, scale, soft_cap, sinks, save_residuals=False)
        out = jnp.where(mine[:, None, None], found, out)
    return out


def packed_by_vmap(
    q: jax.Array,  # [total_q, N, H]
    k: jax.Array,  # [total_kv, K, H]
    v: jax.Array,  # [total_kv, K, V]
    *,
    cu_q_lens: jax.Array,  # [max_seqs + 1]
    cu_kv_lens: jax.Array,  # [max_seqs + 1]
    num_seqs: jax.Array,  # [1]
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # [N]
    save_residuals: bool = False,
) -> Any:
    """Pad each sequence to the length of the pack, map over them, and gather the rows again."""
    left, right = (None, 0) if causal else (None, None) if window is None else window
    count = num_seqs[0]
    numbers = jnp.arange(len(cu_q_lens) - 1)

    def one(b: jax.Array) -> Any:
        there = b < count
        q_start, k_start = (jnp.where(there, x[b], 0) for x in (cu_q_lens, cu_kv_lens))
        q_len, kv_len = (jnp.where(there, x[b + 1] - x[b], 0) for x in (cu_q_lens, cu_kv_lens))
        i, j = jnp.arange(len(q)), jnp.arange(len(k))
        position = kv_len - q_len + i
        allowed = (i < q_len)[:, None] & (j < kv_len)
        if right is not None:
            allowed &= j <= position[:, None] + right
        if left is not None:
            allowed &= j >= position[:, None] - left
        seen = allowed.any(axis=0)[:, None, None]
        own = jnp.where((i < q_len)[:, None, None], q[jnp.minimum(q_start + i, len(q) - 1)], 0)
        parts = (jnp.where(seen, x[jnp.minimum(k_start + j, len(k) - 1)], 0) for x in (k, v))
        wide_k, wide_v = (jnp.broadcast_to(x, (len(q), *x.shape)) for x in parts)
        return _attend(own, wide_k, wide_v, allowed, scale, soft_cap, sinks, save_residuals)

    found = jax.vmap(one)(numbers)
    sequence, place = _locate_tokens(q, cu_q_lens, num_seqs)
    at = jnp.minimum(sequence, len(numbers) - 1), jnp.clip(place, 0, len(q) - 1)
    return jax.tree.map(lambda x: x[at], found)


def _locate_tokens(x: jax.Array, starts: jax.Array, num_seqs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sequence of each token and its position there; padding gets a sequence beyond the last."""
    ends = jnp.where(jnp.arange(1, len(starts)) <= num_seqs[0], starts[1:], len(x) + 1)
    token = jnp.arange(len(x))
    sequence = (token[:, None] >= ends).sum(axis=1)
    real = token < starts[num_seqs[0]]
    sequence = jnp.where(real, sequence, len(starts))
    return sequence, token - starts[jnp.minimum(sequence, len(starts) - 1)]


def _attend(
    q: jax.Array,  # [total_q, N, H]
    k: jax.Array,  # [total_q, S, K, H]
    v: jax.Array,  # [total_q, S, K, V]
    allowed: jax.Array,  # [total_q, S]
    scale: float | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    save_residuals: bool,
) -> Any:
    """Attend with separate keys for each query, under a mask."""
    group = q.shape[1] // k.shape[2]
    grouped = q.reshape(q.shape[0], k.shape[2], group, q.shape[2])
    x = jnp.einsum("tkgh,tskh->tkgs", grouped, k, preferred_element_type=jnp.float32)
    x *= q.shape[-1] ** -0.5 if scale is None else scale
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    allowed = allowed[:, None, None, :]
    x = jnp.where(allowed, x, _NEVER)
    top = x.max(axis=-1)  # [total_q, K, G]
    sink = None if sinks is None else sinks.reshape(k.shape[2], group)
    shift = top if sink is None else jnp.maximum(top, sink)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isfinite(shift), shift, 0))
    weights = jnp.where(allowed, jnp.exp(x - shift[..., None]), 0)
    total = weights.sum(axis=-1)
    if sink is not None:
        total += jnp.exp(sink - shift)
    some = jnp.where(total > 0, total, 1)
    p = (weights / some[..., None]).astype(v.dtype)
    out = jnp.einsum("tkgs,tskv->tkgv", p, v, preferred_element_type=jnp.float32)
    out = out.reshape(*q.shape[:2], -1).astype(q.dtype)
    if not save_residuals:
        return out
    lse = jnp.where(total > 0, shift + jnp.log(some), _NEVER)
    return out, {"logsumexp": lse.reshape(q.shape[:2]), "max_logits": top.reshape(q.shape[:2])}
