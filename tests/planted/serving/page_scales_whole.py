"""Bugs of pages with one scale of all keys and one of all values: which multiplies what, how often, and when."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from conformance.sensitivity import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.served import Call, PagedSteps, whole
from tests.planted.planting.triggers import both, has

Array = jax.Array
_BY_TENSOR = has("paged", "kv_tensor_scales")
_bug = functools.partial(
    stored_bug.bug, family="paged", build=whole, shows="out logsumexp max_logits", trigger=_BY_TENSOR
)


def _after_the_cap(x: Array, allowed: Array, call: Call) -> Array:
    return x * call.k_scale if call.soft_cap is None else call.soft_cap * jnp.tanh(x / call.soft_cap) * call.k_scale


def _in_bf16(scale: float) -> Array:
    return jnp.bfloat16(scale).astype(jnp.float32)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "page-scale-of-all-values-for-keys",
        PagedSteps(numbers=lambda k, v: (v, v)),
        kind="kvscale.k-for-v",
        reference="inferred from sgl-project/sglang#26852",
    ),
    _bug(
        "page-scale-of-all-keys-forgotten",
        PagedSteps(numbers=lambda k, v: (1.0, v)),
        kind="kvscale.dropped",
        reference="flashinfer-ai/flashinfer#1023",
    ),
    _bug(
        "page-scale-of-all-keys-twice",
        PagedSteps(numbers=lambda k, v: (k * k, v)),
        kind="kvscale.twice",
        reference="vllm-project/vllm#48016",
    ),
    _bug(
        "page-scale-of-all-keys-after-the-soft-cap",
        PagedSteps(cap=_after_the_cap),
        kind="kvscale.order",
        reference="inferred from TileOPs#1511, units of scaled and raw logits mixed",
        trigger=both(_BY_TENSOR, has("soft_cap")),
    ),
    _bug(
        "page-scale-of-all-values-in-bf16",
        PagedSteps(times=lambda out, v_scale, call: out * _in_bf16(v_scale)),
        kind="kvscale.dtype",
        reference="inferred from a scale kept in the dtype of the operands",
        shows="out",
    ),
)
