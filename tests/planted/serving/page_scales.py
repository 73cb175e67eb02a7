"""Bugs of pages with scales: which scale multiplies what, how often and when, and what stored bits mean.

Scales are by token, or one of all keys and one of all values.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.triggers import both, has
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.served import Call, PagedSteps, scaled, whole

Array = jax.Array
_BY_TOKEN = has("paged", "kv_token_scales")
_BY_TENSOR = has("paged", "kv_tensor_scales")
_bug = functools.partial(
    stored_bug.bug, family="paged", build=scaled, shows="out logsumexp max_logits", trigger=_BY_TOKEN
)
_whole_bug = functools.partial(_bug, build=whole, trigger=_BY_TENSOR)


def _of_first_sequence(pages: Array, row: Array, slot: Array, call: Call) -> tuple[Array, Array]:
    assert call.page_indices is not None
    return jnp.broadcast_to(call.page_indices[:1, slot], pages.shape), row


def _strides_of_16(x: Array, pages: Array, row: Array) -> Array:
    """Scales found as if a page had 16 rows."""
    flat = x.reshape(-1, x.shape[2])
    return flat[jnp.clip(pages * 16 + row, 0, len(flat) - 1)]


def _heads_before_rows(x: Array, pages: Array, row: Array) -> Array:
    """Scales laid out `[pages, page_size, K]` are read as `[pages, K, page_size]`."""
    count, size, heads = x.shape
    return x.reshape(count, heads, size).swapaxes(1, 2)[jnp.clip(pages, 0, count - 1), row]


def _of_first_row(pages: Array, row: Array, slot: Array, call: Call) -> tuple[Array, Array]:
    return pages, jnp.zeros_like(row)


def _of_next_row(pages: Array, row: Array, slot: Array, call: Call) -> tuple[Array, Array]:
    return pages, (row + 1) % call.page_size


def _unsigned(x: Array, scales: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (jnp.where(wide < 0, wide + 256, wide) if x.dtype == jnp.int8 else wide) * scales[..., None]


def _other_fp8(x: Array, scales: Array) -> Array:
    """Bits of float8_e4m3fn read as float8_e5m2."""
    kept = jax.lax.bitcast_convert_type(x, jnp.float8_e5m2) if x.dtype == jnp.float8_e4m3fn else x
    return kept.astype(jnp.float32) * scales[..., None]


def _after_the_cap(x: Array, allowed: Array, call: Call) -> Array:
    return x * call.k_scale if call.soft_cap is None else call.soft_cap * jnp.tanh(x / call.soft_cap) * call.k_scale


def _stay_without_scales(name: str) -> Implementation:
    """Once a call had scales of 1, the program without scales serves all later calls."""
    seen: list[bool] = []

    def take(k_scale: float, v_scale: float) -> tuple[float, float]:
        if k_scale == v_scale == 1:
            seen.append(True)
        return (1.0, 1.0) if seen else (k_scale, v_scale)

    return whole(name, PagedSteps(numbers=take))


def _in_bf16(scale: float) -> Array:
    return jnp.bfloat16(scale).astype(jnp.float32)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "page-scales-by-slot-of-the-table",
        PagedSteps(of_scales=lambda pages, row, slot, call: (jnp.broadcast_to(slot, pages.shape), row)),
        kind="kvscale.table",
        reference="inferred: scales found by the token's place in its sequence, pages by the table",
    ),
    _bug(
        "page-scales-by-the-first-row-of-the-table",
        PagedSteps(of_scales=_of_first_sequence),
        kind="kvscale.table",
        reference="inferred from vllm-project/flash-attention#176, all rows folded onto the first",
        trigger=both(_BY_TOKEN, lambda case: case.batch > 1),
    ),
    _bug(
        "page-scale-of-the-first-token-for-all",
        PagedSteps(of_scales=_of_first_row),
        kind="kvscale.per-token",
        reference="sgl-project/sgl-kernel-xpu#252, element 0 used for scales that differ",
    ),
    _bug(
        "page-scale-of-the-next-token",
        PagedSteps(of_scales=_of_next_row),
        kind="kvscale.row",
        reference="inferred",
    ),
    _bug(
        "page-scales-with-strides-of-16",
        PagedSteps(scale=_strides_of_16),
        kind="kvscale.layout",
        reference="vllm-project/vllm#49716, strides of scales that are not those of the page",
    ),
    _bug(
        "page-scales-with-heads-before-rows",
        PagedSteps(scale=_heads_before_rows),
        kind="kvscale.layout",
        reference="inferred: JAX keeps heads before pages",
        trigger=both(_BY_TOKEN, lambda case: case.num_kv_heads > 1),
    ),
    _bug(
        "page-scale-of-the-next-head-for-v",
        PagedSteps(scales=lambda k, v: (k, jnp.roll(v, 1, axis=-1))),
        kind="kvscale.per-head",
        reference="inferred",
        shows="out",
        trigger=both(_BY_TOKEN, lambda case: case.num_kv_heads > 1),
    ),
    _bug(
        "page-scales-inverted",
        PagedSteps(meant=lambda x, scales: x.astype(jnp.float32) / jnp.where(scales == 0, 1, scales)[..., None]),
        kind="kvscale.inverse",
        reference="vllm-project/vllm-xpu-kernels#475, a scale used the wrong way round",
    ),
    _bug(
        "page-scales-in-bf16",
        PagedSteps(scales=lambda k, v: tuple(x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))),
        kind="kvscale.dtype",
        reference="inferred from scales kept in the dtype of the operands",
    ),
    _bug(
        "page-of-int8-unsigned",
        PagedSteps(meant=_unsigned),
        kind="kvbits.sign",
        reference="inferred from caches of bytes",
        trigger=both(_BY_TOKEN, has("kv_int8")),
    ),
    _bug(
        "page-of-fp8-of-the-other-kind",
        PagedSteps(meant=_other_fp8, meant_values=_other_fp8),
        kind="kvbits.format",
        reference="inferred from float8_e4m3fn and float8_e5m2, which caches offer side by side",
        trigger=both(_BY_TOKEN, has("kv_fp8")),
    ),
    _whole_bug(
        "page-scale-of-all-values-for-keys",
        PagedSteps(numbers=lambda k, v: (v, v)),
        kind="kvscale.k-for-v",
        reference="inferred from sgl-project/sglang#26852",
    ),
    _whole_bug(
        "page-scale-of-all-keys-forgotten",
        PagedSteps(numbers=lambda k, v: (1.0, v)),
        kind="kvscale.dropped",
        reference="flashinfer-ai/flashinfer#1023",
    ),
    _whole_bug(
        "page-scale-of-all-keys-twice",
        PagedSteps(numbers=lambda k, v: (k * k, v)),
        kind="kvscale.twice",
        reference="vllm-project/vllm#48016",
    ),
    _whole_bug(
        "page-scale-of-all-keys-after-the-soft-cap",
        PagedSteps(cap=_after_the_cap),
        kind="kvscale.order",
        reference="inferred from TileOPs#1511, units of scaled and raw logits mixed",
        trigger=both(_BY_TENSOR, has("soft_cap")),
    ),
    PlantedBug(
        name="program-of-page-scales-of-one-kept",
        family="paged",
        kind="kvscale.kept",
        reference="inferred from vllm-project/vllm#48016, for scales of 1 that are taken for none",
        shows=("out",),
        build=functools.partial(_stay_without_scales, "program-of-page-scales-of-one-kept"),
        trigger=_BY_TENSOR,
    ),
    _whole_bug(
        "page-scale-of-all-values-in-bf16",
        PagedSteps(times=lambda out, v_scale, call: out * _in_bf16(v_scale)),
        kind="kvscale.dtype",
        reference="inferred from a scale kept in the dtype of the operands",
        shows="out",
    ),
)
