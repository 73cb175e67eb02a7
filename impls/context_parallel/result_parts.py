"""Convert between results of attention and parts that `impls.softmax_merge` merges.

Results have `logsumexp [B, N, T]`. In a part, the axes of maxima and sums are those of `out [B, T, N, V]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from impls import softmax_merge


def build_part(out: jax.Array, logsumexp: jax.Array) -> softmax_merge.Part:
    """Build a part from `out [B, T, N, V]` and `logsumexp [B, N, T]`; its sum is 1, or 0 where there is no key."""
    top = transpose_rows(logsumexp)
    return softmax_merge.Part(out, top, (top != -jnp.inf).astype(jnp.float32))


def restore_results(part: softmax_merge.Part) -> tuple[jax.Array, jax.Array]:
    """Convert a part back to `out [B, T, N, V]` and `logsumexp [B, N, T]`."""
    out, logsumexp = softmax_merge.normalise(part)
    return out, logsumexp.swapaxes(1, 2)


def add_sinks(out: jax.Array, logsumexp: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add sinks `[N]`, one logit in each denominator. Differentiable with respect to all arguments."""
    return restore_results(softmax_merge.merge([build_part(out, logsumexp), softmax_merge.build_sink_part(sinks)]))


def compute_share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Compute a part's share of the softmax from both `logsumexp`s; 0 where there is no key at all."""
    return jnp.exp(part - jnp.where(whole == -jnp.inf, 0.0, whole))


def transpose_rows(x: jax.Array) -> jax.Array:
    """Transpose `[B, N, T]` to `[B, T, N, 1]`."""
    return x.swapaxes(1, 2)[..., None]
