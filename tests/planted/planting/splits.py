"""A correct split-KV decode attention in replaceable steps: the cache in splits, a softmax for each, and their merge.

Few queries over a long cache take this path, everything else the plain one. The queries of a group of heads are rows of
one product: `R = G * T` rows, query after query, the heads of the group within each. Inside, everything is f32. Logits
are `[B, K, P, R, L]` for `P` splits of `L` keys; JAX differentiates.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cases.case import Case
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.kernels import naive
from tests.planted.planting import wrapped

Array = Any
Step = Callable[..., Any]
MOST_QUERIES, LONG = 16, 1024


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in one call."""

    batch: int
    q_length: int
    kv_length: int
    kv_heads: int
    group: int
    scale: float
    soft_cap: float | None
    packed: bool
    dtype: Any


class Parts(NamedTuple):
    """Softmax of each split: `[B, K, P, R]`, `acc` with the depth behind it. `max` is -inf where a split is empty."""

    max: Array
    sum: Array
    acc: Array


def takes(case: Case | Call) -> bool:
    """Whether the case, or the call, takes the path with splits."""
    return case.q_length <= MOST_QUERIES and case.kv_length > LONG


def split_length(call: Call) -> int:
    """Keys of a split: about 512, and a multiple of 128."""
    splits = max(2, call.kv_length // 512)
    return -(-call.kv_length // (splits * 128)) * 128


def in_splits(x: Array, axis: int, length: int) -> Array:
    """`x` with `axis` padded and cut in splits, `[..., P, L, ...]`."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % length)
    x = jnp.pad(x, padding)
    return x.reshape(*x.shape[:axis], -1, length, *x.shape[axis + 1 :])


def rows_of(x: Array, call: Call) -> Array:
    """`[B, T, N, D]` to `[B, K, R, D]`."""
    x = x.reshape(call.batch, call.q_length, call.kv_heads, call.group, -1)
    return x.transpose(0, 2, 1, 3, 4).reshape(call.batch, call.kv_heads, call.q_length * call.group, -1)


def from_rows(x: Array, call: Call) -> Array:
    """Inverse of `rows_of`."""
    x = x.reshape(call.batch, call.kv_heads, call.q_length, call.group, -1).transpose(0, 2, 1, 3, 4)
    return x.reshape(call.batch, call.q_length, call.kv_heads * call.group, -1)


def pair_rows(x: Array, call: Call, length: int) -> Array:
    """`[B, N, T, S]` to `[B, K, P, R, L]`."""
    x = rows_of(x.transpose(0, 2, 1, 3), call)
    return jnp.moveaxis(in_splits(x, 3, length), 3, 2)


def visible(mask: Array, call: Call, length: int) -> Array:
    """Pairs that may attend; `mask [B, N, T, S]` has everything in it but the padding."""
    return pair_rows(mask, call, length)


def part(z: Array, v: Array, call: Call) -> Parts:
    """Each split by itself, of logits `[B, K, P, R, L]` and values `[B, K, P, L, V]`."""
    top = jax.lax.stop_gradient(z.max(axis=-1))
    weights = jnp.exp(z - jnp.where(top == -jnp.inf, 0.0, top)[..., None])
    return Parts(top, weights.sum(axis=-1), jnp.einsum("bkprl,bkplv->bkprv", weights, v, precision="highest"))


def merge(parts: Parts, sinks: Array, call: Call) -> tuple[Array, Array]:
    """`(out, logsumexp)` by rows; `sinks [K, R]` or None."""
    top = parts.max.max(axis=2)
    if sinks is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(parts.max - top[:, :, None])
    total = (weights * parts.sum).sum(axis=2)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    acc = (weights[..., None] * parts.acc).sum(axis=2)
    return finish(acc, total, top)


def finish(acc: Array, total: Array, top: Array) -> tuple[Array, Array]:
    """`(out, logsumexp)`, of rows without keys 0 and -inf."""
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    return acc / total[..., None], jnp.where(empty, -jnp.inf, top + jnp.log(total))


def sink_rows(sinks: Array, call: Call) -> Array:
    """`[N]` to `[K, R]`."""
    return jnp.tile(sinks.reshape(call.kv_heads, call.group), (1, call.q_length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitSteps:
    """The steps that a bug may replace; the defaults are correct."""

    allowed: Step = lambda mask, call: mask  # [B, N, T, S]
    visible: Step = visible
    bias_rows: Step = pair_rows
    capped: Step = lambda z, call: z if call.soft_cap is None else call.soft_cap * jnp.tanh(z / call.soft_cap)
    part: Step = part
    parts: Step = lambda parts, call: parts
    sink_rows: Step = sink_rows
    merge: Step = merge
    from_rows: Step = from_rows
    lse: Step = lambda lse, call: lse  # [B, T, N]


def _by_splits(steps: SplitSteps, call: Call, arrays: wrapped.Arrays, allowed: Array) -> tuple[Array, Array, Array]:
    """`(out [B, T, N, V], logsumexp [B, N, T], max_logits [B, N, T])`."""
    q, k, v = (arrays[name].astype(jnp.float32) for name in "qkv")
    length = split_length(call)
    full = (call.batch, q.shape[2], call.q_length, call.kv_length)
    keys, values = (in_splits(x.transpose(0, 2, 1, 3), 2, length) for x in (k, v))
    z = call.scale * jnp.einsum("bkrh,bkplh->bkprl", rows_of(q, call), keys, precision="highest")
    if "bias" in arrays:
        bias = jnp.broadcast_to(arrays["bias"].astype(jnp.float32), full)
        z = z + steps.bias_rows(bias, call, length)
    z = steps.capped(z, call)
    z = jnp.where(steps.visible(steps.allowed(jnp.broadcast_to(allowed, full), call), call, length), z, -jnp.inf)
    parts = steps.parts(steps.part(z, values, call), call)
    sinks = steps.sink_rows(arrays["sinks"].astype(jnp.float32), call) if "sinks" in arrays else None
    out, lse = steps.merge(parts, sinks, call)
    top = z.max(axis=(2, 4))
    lse, top = (from_rows(x[..., None], call)[..., 0] for x in (lse, top))
    lse = steps.lse(lse, call)
    return steps.from_rows(out, call).astype(call.dtype), lse.transpose(0, 2, 1), top.transpose(0, 2, 1)


def kernel(steps: SplitSteps) -> wrapped.Kernel:
    """The kernel made of `steps`."""

    def attend(arrays: wrapped.Arrays, statics: wrapped.Statics) -> Any:
        q, k = arrays["q"], arrays["k"]
        scale = q.shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
        call = Call(
            q.shape[0], q.shape[1], k.shape[1], k.shape[2], q.shape[2] // k.shape[2], scale, statics["soft_cap"],
            "segment_ids" in arrays, q.dtype,
        )  # fmt: skip
        if not takes(call):
            return wrapped.correct(arrays, statics)
        allowed = naive.build_mask(
            q, k, statics["causal"], statics["window"], arrays.get("mask"), arrays.get("segment_ids")
        )
        out, lse, top = _by_splits(steps, call, arrays, allowed)
        return (out, {"logsumexp": lse, "max_logits": top}) if statics["save_residuals"] else out

    return attend


def implementation(steps: SplitSteps, name: str) -> Implementation:
    """The kernel made of `steps`, as the gate takes it."""
    return wrapped.implementation(name, kernel(steps))


def planted(
    *,
    name: str,
    family: str,
    kind: str,
    reference: str,
    shows: tuple[str, ...] = ("out", "logsumexp"),
    trigger: Callable[[Case], bool] = takes,
    **replaced: Step,
) -> PlantedBug:
    """The bug that replacing these steps plants."""
    return PlantedBug(
        name=name,
        family=family,
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(implementation, SplitSteps(**replaced), name),
        trigger=trigger,
    )
