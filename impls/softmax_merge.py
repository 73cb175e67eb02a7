"""Merge attention over disjoint sets of keys: splits of a cache, a cache and newer tokens, steps of a ring.

A part has one of two forms (docs/contract.md, section 4). Unnormalised, it is `(out, max, sum)`: `out / sum` is the
attention over the part's keys, and `max` is the value by which its logits were shifted. Normalised, it is
`(out, logsumexp)`. With `a` over the parts,

    M = max_a max_a,   sum = sum_a exp(max_a - M) sum_a,   out = sum_a exp(max_a - M) out_a

is the unnormalised part over all their keys (Rabe and Staats 2021, arXiv:2112.05682, section 2). The normalised form
is merged in the same way, with `exp(logsumexp_a)` as the sums. A part over no keys has `sum = 0` or
`logsumexp = -inf`; its other values are never read. A sink is a part too: it has a sum and no `out`, and must be merged
exactly once.

Everything is differentiable in reverse and forward mode. `M` is a constant for the derivative, since the values that a
part represents, `exp(max) out` and `exp(max) sum`, do not depend on it. Empty parts get gradients of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from impls.block_arithmetic import replace_neg_inf


class Part(NamedTuple):
    """Attention over some keys before the division by the softmax sum, in f32."""

    out: jax.Array  # [..., V], sum of exp(logit - max) v
    max: jax.Array  # [..., 1], the value by which logits were shifted; -inf where there is no key
    sum: jax.Array  # [..., 1], sum of exp(logit - max)


class Normalised(NamedTuple):
    """Attention over some keys after the division by the softmax sum."""

    out: jax.Array  # [..., V]
    logsumexp: jax.Array  # [...] f32, natural logarithm; -inf where there is no key


def merge(parts: Sequence[Part]) -> Part:
    """Merge parts of attention over disjoint keys, whose shapes must broadcast. Raises `ValueError` without parts."""
    if not parts:
        raise ValueError("parts must hold at least one part, got none")
    stacked = (jnp.stack(jnp.broadcast_arrays(*arrays)) for arrays in zip(*parts, strict=True))
    return merge_axis(Part(*stacked), axis=0)


def merge_axis(parts: Part, axis: int) -> Part:
    """Merge the parts along `axis`, which must not be the last."""
    some = parts.sum != 0  # a part with NaN counts as non-empty, so that NaN propagates
    top = lax.stop_gradient(jnp.where(some, parts.max, -jnp.inf).max(axis=axis, keepdims=True))
    # Both branches of a select are differentiated: values of an empty part must not reach `exp` or a product.
    shift = jnp.where(some, parts.max - replace_neg_inf(top), 0.0)
    weight = jnp.where(some, jnp.exp(shift), 0.0)
    return Part(
        out=(weight * jnp.where(some, parts.out, 0.0)).sum(axis=axis),
        max=jnp.squeeze(top, axis),
        sum=(weight * jnp.where(some, parts.sum, 0.0)).sum(axis=axis),
    )


def build_sink_part(sinks: jax.Array) -> Part:
    """Build a part from sinks `[N]`, one logit and no value each, that broadcasts to `[B, T, N, .]`; -inf is no key."""
    logits = sinks.astype(jnp.float32)[:, None]
    is_finite = logits != -jnp.inf
    pivot = lax.stop_gradient(jnp.where(is_finite, logits, 0.0))
    weight = jnp.where(is_finite, jnp.exp(jnp.where(is_finite, logits, 0.0) - pivot), 0.0)
    return Part(jnp.zeros_like(logits), jnp.where(is_finite, pivot, -jnp.inf), weight)


def normalise(part: Part) -> Normalised:
    """Compute `out / sum`, zero where there is no key, and `logsumexp = max + log(sum)`; both f32."""
    some = part.sum != 0
    total = jnp.where(some, part.sum, 1.0)
    logsumexp = jnp.where(some, jnp.where(some, part.max, 0.0) + jnp.log(total), -jnp.inf)
    return Normalised(jnp.where(some, part.out, 0.0) / total, logsumexp[..., 0])


def merge_normalised(parts: Sequence[Normalised]) -> Normalised:
    """Merge normalised parts over disjoint keys, with `out` in f32. Raises `ValueError` if there are no parts."""
    return normalise(merge([_restore_sum(part) for part in parts]))


def _restore_sum(part: Normalised) -> Part:
    """Convert to an unnormalised part with `max = logsumexp`, so that the sum is 1."""
    logsumexp = part.logsumexp.astype(jnp.float32)[..., None]
    some = logsumexp != -jnp.inf
    pivot = lax.stop_gradient(jnp.where(some, logsumexp, 0.0))
    total = jnp.where(some, jnp.exp(jnp.where(some, logsumexp, 0.0) - pivot), 0.0)
    out = jnp.where(some, part.out.astype(jnp.float32), 0.0)
    return Part(out * total, jnp.where(some, pivot, -jnp.inf), total)
