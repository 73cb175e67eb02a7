"""Functions with the operands of named problems, right and wrong, in the conventions of JAXBench."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

# The benchmark's own functions read such a table from their module.
CONFIG = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128, "pages_per_seq": 256}

_multiply = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def flash(q: Any, k: Any, v: Any, *, scale: float | None = None, bias: Any = 0.0) -> Any:
    """Compute causal attention of `[B, N, T, H]`, with as many key heads as query heads or fewer."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    x = _multiply("bnth,bnsh->bnts", q, k) * factor + bias
    seen = jnp.tril(jnp.ones(x.shape[-2:], bool))
    p = jax.nn.softmax(jnp.where(seen, x, -jnp.inf), axis=-1)
    return _multiply("bnts,bnsv->bntv", p.astype(v.dtype), v).astype(v.dtype)


def zeros(q: Any, k: Any, v: Any) -> Any:
    """Return zeros."""
    return jnp.zeros_like(q)


def first_block(q: Any, k: Any, v: Any) -> Any:
    """Compute the first 128 queries correctly, and zeros for the others."""
    return sparse(q, k, v).at[:, :, 128:].set(0)


def half_the_scale(q: Any, k: Any, v: Any) -> Any:
    """Compute with logits that are half as large as they should be."""
    return sparse(q * 0.5, k, v)


def gqa(q: Any, k: Any, v: Any) -> Any:
    """Compute causal attention of `[B, T, N, H]`."""
    return jnp.swapaxes(flash(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v))), 1, 2)


def sparse(q: Any, k: Any, v: Any) -> Any:
    """Compute causal attention for queries that are already scaled."""
    return flash(q, k, v, scale=1.0)


def flex(q: Any, k: Any, v: Any, rel_pos_bias: Any) -> Any:
    """Compute causal attention with a bias `[N, T, T]`."""
    return flash(q, k, v, bias=rel_pos_bias)


def mla(x: Any, q_down: Any, q_up: Any, kv_down: Any, k_up: Any, v_up: Any, o_proj: Any, *, shared: bool = True) -> Any:
    """Compute latent attention: projections, rotary of the decoupled part, attention, output projection."""
    heads, rank = CONFIG["num_heads"], CONFIG["kv_lora_rank"]
    nope, v_dim = CONFIG["qk_nope_head_dim"], CONFIG["v_head_dim"]
    batch, length = x.shape[:2]

    def projected(y: Any, *by: Any) -> Any:
        return functools.reduce(lambda y, w: _multiply("bte,ef->btf", y, w).astype(x.dtype), by, y)

    q = projected(x, q_down, q_up).reshape(batch, length, heads, -1)
    latent = projected(x, kv_down)
    k = projected(latent[..., :rank], k_up).reshape(batch, length, heads, nope)
    v = projected(latent[..., :rank], v_up).reshape(batch, length, heads, v_dim)
    turned = _rotate(latent[:, :, None, rank:]) if shared else latent[:, :, None, rank:]
    k = jnp.concatenate([k, jnp.broadcast_to(turned, (batch, length, heads, turned.shape[-1]))], axis=-1)
    q = jnp.concatenate([q[..., :nope], _rotate(q[..., nope:])], axis=-1)
    return projected(gqa(q, k, v).reshape(batch, length, -1), o_proj)


def keys_not_turned(*operands: Any) -> Any:
    """Compute latent attention without rotary on the keys."""
    return mla(*operands, shared=False)


def _rotate(x: Any) -> Any:
    """Apply rotary in halves to `x [B, T, heads, R]`, in f32."""
    pairs = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angle = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def paged(q: Any, k_pages: Any, v_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any) -> Any:
    """Compute paged attention for one query per sequence."""
    row = jnp.arange(page_indices.shape[0])
    return jax.vmap(lambda i: _attend_token(q[cu_q_lens[i]], k_pages, v_pages, page_indices[i], kv_lens[i]))(row)


def ragged(q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any) -> Any:
    """Compute paged attention for any number of queries per sequence; key and value heads alternate."""
    k_pages, v_pages = kv_pages[:, :, 0::2], kv_pages[:, :, 1::2]

    def one(t: Any) -> Any:
        row = jnp.clip(jnp.searchsorted(cu_q_lens, t, side="right") - 1, 0, page_indices.shape[0] - 1)
        seen = kv_lens[row] - cu_q_lens[row + 1] + t + 1
        return _attend_token(q[t], k_pages, v_pages, page_indices[row], seen)

    return jax.lax.map(one, jnp.arange(q.shape[0]), batch_size=16)


def _attend_token(q: Any, k_pages: Any, v_pages: Any, pages: Any, seen: Any) -> Any:
    """Attend with one query `[N, H]` to the first `seen` keys of these pages."""
    k, v = (x[pages].reshape(-1, *x.shape[2:]) for x in (k_pages, v_pages))
    there = jnp.arange(len(k)) < seen
    k, v = (jnp.where(there[:, None, None], x, 0) for x in (k, v))
    x = _multiply("kgh,skh->kgs", q.reshape(k.shape[1], -1, q.shape[-1]), k) / math.sqrt(q.shape[-1])
    p = jax.nn.softmax(jnp.where(there, x, -jnp.inf), axis=-1)
    return _multiply("kgs,skv->kgv", p.astype(v.dtype), v).reshape(*q.shape[:-1], -1).astype(q.dtype)
