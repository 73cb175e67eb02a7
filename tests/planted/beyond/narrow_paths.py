"""Bugs of precision on one path of a kernel only: under a causal mask, over a split cache, where a maximum rises.

Each is below one rounding on ordinary values, or needs values that are large or rise.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels import blockwise, plain
from conformance.mutation.kernels.plain import Array, PlainSteps
from conformance.mutation.kernels.rounding import rounded
from conformance.mutation.kernels.steps import Block, Running
from conformance.mutation.kernels.triggers import both, sixteen_bits, trains
from tests.bank import PlantedBug
from tests.planted.beyond.precision import over, towards_zero
from tests.planted.planting import splits, tiled

_FAMILY = "narrow paths"
_LONG_CACHE = 1024
_THRESHOLD = 16.0
_plain = functools.partial(plain.planted, _FAMILY)
_tiled = functools.partial(tiled.planted, family=_FAMILY)
_splits = functools.partial(splits.planted, family=_FAMILY)


def _causal(case: Case) -> bool:
    return "causal" in case.features


def _half(case: Case) -> bool:
    return case.dtype == "f16"


def _brain(case: Case) -> bool:
    return case.dtype == "bf16"


def _bf16(x: Array) -> Array:
    return rounded(x, jnp.bfloat16)


def _through_f16(x: Array) -> Array:
    """Round `x` to f16, where it is infinite beyond 65504."""
    return x.astype(jnp.float16).astype(jnp.float32)


def _cut(x: Array, dtype: Any) -> Array:
    """Truncate `x` to the bits of `dtype`, and keep its derivative."""
    return x + plain.stop(towards_zero(x, dtype) - x)


# All pairs of plain attention at once.


def _weights_summed_in_f16(weights: Array, total: Array, call: plain.Call) -> Array:
    """Divide weights by a sum in the operands' dtype; `logsumexp` is of the sum in f32."""
    if call.q.dtype == jnp.float16 and call.kv_length > _LONG_CACHE:
        total = rounded(total, jnp.float16)
    return weights / plain.nonzero(total)


# Square tiles, one key block after another.


def _is_narrow_causal(call: tiled.Call) -> bool:
    return call.causal and call.sixteen_bits


def _acc_in_operands_dtype(call: tiled.Call, acc: Array, alpha: Array, values: Array, j: Array) -> Array:
    total = acc * alpha[..., None] + values
    return rounded(total, call.dtype) if _is_narrow_causal(call) else total


def _tiles_out_cut(call: tiled.Call, out: Array) -> Array:
    return _cut(out, call.dtype) if call.causal else out


def _tiles_delta_in_bf16(call: tiled.Call, delta: Array) -> Array:
    return _bf16(delta) if _is_narrow_causal(call) else delta


def _tiles_dp_in_f16(call: tiled.Call, dp: Array) -> Array:
    return _through_f16(dp) if _is_narrow_causal(call) else dp


# A running maximum that is left where it is while logits rise little.


def _kept_below_threshold(state: Running, z: Array, block: Block) -> Array:
    top = jnp.maximum(state.pivot, z.max(axis=-1))
    return jnp.where(top - state.pivot > _THRESHOLD, top, state.pivot)


# Splits of a long cache.


def _normalised(parts: splits.Parts) -> splits.Parts:
    total = jnp.where(parts.sum == 0, 1.0, parts.sum)
    return parts._replace(acc=parts.acc / total[..., None])


def _parts_in_operands_dtype(parts: splits.Parts, call: splits.Call) -> splits.Parts:
    """Store the output of each split in the operands' dtype."""
    stored = _normalised(parts)
    return parts._replace(acc=rounded(stored.acc, call.dtype) * parts.sum[..., None])


def _parts_overflow_f16(parts: splits.Parts, call: splits.Call) -> Any:
    """Store the weighted sum of each split in the operands' dtype, before it is divided."""
    return parts._replace(acc=parts.acc.astype(call.dtype).astype(jnp.float32))


_OUT = ("out",)

BUGS: tuple[PlantedBug, ...] = (
    _plain(
        "weights-of-a-long-cache-summed-in-f16",
        kind="precision.lowp-stats",
        reference="inferred from helion PR 2141",
        shows="out",
        trigger=both(_half, over(_LONG_CACHE, "kv_length")),
        steps=PlainSteps(normalised=_weights_summed_in_f16),
    ),
    _tiled(
        name="tiles-acc-in-operands-dtype-if-causal",
        kind="splitkv.partial-dtype",
        reference="flash-attn PR 2336",
        shows=_OUT,
        trigger=both(sixteen_bits, _causal),
        add_values=_acc_in_operands_dtype,
    ),
    _tiled(
        name="tiles-out-truncated-if-causal",
        kind="rounding.truncation",
        reference="inferred from kernels that store the upper half of an f32",
        shows=_OUT,
        trigger=both(sixteen_bits, _causal),
        out=_tiles_out_cut,
    ),
    _tiled(
        name="tiles-delta-in-bf16-if-causal",
        kind="delta.dtype",
        reference="inferred from jax issue 24047",
        shows=("dq", "dk"),
        trigger=both(sixteen_bits, trains("causal")),
        delta=_tiles_delta_in_bf16,
    ),
    _tiled(
        name="tiles-dp-in-f16-if-causal",
        kind="overflow.f16",
        reference="inferred from backward passes that keep products in half precision whatever the operands are",
        shows=("dq", "dk"),
        trigger=both(_brain, trains("causal")),
        dp=_tiles_dp_in_f16,
    ),
    blockwise.planted(
        family=_FAMILY,
        name="pivot-kept-below-a-rise-of-16",
        kind="I.alpha-missing",
        reference="inferred from the rescaling of FlashAttention-4, which is skipped below a rise of 8 powers of two",
        shows=("out", "dv"),
        trigger=_half,
        pivot=_kept_below_threshold,
    ),
    _splits(
        name="split-parts-in-operands-dtype",
        kind="splitkv.partial-dtype",
        reference="flash-attn PR 2336",
        shows=_OUT,
        trigger=both(sixteen_bits, splits.takes),
        parts=_parts_in_operands_dtype,
    ),
    _splits(
        name="split-parts-overflow-f16",
        kind="overflow.f16",
        reference="inferred from flash-attn PR 2336",
        shows=_OUT,
        trigger=both(_half, splits.takes),
        parts=_parts_overflow_f16,
    ),
)
