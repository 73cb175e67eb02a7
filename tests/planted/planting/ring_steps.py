"""A sequence shared by devices, on one: a loop over devices and over what each sees, in replaceable steps.

No device and no collective is needed to show what goes wrong in the bookkeeping, and a loop compiles fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels.naive import build_mask
from tests.planted.planting.wrapped import Arrays, Kernel, Statics

DEVICES = 2


class Part(NamedTuple):
    """Attention of some queries over the keys of one device, f32."""

    out: jax.Array  # [B, T, N, V]
    logsumexp: jax.Array  # [B, N, T]
    max_logits: jax.Array  # [B, N, T]


class Shard(NamedTuple):
    """One pair of devices."""

    rank: int
    source: int
    rows: np.ndarray  # positions of the queries
    columns: np.ndarray  # positions of the keys


def balanced(length: int) -> np.ndarray:
    """Positions by device, `[DEVICES, -1]`: chunks `r` and `2 * DEVICES - 1 - r`."""
    chunks = np.arange(length).reshape(2 * DEVICES, -1)
    return np.stack([np.concatenate([chunks[r], chunks[-1 - r]]) for r in range(DEVICES)])


def cut(x: Any, shard: Shard) -> Any:
    """`x [b, n, t, s]`, the rows and columns of a shard; axes of size 1 stay."""
    x = x[:, :, shard.rows] if x.shape[2] > 1 else x
    return x[:, :, :, shard.columns] if x.shape[3] > 1 else x


def attend(q: Any, k: Any, v: Any, allowed: Any, bias: Any, soft_cap: Any, scale: Any) -> Part:
    """Plain attention, `allowed` and `bias` `[b, n, t, s]`."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    z = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    z = z if bias is None else z + bias
    z = z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)
    z = jnp.where(allowed, z, -jnp.inf)
    top = jax.lax.stop_gradient(z.max(axis=-1))
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, z, 0.0) - shift[..., None]), 0.0)
    total = weights.sum(axis=-1)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out = jnp.einsum("bnts,bsnv->btnv", weights / safe[..., None], v, precision="highest")
    return Part(out, jnp.where(some, shift + jnp.log(safe), -jnp.inf), top)


def merge(parts: list[Part]) -> Part:
    """The parts' attention over all their keys."""
    lse = jnp.stack([part.logsumexp for part in parts])
    pivot = jax.lax.stop_gradient(lse.max(axis=0))
    pivot = jnp.where(pivot == -jnp.inf, 0.0, pivot)
    there = lse != -jnp.inf
    weights = jnp.where(there, jnp.exp(jnp.where(there, lse - pivot, 0.0)), 0.0)
    total = weights.sum(axis=0)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out = sum(by_row(w / safe) * part.out for w, part in zip(weights, parts, strict=True))
    top = jnp.stack([part.max_logits for part in parts]).max(axis=0)
    return Part(out, jnp.where(some, pivot + jnp.log(safe), -jnp.inf), top)


def of_sinks(sinks: Any, like: Part) -> Part:
    """The sinks as a part: one logit a head, and no value."""
    lse = jnp.broadcast_to(sinks[None, :, None], like.logsumexp.shape)
    return Part(jnp.zeros_like(like.out), lse, jnp.full_like(lse, -jnp.inf))


def by_row(x: Any) -> Any:
    """`[B, N, T]` as `[B, T, N, 1]`."""
    return x.swapaxes(1, 2)[..., None]


def add_sinks(parts: list[Part], sinks: Any) -> list[Part]:
    """The parts and one of the sinks."""
    return [*parts, of_sinks(sinks, parts[0])]


def keep(x: Any, *context: Any) -> Any:
    """`x` as it is."""
    return x


def ids_of(kv_ids: Any, shard: Shard) -> Any:
    """Segment ids of a shard's keys."""
    return kv_ids[:, shard.columns]


@dataclasses.dataclass(frozen=True)
class RingSteps:
    """The steps; the defaults are correct."""

    allowed: Callable[..., Any] = keep  # all pairs, statics
    shard_of_mask: Callable[[Shard], Shard] = keep
    shard_of_bias: Callable[[Shard], Shard] = keep
    cut_mask: Callable[..., Any] = keep  # of a shard
    ids_of: Callable[..., Any] = ids_of
    moving: Callable[..., Any] = keep  # keys and values of a shard
    part: Callable[..., Part] = keep  # part, pairs, values
    add_sinks: Callable[..., list[Part]] = add_sinks
    merge: Callable[[list[Part]], Part] = merge
    collected: Callable[[np.ndarray], np.ndarray] = keep


def kernel(steps: RingSteps) -> Kernel:
    """Attention made of `steps`."""

    def call(arrays: Arrays, statics: Statics) -> Any:
        q, k, v = (arrays[name].astype(jnp.float32) for name in ("q", "k", "v"))
        q_length, kv_length = q.shape[1], k.shape[1]
        scale = q.shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
        allowed = build_mask(q, k, statics["causal"], statics["window"], arrays.get("mask"), None)
        allowed = steps.allowed(allowed, arrays, statics)
        bias, sinks, ids = arrays.get("bias"), arrays.get("sinks"), arrays.get("segment_ids")
        q_order, kv_order = _padded_order(q_length), _padded_order(kv_length)
        results = []
        for rank in range(DEVICES):
            parts = []
            for step in range(DEVICES):
                source = (rank - step) % DEVICES
                shard = Shard(rank, source, q_order[rank], kv_order[source])
                pairs = steps.cut_mask(cut(allowed, steps.shard_of_mask(shard)), shard)
                if ids is not None:
                    pairs = pairs & (ids[0][:, None, shard.rows, None] == steps.ids_of(ids[1], shard)[:, None, None, :])
                local_bias = None if bias is None else cut(bias, steps.shard_of_bias(shard))
                at_k, at_v = steps.moving((k[:, shard.columns], v[:, shard.columns]), shard)
                found = attend(q[:, shard.rows], at_k, at_v, pairs, local_bias, statics["soft_cap"], scale)
                parts.append(steps.part(found, pairs, at_v))
            if sinks is not None:
                parts = steps.add_sinks(parts, sinks)
            results.append(steps.merge(parts))
        order = np.argsort(steps.collected(np.concatenate(q_order)))
        out = jnp.concatenate([part.out for part in results], axis=1)[:, order].astype(arrays["q"].dtype)
        if not statics["save_residuals"]:
            return out
        rows = {
            name: jnp.concatenate([getattr(part, name) for part in results], axis=2)[:, :, order]
            for name in ("logsumexp", "max_logits")
        }
        return out, rows

    return call


def _padded_order(length: int) -> list[np.ndarray]:
    """Positions that each device holds; chunks past the end are short or empty."""
    whole = balanced(-(-length // (2 * DEVICES)) * 2 * DEVICES)
    return [row[row < length] for row in whole]
