"""Compute in JAX the front ends of `cases.front_ends`.

A front end is what a model does to raw projections before attention, such as norms and rotary embedding. The check
`front_end` uses this, unless an implementation brings its own. You can use it in your own code too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cases.front_ends import (
    BASE,
    EPSILON,
    PRE_SCALE,
    SHARE,
    TEMPERATURE_FLOOR,
    TEMPERATURE_SCALE,
    list_key_steps,
    slice_last_third,
)


def apply_front_end(
    steps: tuple[str, ...],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    *,
    q_positions: Any,
    kv_positions: Any,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply a front end to raw projections, in f32, and round once to their dtype.

    Args:
      steps: names of steps (`cases.front_ends.STEPS`), in order.
      q: raw queries `[B, T, N, H]`.
      k: raw keys `[B, S, K, H]`.
      v: raw values `[B, S, K, V]`; None if the raw keys are the values.
      q_positions: position streams of the queries, int32 `[3, T]`.
      kv_positions: position streams of the keys, int32 `[3, S]`.
      q_norm: weights `[H]` of the norm of q; None without weights.
      k_norm: weights `[H]` of the norm of k; None without weights.

    Returns:
      q, k and v for attention, in the shapes and the dtype of the projections.
    """
    new_q = _apply_steps(steps, q.astype(jnp.float32), jnp.asarray(q_positions), q_norm).astype(q.dtype)
    new_k = _apply_steps(list_key_steps(steps), k.astype(jnp.float32), jnp.asarray(kv_positions), k_norm).astype(
        k.dtype
    )
    return new_q, new_k, k if v is None else v


def _apply_steps(steps: tuple[str, ...], x: jax.Array, at: jax.Array, norm: jax.Array | None) -> jax.Array:
    """Apply the steps to queries or keys `[B, L, heads, H]` in f32, at position streams `[3, L]`."""
    for step in steps:
        if step in ("rms", "l2"):
            x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
            x = x * norm if step == "rms" and norm is not None else x
        elif step == "prescale":
            x = x * PRE_SCALE
        elif step == "temperature":
            floors = (at[0] + 1) // TEMPERATURE_FLOOR
            x = x * (1 + TEMPERATURE_SCALE * jnp.log(1.0 + floors.astype(jnp.float32)))[:, None, None]
        elif step == SHARE:
            of = slice_last_third(x.shape[-1])
            x = x.at[..., of].set(x[:, :, :1, of])
        elif step == "decoupled":
            of = slice_last_third(x.shape[-1])
            x = x.at[..., of].set(apply_rotary("half", x[..., of], at))
        elif step != "shared":
            x = apply_rotary(step, x, at)
    return x


def apply_rotary(step: str, x: jax.Array, at: jax.Array) -> jax.Array:
    """Apply one of the rotary steps to `x [B, L, heads, H]` in f32, at position streams `[3, L]`."""
    turned = x.shape[-1] // 2 if step == "partial" else x.shape[-1]
    pairs = turned // 2
    frequency = BASE ** (-2.0 * jnp.arange(pairs, dtype=jnp.float32) / turned)
    place = at[:1].T
    if step == "sections":
        time, height = pairs // 4, (pairs - pairs // 4) // 2
        sizes = (time, height, pairs - time - height)
        place = jnp.concatenate([jnp.repeat(at[n][:, None], size, axis=1) for n, size in enumerate(sizes)], axis=1)
    angle = (place.astype(jnp.float32) * frequency)[:, None, :]  # [L, 1, pairs]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, rest = x[..., :turned], x[..., turned:]
    if step == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    else:
        a, b = x[..., :pairs], x[..., pairs:]
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([out, rest], axis=-1)
