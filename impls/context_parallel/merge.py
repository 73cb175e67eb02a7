"""Attention over keys in parts: two results with their `logsumexp` become one."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge(
    out_a: jax.Array, logsumexp_a: jax.Array, out_b: jax.Array, logsumexp_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys of both parts, f32 `out [B, T, N, V]` and `logsumexp [B, N, T]`.

    `logsumexp = log(exp(logsumexp_a) + exp(logsumexp_b))`, and each `out` weighs its share (contract, section 4). A
    part without keys has `logsumexp = -inf` and weighs nothing.
    """
    pivot = finite_or_zero(jnp.maximum(logsumexp_a, logsumexp_b))
    a, b = jnp.exp(logsumexp_a - pivot), jnp.exp(logsumexp_b - pivot)
    # Shares of `a + b`, not `exp(logsumexp_a - logsumexp)`: a large logsumexp has few digits left behind the point.
    total = a + b
    out = (out_a * by_row(a) + out_b * by_row(b)) / by_row(jnp.where(total > 0, total, 1.0))
    return out, pivot + jnp.log(total)  # -inf where both are


def weight(part: jax.Array, logsumexp: jax.Array) -> jax.Array:
    """Share of the softmax that a part has, 0 where nobody has any."""
    return jnp.exp(part - finite_or_zero(logsumexp))


def with_sinks(out: jax.Array, logsumexp: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result with one more logit `[N]` in each denominator; differentiable in all three."""
    sink = sinks.astype(jnp.float32)[None, :, None]
    pivot = jax.lax.stop_gradient(jnp.maximum(logsumexp, sink))
    total = jnp.exp(logsumexp - pivot) + jnp.exp(sink - pivot)
    return out * by_row(jnp.exp(logsumexp - pivot) / total), pivot + jnp.log(total)


def by_row(x: jax.Array) -> jax.Array:
    """`[B, N, T]` as `[B, T, N, 1]`."""
    return x.swapaxes(1, 2)[..., None]


def finite_or_zero(x: jax.Array) -> jax.Array:
    """`x` with -inf replaced by 0, so that `exp(-inf - x)` is 0."""
    return jnp.where(x == -jnp.inf, 0.0, x)
