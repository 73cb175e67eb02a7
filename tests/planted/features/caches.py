"""Bugs of quantised caches: which scale multiplies what, and what the stored bits mean."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import KV_FEATURES, Case
from conformance.mutation.kernels.plain import PlainSteps, capped, kernel
from conformance.mutation.kernels.triggers import Trigger, both, has, sixteen_bits
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug

Array = jax.Array
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSteps:
    """Steps from what is stored to keys and values in f32; the defaults are correct.

    `scales` gets and gives those of k and of v, `[B or 1, S or 1, K]`, after q; `stored` and `meant` are asked of k and
    of v alike. With `plain`, the kernel that attends to the keys and values, which gets its scales as well.
    """

    scales: Step = lambda k_scales, v_scales, q: (k_scales, v_scales)
    stored: Step = lambda x: x.astype(jnp.float32)
    meant: Step = lambda x, scales: x * scales[..., None]
    plain: Step = lambda k_scales, v_scales: PlainSteps()


def attention_by(steps: CacheSteps) -> Callable[..., Any]:
    """The attention function made of `steps`."""

    def attention(q: Array, k: Array, v: Array, *, kv_scales: tuple[Array, Array], **options: Any) -> Any:
        k_scales, v_scales = steps.scales(*(jnp.asarray(x) for x in kv_scales), q)
        k, v = (steps.meant(steps.stored(jnp.asarray(x)), s) for x, s in ((k, k_scales), (v, v_scales)))
        return kernel(steps.plain(k_scales, v_scales))(q, k, v, **options)

    return attention


def _supports(case: Case) -> str | None:
    return None if case.kv_cache else "only quantised caches"


def implementation(name: str, steps: CacheSteps = CacheSteps()) -> Implementation:
    """The kernel made of `steps` as the gate takes it."""
    return Implementation(
        name=name,
        call=attention_by(steps),
        offers=KV_FEATURES,
        supports_case=_supports,
        arithmetic=Arithmetic(probabilities="f32"),
        gradients=frozenset(),
        differentiable_residuals=frozenset(),
        empty_rows="zero",
        behind_mask="finite",
        refuses_by_signature=True,
    )


_cached = has("kv_token_scales")
_by_head = has("kv_head_scales")


def _bug(
    name: str,
    steps: CacheSteps,
    *,
    kind: str,
    reference: str,
    shows: str = "out logsumexp max_logits",
    trigger: Trigger = _cached,
) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="quantised caches",
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=functools.partial(implementation, name, steps),
        trigger=trigger,
    )


def _ones(x: Array) -> Array:
    return jnp.ones_like(x)


def _per_pair(scales: Array, heads: int) -> Array:
    """`[B or 1, S or 1, K]` as `[B or 1, N, 1, S or 1]`."""
    return jnp.repeat(scales, heads // scales.shape[2], axis=2).transpose(0, 2, 1)[:, :, None]


def _unsigned(x: Array) -> Array:
    """Four bits read without their sign."""
    wide = x.astype(jnp.float32)
    return jnp.where(wide < 0, wide + 16, wide) if x.dtype == jnp.int4 else wide


def _nibbles_swapped(x: Array) -> Array:
    """Of two numbers in a byte, the high one comes first."""
    wide = x.astype(jnp.float32)
    if x.dtype != jnp.int4 or x.shape[-1] % 2:
        return wide
    return wide.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)


def _other_fp8(x: Array) -> Array:
    """Bits of float8_e4m3fn read as float8_e4m3fnuz, whose exponents are one lower."""
    return x.astype(jnp.float32) * (0.5 if x.dtype == jnp.float8_e4m3fn else 1.0)


def _shifted(scales: Array) -> Array:
    return jnp.roll(scales, 1, axis=2)


def _cap_before_scale(k_scales: Array, v_scales: Array) -> PlainSteps:
    """The soft cap bends logits that still lack the scale of the cache."""

    def bent(x: Array, call: Any) -> Array:
        scales = _per_pair(k_scales, call.q.shape[2])
        return x if call.soft_cap is None else capped(x / scales, call) * scales

    return PlainSteps(cap=bent)


def _sum_of_scaled_weights(k_scales: Array, v_scales: Array) -> PlainSteps:
    """Weights take in the scale of v before they are summed, and out is divided by that sum."""

    def normalised(weights: Array, total: Array, call: Any) -> Array:
        scales = _per_pair(v_scales, call.q.shape[2])
        wrong = (weights * scales).sum(axis=-1, keepdims=True) / scales.max()
        return weights / jnp.where(total == 0, 1, total - weights.sum(axis=-1, keepdims=True) + wrong)

    return PlainSteps(normalised=normalised)


def _maximum_without_scale(k_scales: Array, v_scales: Array) -> PlainSteps:
    """The maximum is kept in the units of what is stored."""

    def maximum(top: Array, x: Array, call: Any) -> Array:
        z = jnp.where(call.allowed, x / _per_pair(k_scales, call.q.shape[2]), -jnp.inf)
        return z.max(axis=-1)

    return PlainSteps(max_logits=maximum)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "cache-scale-of-k-dropped",
        CacheSteps(scales=lambda k, v, q: (_ones(k), v)),
        kind="kvscale.dropped",
        reference="flashinfer issues 1023, 4979; vllm PR 4869",
    ),
    _bug(
        "cache-scale-of-v-dropped-in-decode",
        CacheSteps(scales=lambda k, v, q: (k, v if q.shape[1] > 1 else _ones(v))),
        kind="kvscale.dropped",
        reference="vllm PR 42580; sglang PR 20705 (one path)",
        shows="out",
        trigger=has("decode", "kv_token_scales"),
    ),
    _bug(
        "cache-scale-of-k-twice",
        CacheSteps(scales=lambda k, v, q: (k * k, v)),
        kind="kvscale.twice",
        reference="vllm PR 48016",
    ),
    _bug(
        "cache-scale-of-k-for-v",
        CacheSteps(scales=lambda k, v, q: (k, k)),
        kind="kvscale.k-for-v",
        reference="sglang PR 26852",
        shows="out",
    ),
    _bug(
        "cache-scale-of-the-first-head",
        CacheSteps(scales=lambda k, v, q: tuple(jnp.broadcast_to(x[..., :1], x.shape) for x in (k, v))),
        kind="kvscale.per-head",
        reference="sgl-kernel-xpu PR 252",
        trigger=_by_head,
    ),
    _bug(
        "cache-scale-by-packed-row",
        CacheSteps(scales=lambda k, v, q: (_shifted(k), _shifted(v))),
        kind="gqa.packgqa-descale",
        reference="rocm-libraries PR 11189",
        trigger=_by_head,
    ),
    _bug(
        "cache-scale-of-the-first-token",
        CacheSteps(scales=lambda k, v, q: tuple(jnp.broadcast_to(x[:, :1], x.shape) for x in (k, v))),
        kind="kvscale.per-token",
        reference="inferred from sgl-kernel-xpu PR 252",
    ),
    _bug(
        "cache-scale-of-the-first-batch-row",
        CacheSteps(scales=lambda k, v, q: tuple(jnp.broadcast_to(x[:1], x.shape) for x in (k, v))),
        kind="kvscale.batch0",
        reference="inferred from sgl-kernel-xpu PR 252",
        trigger=both(_cached, lambda case: case.batch > 1),
    ),
    _bug(
        "cache-scale-in-bf16",
        CacheSteps(scales=lambda k, v, q: tuple(x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))),
        kind="kvscale.dtype",
        reference="inferred from scales stored in the dtype of the operands",
    ),
    _bug(
        "cache-scale-of-128-steps",
        CacheSteps(scales=lambda k, v, q: (k * (127 / 128), v * (127 / 128))),
        kind="kvscale.range",
        reference="inferred from caches that divide by 128 and multiply by 127",
    ),
    _bug(
        "cache-int4-unsigned",
        CacheSteps(stored=_unsigned),
        kind="kvbits.sign",
        reference="inferred from int4 caches unpacked by a shift without sign",
        trigger=has("kv_int4"),
    ),
    _bug(
        "cache-int4-nibbles-swapped",
        CacheSteps(stored=_nibbles_swapped),
        kind="kvbits.order",
        reference="inferred from int4 caches of two numbers a byte",
        trigger=has("kv_int4"),
    ),
    _bug(
        "cache-fp8-of-the-other-kind",
        CacheSteps(stored=_other_fp8),
        kind="kvbits.format",
        reference="inferred from float8_e4m3fn and float8_e4m3fnuz, which differ by a factor of 2",
        trigger=has("kv_fp8"),
    ),
    _bug(
        "cache-scale-after-the-soft-cap",
        CacheSteps(plain=_cap_before_scale),
        kind="kvscale.order",
        reference="inferred from TileOPs PR 1511 (units of scaled and raw logits mixed)",
        trigger=both(_cached, has("soft_cap")),
    ),
    _bug(
        "cache-sum-of-scaled-weights",
        CacheSteps(plain=_sum_of_scaled_weights),
        kind="sink.blockscale",
        reference="rocm-libraries PR 11189 (sum and sink in different units)",
        shows="out",
    ),
    _bug(
        "cache-maximum-without-scale",
        CacheSteps(plain=_maximum_without_scale),
        kind="online.scale-mixed-units",
        reference="TileOPs PR 1511",
        shows="max_logits",
    ),
    _bug(
        "cache-out-in-the-stored-range",
        CacheSteps(plain=lambda k, v: PlainSteps(out=lambda out, call: jnp.clip(out, -1, 1).astype(call.q.dtype))),
        kind="kvbits.saturated",
        reference="inferred from outputs cast to the dtype of an fp8 cache",
        shows="out",
        trigger=both(_cached, sixteen_bits),
    ),
)
