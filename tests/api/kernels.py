"""Attention with three planted faults, and the same without them, as an author would write it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

PLAIN = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0"
GROUPS = "train/f32/B1.T128.S128.N2.K1.H64.V64/full/normal/s0"
WINDOW = "train/f32/B1.T128.S128.N2.K2.H64.V64/window-l31-r0/normal/s0"
BIAS_AND_CAP = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/softcap2/bias/normal/s0"


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def share_heads(x: jax.Array, groups: int, faulty: bool) -> jax.Array:
    """Repeat each key/value head for the query heads that read it."""
    return jnp.repeat(x, groups, axis=2)


def _share_forward(x: jax.Array, groups: int, faulty: bool) -> tuple[jax.Array, None]:
    return share_heads(x, groups, faulty), None


def _share_backward(groups: int, faulty: bool, _: None, dx: jax.Array) -> tuple[jax.Array]:
    grouped = dx.reshape(*dx.shape[:2], -1, groups, dx.shape[-1])
    return (grouped[..., -1, :] if faulty else grouped.sum(-2),)  # fault: the gradient of the last head alone


share_heads.defvjp(_share_forward, _share_backward)


def compute(
    q: Any, k: Any, v: Any, *, window: Any, soft_cap: float | None, bias: Any, scale: float | None, faulty: bool
) -> jax.Array:
    """Compute attention in float32, with three faults or without any."""
    groups = q.shape[2] // k.shape[2]
    k = share_heads(k, groups, faulty)
    v = jnp.repeat(v, groups, axis=2)
    x = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    x = x * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None and not faulty:
        x = x + bias.astype(jnp.float32)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    if bias is not None and faulty:  # fault: the bias belongs before the cap
        x = x + bias.astype(jnp.float32)
    if window is not None:
        left, right = window
        i, j = jnp.arange(x.shape[-2])[:, None], jnp.arange(x.shape[-1])
        keep = jnp.ones(x.shape[-2:], bool)
        if left is not None:
            keep &= (j > i - left) if faulty else (j >= i - left)  # fault: one key short
        if right is not None:
            keep &= j <= i + right
        x = jnp.where(keep, x, -1e30)
    p = jax.nn.softmax(x)
    out = jnp.einsum("bnts,bsnh->btnh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def faulty_attention(
    q: Any, k: Any, v: Any, *, window: Any = None, soft_cap: Any = None, bias: Any = None, scale: Any = None
) -> jax.Array:
    """Attention with three faults."""
    return compute(q, k, v, window=window, soft_cap=soft_cap, bias=bias, scale=scale, faulty=True)


def attention(
    q: Any, k: Any, v: Any, *, window: Any = None, soft_cap: Any = None, bias: Any = None, scale: Any = None
) -> jax.Array:
    """Attention without a fault."""
    return compute(q, k, v, window=window, soft_cap=soft_cap, bias=bias, scale=scale, faulty=False)


def thrice_faulty_attention(q: Any, k: Any, v: Any, *, window: Any = None, soft_cap: Any = None) -> jax.Array:
    """Attention with three faults, each of which shows in `out` with one feature alone."""
    if window is not None and window[0] is not None:
        window = (window[0] - 1, window[1])  # fault: one key short
    if soft_cap is not None:
        soft_cap = 1.05 * soft_cap  # fault: another cap
    groups = q.shape[2] // k.shape[2]
    if groups > 1 and k.shape[2] > 1:  # fault: each query head reads a wrong head
        k, v = jnp.tile(k, (1, 1, groups, 1)), jnp.tile(v, (1, 1, groups, 1))
    return attention(q, k, v, window=window, soft_cap=soft_cap)
