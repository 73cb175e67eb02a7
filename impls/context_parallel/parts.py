"""Between results with `logsumexp [B, N, T]` and parts to merge (`impls.merging`), which have rows where `out` has."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from impls import merging


def as_part(out: jax.Array, logsumexp: jax.Array) -> merging.Part:
    """`out [B, T, N, V]` and `logsumexp [B, N, T]` as a part whose sum is 1, or 0 where there is no key."""
    top = by_row(logsumexp)
    return merging.Part(out, top, (top != -jnp.inf).astype(jnp.float32))


def results(part: merging.Part) -> tuple[jax.Array, jax.Array]:
    """`out [B, T, N, V]` and `logsumexp [B, N, T]` of a part."""
    out, logsumexp = merging.normalise(part)
    return out, logsumexp.swapaxes(1, 2)


def with_sinks(out: jax.Array, logsumexp: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result with one more logit `[N]` in each denominator; differentiable in all three."""
    return results(merging.merge([as_part(out, logsumexp), merging.of_sinks(sinks)]))


def share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """What a part has of the softmax, from both `logsumexp`s; 0 where nobody has any."""
    return jnp.exp(part - jnp.where(whole == -jnp.inf, 0.0, whole))


def by_row(x: jax.Array) -> jax.Array:
    """`[B, N, T]` as `[B, T, N, 1]`."""
    return x.swapaxes(1, 2)[..., None]
