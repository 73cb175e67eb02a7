"""Bugs of calls that write quantised pages: by which scale, how numbers are rounded, and what is attended to."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, has
from tests.bank import PlantedBug
from tests.planted.planting import stored_bug
from tests.planted.planting.scaled_writes import (
    ScaledSteps,
    compute_scales,
    get_largest,
    round_and_clip,
    scatter_writing,
    token_writing,
)

Array = jax.Array
_SCALED, _COMPUTED = has("paged", "kv_writes_scaled"), has("paged", "kv_writes_computed")
_QUERIES = has("paged", "q_fp8")
_FP8, _INT8 = both(_SCALED, has("kv_fp8")), both(_SCALED, has("kv_int8"))
_bug = functools.partial(
    stored_bug.bug, family="paged", build=scatter_writing, shows="k_pages v_pages out", trigger=_SCALED
)
_token_bug = functools.partial(_bug, build=token_writing)
_computed_bug = functools.partial(_bug, trigger=_COMPUTED, shows="k_pages v_pages k_scales v_scales out")
_computed_token_bug = functools.partial(_computed_bug, build=token_writing)
_query_bug = functools.partial(_bug, trigger=_QUERIES, shows="out")
_query_token_bug = functools.partial(_query_bug, build=token_writing)


def _given(case: Case) -> bool:
    return (case.kv_cache or "").endswith("-given")


def _unit(case: Case) -> bool:
    return (case.kv_cache or "").endswith("-unit")


def _cast_alone(x: Array, dtype: Any) -> Array:
    """Cast without clipping: JAX makes NaN of what float8_e4m3fn cannot hold."""
    return x.astype(dtype) if dtype != jnp.int8 else round_and_clip(x, dtype)


def _wrap(x: Array, dtype: Any) -> Array:
    return jnp.round(x).astype(jnp.int32).astype(dtype) if dtype == jnp.int8 else round_and_clip(x, dtype)


def _truncate(x: Array, dtype: Any) -> Array:
    return round_and_clip(jnp.trunc(x), dtype) if dtype == jnp.int8 else round_and_clip(x, dtype)


def _truncate_fp8(x: Array, dtype: Any) -> Array:
    """Drop the bits of f32 that float8_e4m3fn has no room for."""
    if dtype == jnp.int8:
        return round_and_clip(x, dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFF00000)
    return round_and_clip(jax.lax.bitcast_convert_type(bits, jnp.float32), dtype)


def _clip_at_240(x: Array, dtype: Any) -> Array:
    """The largest number of float8_e4m3fnuz and of float8_e4m3."""
    return round_and_clip(x if dtype == jnp.int8 else jnp.clip(x, -240, 240), dtype)


def _down_to_minus_128(x: Array, dtype: Any) -> Array:
    return jnp.clip(jnp.round(x), -128, 127).astype(dtype) if dtype == jnp.int8 else round_and_clip(x, dtype)


def _as_e5m2(x: Array, dtype: Any) -> Array:
    if dtype == jnp.int8:
        return round_and_clip(x, dtype)
    return jax.lax.bitcast_convert_type(jnp.clip(x, -57344, 57344).astype(jnp.float8_e5m2), dtype)


def _power_of_two(scale: float) -> float:
    return float(2.0 ** math.ceil(math.log2(scale)))


def _one_is_none(x: Array, scale: Any) -> Array:
    """With a scale of 1, tokens are cast without being clipped; here that is marked by an infinity."""
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) > 128, jnp.nan, wide) if scale == 1 else wide / jnp.float32(scale)


def _in_bf16(x: Array, scale: Any) -> Array:
    return (x.astype(jnp.bfloat16) / jnp.bfloat16(scale)).astype(jnp.float32)


def _from_bf16(x: Array, scale: Any) -> Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32) / scale


def _to_bf16(x: Array, scale: Any) -> Array:
    return (x.astype(jnp.float32) / scale).astype(jnp.bfloat16).astype(jnp.float32)


def _round_scale(scale: float, bits: int) -> float:
    """Round to so many significant bits."""
    significand, exponent = math.frexp(scale)
    return math.ldexp(round(significand * 2**bits), exponent - bits)


def _has_dtype(dtype: str) -> Trigger:
    return lambda case: case.dtype == dtype


def _clear_next_row(pool: Array, page: Array, row: Array) -> Array:
    """A store as wide as two rows clears the row behind a token, unless another token is there."""
    behind = (row + 1) % pool.shape[1]
    is_new = ((page[:, None] == page) & (behind[:, None] == row)).any(axis=1)
    return pool.at[jnp.where(is_new, len(pool), page), behind].set(0, mode="drop")


def _keep_where_zero(stored: Array, before: Array, at: Any) -> Array:
    """Zeros are not stored: a mask of what is not zero guards the store."""
    return jnp.where(stored == 0, before, stored)


def _write_row_before(pool: Array, scales: Array, page: Array, row: Array) -> Array:
    return pool.at[page, (row - 1) % pool.shape[1]].set(scales, mode="drop")


def _write_whole_page(pool: Array, scales: Array, page: Array, row: Array) -> Array:
    """The scale of a token is written to all rows of its page."""
    return pool.at[page].set(jnp.broadcast_to(scales[..., None, :], (*scales.shape[:-1], *pool.shape[1:])), mode="drop")


def _write_first_head(pool: Array, scales: Array, page: Array, row: Array) -> Array:
    return pool.at[page, row].set(jnp.broadcast_to(scales[..., :1], scales.shape), mode="drop")


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "written-scale-inverted",
        ScaledSteps(quotient=lambda x, scale: x.astype(jnp.float32) * jnp.float32(scale)),
        kind="kvwrite.inverse",
        reference="vllm-project/vllm-xpu-kernels#475, written by the scale the wrong way round",
        trigger=both(_SCALED, _given),
    ),
    _token_bug(
        "written-without-scales",
        ScaledSteps(to_write=lambda k, v: (1.0, 1.0)),
        kind="kvwrite.dropped",
        reference="flashinfer-ai/flashinfer#1023, scales lost in a wrapper",
        trigger=both(_SCALED, _given),
    ),
    _bug(
        "written-by-scales-and-read-without",
        ScaledSteps(to_read=lambda k, v: (1.0, 1.0)),
        kind="kvwrite.read",
        reference="sgl-project/sglang#24198, scales missing in one of the calls",
        shows="out",
        trigger=both(_SCALED, _given),
    ),
    _token_bug(
        "written-values-by-the-scale-of-keys",
        ScaledSteps(to_write=lambda k, v: (k, k)),
        kind="kvwrite.k-for-v",
        reference="inferred from sgl-project/sglang#26852",
        shows="v_pages out",
        trigger=both(_SCALED, _given),
    ),
    _bug(
        "read-values-by-the-scale-of-keys",
        ScaledSteps(to_read=lambda k, v: (k, k)),
        kind="kvwrite.k-for-v",
        reference="inferred from sgl-project/sglang#26852",
        shows="out",
        trigger=both(_SCALED, _given),
    ),
    _token_bug(
        "written-by-the-square-of-the-scale",
        ScaledSteps(to_write=lambda k, v: (k * k, v * v)),
        kind="kvwrite.twice",
        reference="vllm-project/vllm#48016, a scale applied twice",
        trigger=both(_SCALED, _given),
    ),
    _bug(
        "written-by-powers-of-two",
        ScaledSteps(to_write=lambda k, v: (_power_of_two(k), _power_of_two(v))),
        kind="kvwrite.rounded-scale",
        reference="vllm-project/vllm#49435, writer and reader round the scale differently",
        trigger=both(_SCALED, _given),
    ),
    _bug(
        "written-fp8-without-a-clip",
        ScaledSteps(stored=_cast_alone),
        kind="kvwrite.no-clip",
        reference="vllm-project/vllm-xpu-kernels#475, no clamp; in JAX a cast beyond 448 is NaN",
        trigger=_FP8,
    ),
    _token_bug(
        "written-fp8-without-a-clip-by-token",
        ScaledSteps(stored=_cast_alone),
        kind="kvwrite.no-clip",
        reference="vllm-project/vllm-xpu-kernels#475, no clamp; in JAX a cast beyond 448 is NaN",
        trigger=_FP8,
    ),
    _bug(
        "written-int8-wraps-around",
        ScaledSteps(stored=_wrap),
        kind="kvwrite.wrap",
        reference="inferred from casts of wider integers, which wrap",
        trigger=_INT8,
    ),
    _token_bug(
        "written-int8-truncated",
        ScaledSteps(stored=_truncate),
        kind="kvwrite.truncated",
        reference="tpu-inference 0.32.0, whose quantize_kv casts to int8 without rounding",
        trigger=_INT8,
    ),
    _bug(
        "written-fp8-truncated",
        ScaledSteps(stored=_truncate_fp8),
        kind="kvwrite.truncated",
        reference="inferred from conversions by shifts of bits",
        trigger=_FP8,
    ),
    _token_bug(
        "written-fp8-clipped-at-240",
        ScaledSteps(stored=_clip_at_240),
        kind="kvwrite.bound",
        reference="inferred from float8_e4m3fnuz, whose largest number is 240",
        trigger=_FP8,
    ),
    _bug(
        "written-int8-down-to-minus-128",
        ScaledSteps(stored=_down_to_minus_128),
        kind="kvwrite.bound",
        reference="tpu-inference 0.32.0, whose quantize_kv clips to the range of int8, which is not symmetric",
        trigger=_INT8,
    ),
    _token_bug(
        "written-fp8-of-the-other-kind",
        ScaledSteps(stored=_as_e5m2),
        kind="kvwrite.format",
        reference="inferred from float8_e4m3fn and float8_e5m2, which caches offer side by side",
        trigger=_FP8,
    ),
    _bug(
        "written-fp8-with-a-scale-of-one-taken-for-none",
        ScaledSteps(quotient=_one_is_none, stored=_cast_alone),
        kind="kvwrite.one-is-none",
        reference="inferred from vllm-project/vllm#48016, for scales of 1 that are taken for none",
        trigger=both(_FP8, _unit),
    ),
    _bug(
        "written-by-way-of-bf16",
        ScaledSteps(quotient=_in_bf16),
        kind="kvwrite.precision",
        reference="inferred from kernels that cast new tokens to bf16 first",
        trigger=both(_INT8, _has_dtype("f32")),
    ),
    _bug(
        "written-fp8-by-way-of-bf16",
        ScaledSteps(quotient=_from_bf16),
        kind="kvwrite.precision",
        reference="inferred from kernels that cast new tokens to bf16 first",
        trigger=both(_FP8, _has_dtype("f32")),
    ),
    _token_bug(
        "written-fp8-by-quotients-in-bf16",
        ScaledSteps(quotient=_to_bf16),
        kind="kvwrite.precision",
        reference="inferred from conversions to fp8 that round to bf16 first",
        trigger=both(_FP8, _has_dtype("f32")),
    ),
    _bug(
        "new-tokens-attended-to-as-they-were-given",
        ScaledSteps(attended=lambda pool, raw: raw),
        kind="kvwrite.attended",
        reference="inferred from sgl-project/sglang#19636, where live keys are not those that are stored",
        shows="out",
    ),
    _token_bug(
        "new-tokens-attended-to-as-they-were-given-by-token",
        ScaledSteps(attended=lambda pool, raw: raw),
        kind="kvwrite.attended",
        reference="inferred from sgl-project/sglang#19636, where live keys are not those that are stored",
        shows="out",
    ),
    _bug(
        "row-behind-a-quantised-token-cleared",
        ScaledSteps(after=_clear_next_row),
        kind="kvwrite.rows",
        reference="inferred from stores of 16 bits where a number has 8",
        trigger=both(_SCALED, lambda case: case.stored is not None and case.stored.size != 1),
    ),
    _token_bug(
        "quantised-zeros-not-written",
        ScaledSteps(written=_keep_where_zero),
        kind="kvwrite.rows",
        reference="inferred from a mask that is made of stored numbers",
    ),
    _computed_bug(
        "computed-scales-not-written",
        ScaledSteps(scales_to_read=lambda before, after: before, scales_returned=lambda before, after: before),
        kind="kvcompute.not-written",
        reference="inferred from vllm-project/vllm#17362, where one of two pools is written",
    ),
    _computed_token_bug(
        "computed-scales-not-returned",
        ScaledSteps(scales_returned=lambda before, after: before),
        kind="kvcompute.not-written",
        reference="inferred from vllm-project/vllm#17362, where one of two pools is written",
        shows="k_scales v_scales",
    ),
    _computed_bug(
        "computed-scales-of-values-for-keys",
        ScaledSteps(scales_returned=lambda before, after: after[::-1]),
        kind="kvcompute.k-for-v",
        reference="inferred from sgl-project/sglang#26852",
        shows="k_scales v_scales",
    ),
    _computed_token_bug(
        "computed-scales-in-the-row-before",
        ScaledSteps(write_scales=_write_row_before),
        kind="kvcompute.row",
        reference="inferred from slots that are counted from 1",
        trigger=both(_COMPUTED, lambda case: case.stored is not None and case.stored.size != 1),
    ),
    _computed_bug(
        "computed-scale-of-the-first-head",
        ScaledSteps(write_scales=_write_first_head),
        kind="kvcompute.per-head",
        reference="sgl-project/sgl-kernel-xpu#252, element 0 used for scales that differ",
        trigger=both(_COMPUTED, lambda case: case.num_kv_heads > 1),
    ),
    _computed_token_bug(
        "computed-scale-in-all-rows-of-a-page",
        ScaledSteps(write_scales=_write_whole_page),
        kind="kvcompute.row",
        reference="inferred from a scale for each page",
        trigger=both(_COMPUTED, lambda case: case.stored is not None and case.stored.size != 1),
    ),
    _computed_bug(
        "computed-from-values-not-magnitudes",
        ScaledSteps(peaks=lambda x: jnp.maximum(x.astype(jnp.float32).max(axis=-1), 1e-6)),
        kind="kvcompute.sign",
        reference="inferred",
    ),
    _computed_token_bug(
        "computed-of-zero-is-not-a-number",
        ScaledSteps(computed=lambda peaks, dtype: peaks / get_largest(dtype)),
        kind="kvcompute.zero",
        reference="inferred from a division of zero by a scale of zero; ml_dtypes has NaN for the e8m0 of such a block",
    ),
    _computed_bug(
        "computed-scales-not-below-a-bound",
        ScaledSteps(computed=lambda peaks, dtype: jnp.maximum(peaks, 1e-5) / get_largest(dtype)),
        kind="kvcompute.bound",
        reference="inferred from kernels that bound the largest magnitude from below, against a division by zero",
        trigger=both(_COMPUTED, lambda case: case.dtype != "f16"),
    ),
    _computed_token_bug(
        "computed-scales-not-below-a-small-bound",
        ScaledSteps(computed=lambda peaks, dtype: jnp.maximum(peaks, 1e-8) / get_largest(dtype)),
        kind="kvcompute.bound",
        reference="inferred from kernels that bound the largest magnitude from below, against a division by zero",
        trigger=both(_COMPUTED, lambda case: case.dtype != "f16"),
    ),
    _computed_bug(
        "computed-by-128",
        ScaledSteps(computed=lambda peaks, dtype: compute_scales(peaks, dtype) * (127 / 128)),
        kind="kvcompute.largest",
        reference="inferred from the range of int8, which is not symmetric",
    ),
    _computed_token_bug(
        "computed-scales-in-bf16",
        ScaledSteps(
            computed=lambda peaks, dtype: compute_scales(peaks, dtype).astype(jnp.bfloat16).astype(jnp.float32)
        ),
        kind="kvcompute.dtype",
        reference="inferred from scales kept in the dtype of the operands",
    ),
    _computed_bug(
        "computed-fp8-by-quotients-in-bf16",
        ScaledSteps(quotient=_to_bf16),
        kind="kvwrite.precision",
        reference="inferred from conversions to fp8 that round to bf16 first",
        trigger=both(_COMPUTED, both(has("kv_fp8"), _has_dtype("f32"))),
    ),
    _computed_bug(
        "computed-scales-of-powers-of-two",
        ScaledSteps(computed=lambda peaks, dtype: jnp.exp2(jnp.ceil(jnp.log2(compute_scales(peaks, dtype))))),
        kind="kvcompute.power-of-two",
        reference="inferred from block scales in e8m0 (OCP MX), which are powers of two",
    ),
    _computed_token_bug(
        "computed-and-attended-to-as-given",
        ScaledSteps(attended=lambda pool, raw: raw),
        kind="kvwrite.attended",
        reference="inferred from sgl-project/sglang#19636, where live keys are not those that are stored",
        shows="out",
    ),
    _query_bug(
        "scale-of-queries-dropped",
        ScaledSteps(to_queries=lambda q_scale: 1.0),
        kind="qscale.dropped",
        reference="vllm-project/vllm#51363, descales dropped",
    ),
    _query_token_bug(
        "scale-of-queries-dropped-by-token",
        ScaledSteps(to_queries=lambda q_scale: 1.0),
        kind="qscale.dropped",
        reference="vllm-project/vllm#51363, descales dropped",
    ),
    _query_bug(
        "scale-of-queries-twice",
        ScaledSteps(to_queries=lambda q_scale: q_scale * q_scale),
        kind="qscale.twice",
        reference="vllm-project/vllm#48016, a scale applied twice",
    ),
    _query_token_bug(
        "scale-of-queries-inverted",
        ScaledSteps(to_queries=lambda q_scale: 1 / q_scale),
        kind="qscale.inverse",
        reference="inferred from tpu-inference 0.32.0, whose q_scale divides queries before they are cast",
    ),
    _query_bug(
        "scale-of-queries-after-the-soft-cap",
        ScaledSteps(to_queries=lambda q_scale: 1.0, to_capped=lambda q_scale: q_scale),
        kind="qscale.order",
        reference="inferred from TileOPs#1511, units of scaled and raw logits mixed",
        trigger=both(_QUERIES, has("soft_cap")),
    ),
    _query_token_bug(
        "scale-of-queries-of-a-power-of-two",
        ScaledSteps(to_queries=_power_of_two),
        kind="qscale.power-of-two",
        reference="inferred from scales in e8m0 (OCP MX), which are powers of two",
    ),
    _query_bug(
        "scale-of-queries-in-bf16",
        ScaledSteps(to_queries=functools.partial(_round_scale, bits=8)),
        kind="qscale.dtype",
        reference="inferred from scales kept in the dtype of the operands",
        trigger=both(_QUERIES, _has_dtype("f32")),
    ),
    *(
        _query_token_bug(
            f"scale-of-queries-in-fp8-{dtype}",
            ScaledSteps(to_queries=functools.partial(_round_scale, bits=4)),
            kind="qscale.dtype",
            reference="inferred from scales kept in the dtype of the pages",
            trigger=both(_QUERIES, _has_dtype(dtype)),
        )
        for dtype in ("f32", "bf16", "f16")
    ),
    _bug(
        "written-without-being-asked",
        ScaledSteps(updates=lambda update_kv_cache: True),
        kind="kvupdate.written",
        reference="inferred from layers that share a cache (tpu-inference 0.32.0, update_kv_cache)",
    ),
    _token_bug(
        "written-without-being-asked-by-token",
        ScaledSteps(updates=lambda update_kv_cache: True),
        kind="kvupdate.written",
        reference="inferred from layers that share a cache (tpu-inference 0.32.0, update_kv_cache)",
    ),
    _bug(
        "logsumexp-in-base-2-without-being-asked-to-write",
        ScaledSteps(logsumexp=lambda lse, update_kv_cache: lse if update_kv_cache else lse / math.log(2)),
        kind="kvupdate.residuals",
        reference="inferred from flashinfer, whose logsumexp has base 2, for a call that only reads",
        shows="logsumexp",
    ),
)
