"""Merging attention over disjoint sets of keys: a cache and what was decoded since, splits of a cache, ring steps.

A part comes in one of two forms (docs/contract.md, section 4): unnormalised, `(out, max, sum)` with `out / sum` the
attention over the part's keys and `max` the value that its logits were shifted by, or normalised, `(out, logsumexp)`.
With `a` over the parts,

    M = max_a max_a,   sum = sum_a exp(max_a - M) sum_a,   out = sum_a exp(max_a - M) out_a

is the unnormalised part over all their keys (Rabe and Staats 2021, arXiv:2112.05682, section 2), and likewise for the
normalised form with `exp(logsumexp_a)` as the sums. A part over no keys has `sum = 0` or `logsumexp = -inf`; whatever
else it holds is never looked at. A sink is such a part as well: it has a sum and no `out`, and belongs into a merge
once.

Everything is differentiable in reverse and forward mode. `M` is a constant to the derivative: what a part stands for,
`exp(max) out` and `exp(max) sum`, does not depend on it. Empty parts get gradients of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Part(NamedTuple):
    """Attention over some keys, not normalised, in f32."""

    out: jax.Array  # [..., V], sum of exp(logit - max) v
    max: jax.Array  # [..., 1], what the logits were shifted by; -inf where there is no key
    sum: jax.Array  # [..., 1], sum of exp(logit - max)


class Normalised(NamedTuple):
    """Attention over some keys, normalised."""

    out: jax.Array  # [..., V]
    logsumexp: jax.Array  # [...] f32, natural; -inf where there is no key


def merge(parts: Sequence[Part]) -> Part:
    """The part over the keys of all `parts`, whose shapes broadcast against each other.

    Raises:
      ValueError: there are no parts.
    """
    if not parts:
        raise ValueError("parts must hold at least one part, got none")
    stacked = (jnp.stack(jnp.broadcast_arrays(*arrays)) for arrays in zip(*parts, strict=True))
    return merge_axis(Part(*stacked), axis=0)


def merge_axis(parts: Part, axis: int) -> Part:
    """The part over the keys of all parts along `axis`, which is none of the last."""
    some = parts.sum != 0  # NaN is no empty part: it must show
    top = lax.stop_gradient(jnp.where(some, parts.max, -jnp.inf).max(axis=axis, keepdims=True))
    # Both branches of a select are differentiated: what an empty part holds must not reach `exp`, nor a product.
    shift = jnp.where(some, parts.max - _replace_neg_inf(top), 0.0)
    weight = jnp.where(some, jnp.exp(shift), 0.0)
    return Part(
        out=(weight * jnp.where(some, parts.out, 0.0)).sum(axis=axis),
        max=jnp.squeeze(top, axis),
        sum=(weight * jnp.where(some, parts.sum, 0.0)).sum(axis=axis),
    )


def build_sink_part(sinks: jax.Array) -> Part:
    """The sinks `[N]` as a part that broadcasts against parts `[B, T, N, .]`: one logit each and no value.

    A sink of -inf is no key.
    """
    logits = sinks.astype(jnp.float32)[:, None]
    there = logits != -jnp.inf
    pivot = lax.stop_gradient(jnp.where(there, logits, 0.0))
    weight = jnp.where(there, jnp.exp(jnp.where(there, logits, 0.0) - pivot), 0.0)
    return Part(jnp.zeros_like(logits), jnp.where(there, pivot, -jnp.inf), weight)


def normalise(part: Part) -> Normalised:
    """`out / sum`, zero where there is no key, and `logsumexp = max + log(sum)`; both f32."""
    some = part.sum != 0
    total = jnp.where(some, part.sum, 1.0)
    logsumexp = jnp.where(some, jnp.where(some, part.max, 0.0) + jnp.log(total), -jnp.inf)
    return Normalised(jnp.where(some, part.out, 0.0) / total, logsumexp[..., 0])


def merge_normalised(parts: Sequence[Normalised]) -> Normalised:
    """The normalised part over the keys of all `parts`; `out` in f32.

    Raises:
      ValueError: there are no parts.
    """
    return normalise(merge([_restore_sum(part) for part in parts]))


def _restore_sum(part: Normalised) -> Part:
    """The same part as if its largest logit were its logsumexp: then its sum is 1."""
    logsumexp = part.logsumexp.astype(jnp.float32)[..., None]
    some = logsumexp != -jnp.inf
    pivot = lax.stop_gradient(jnp.where(some, logsumexp, 0.0))
    total = jnp.where(some, jnp.exp(jnp.where(some, logsumexp, 0.0) - pivot), 0.0)
    out = jnp.where(some, part.out.astype(jnp.float32), 0.0)
    return Part(out * total, jnp.where(some, pivot, -jnp.inf), total)


def _replace_neg_inf(x: jax.Array) -> jax.Array:
    """-inf replaced by 0, so that `x - x` is no NaN."""
    return jnp.where(x == -jnp.inf, 0.0, x)
