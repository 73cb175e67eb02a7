"""Bugs of precision that only one part of the cases shows: under a mask, in decode, over blocks, in groups, in f16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.masks import Causal, Window, list_conjuncts
from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    default_scale,
    denominator,
    planted,
    product,
)
from conformance.mutation.kernels.rounding import rounded
from conformance.mutation.kernels.triggers import both, grouped, has, one_query, sixteen_bits, trains
from tests.bank import PlantedBug

_bug = functools.partial(planted, "precision")
_FORWARD = "out logsumexp"
BLOCK = 64


def over(lengths: int, of: str) -> Callable[[Case], bool]:
    return lambda case: getattr(case, of) > lengths


def masked_by(kind: type, call: Call) -> bool:
    return any(isinstance(part, kind) for part in list_conjuncts(call.mask))


def to_operands(x: Array, call: Call) -> Array:
    return rounded(x, call.q.dtype)


def _bf16(x: Array) -> Array:
    return rounded(x, jnp.bfloat16)


def towards_zero(x: Array, dtype: Any) -> Array:
    """`x` in `dtype`, by leaving bits out."""
    near = rounded(x, dtype)
    if dtype == jnp.float32:
        return near
    bits = 23 - jnp.finfo(dtype).nmant
    whole = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    cut = jax.lax.bitcast_convert_type((whole >> bits) << bits, jnp.float32)
    return jnp.where(jnp.abs(near) > jnp.abs(x), cut, near)


# The forward pass.


def accumulated(subscripts: str, axis: int, p: Array, v: Array, call: Call) -> Array:
    """A sum of blocks that is rounded to the operands' dtype at each; `axis` of `p` and axis 1 of `v` are summed."""
    total: Any = 0.0
    for start in range(0, v.shape[1], BLOCK):
        part = [slice(None)] * p.ndim
        part[axis] = slice(start, start + BLOCK)
        total = to_operands(total + product(subscripts, p[tuple(part)], v[:, start : start + BLOCK]), call)
    return jnp.asarray(total)


def _values_if(condition: Callable[[Call], bool]) -> PlainSteps:
    def values(p: Array, v: Array, call: Call) -> Array:
        if condition(call):
            return accumulated("bnts,bsnv->btnv", 3, p, v, call)
        return product("bnts,bsnv->btnv", p, v)

    return PlainSteps(values=values)


def _heads_added_in_pairs(p: Array, v: Array, call: Call) -> Array:
    """In groups the second product leaves its unit in the operands' dtype, halves of the keys apart."""
    if call.group == 1:
        return product("bnts,bsnv->btnv", p, v)
    half = v.shape[1] // 2
    parts = [product("bnts,bsnv->btnv", p[..., s], v[:, s]) for s in (slice(0, half), slice(half, None))]
    return to_operands(parts[0], call) + to_operands(parts[1], call)


def _total_by_blocks(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    """Over more than four blocks the denominator is kept in the operands' dtype between them."""
    if call.kv_length <= 4 * BLOCK:
        return denominator(weights, sinks, pivot, call)
    total = denominator(weights[..., :BLOCK], sinks, pivot, call)
    for start in range(BLOCK, call.kv_length, BLOCK):
        total = to_operands(total, call) + weights[..., start : start + BLOCK].sum(axis=-1, keepdims=True)
    return total


def _total_of_rounded_if_causal(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    summed = to_operands(weights, call) if masked_by(Causal, call) else weights
    return denominator(summed, sinks, pivot, call)


def _sinks_rounded_in_decode(sinks: Array, call: Call) -> Array:
    return to_operands(sinks, call) if call.q_length == 1 else sinks


def _scale_rounded(scale: float | None, call: Call) -> Any:
    """The scale is an array of the operands' dtype."""
    return rounded(jnp.float32(default_scale(scale, call)), call.q.dtype)


def _logits_rounded_under_window(products: Array, scale: float, call: Call) -> Array:
    x = scale * products
    return to_operands(x, call) if masked_by(Window, call) else x


def _out_cut_under_window(out: Array, call: Call) -> Array:
    if not masked_by(Window, call):
        return out.astype(call.q.dtype)
    return towards_zero(out, call.q.dtype).astype(call.q.dtype)


def _logsumexp_rounded_in_groups(logsumexp: Array, max_logits: Array, call: Call) -> tuple[Array, Array]:
    return (to_operands(logsumexp, call) if call.group > 1 else logsumexp), max_logits


def _maxima_rounded_if_causal(logsumexp: Array, max_logits: Array, call: Call) -> tuple[Array, Array]:
    return logsumexp, (to_operands(max_logits, call) if masked_by(Causal, call) else max_logits)


def _logsumexp_in_bf16(logsumexp: Array, max_logits: Array, call: Call) -> tuple[Array, Array]:
    return _bf16(logsumexp), max_logits


def default_product(subscripts: str, x: Array, y: Array) -> Array:
    """A product at the platform's usual precision: exact on a CPU, bf16 or tf32 on chips."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "out-accumulated-in-operands-dtype-if-causal",
        kind="accumulate.lowp",
        reference="inferred from helion PR 2141, where each step of a sum passes through bf16",
        shows="out",
        trigger=both(sixteen_bits, has("causal"), over(BLOCK, "kv_length")),
        steps=_values_if(lambda call: masked_by(Causal, call)),
    ),
    _bug(
        "out-accumulated-in-operands-dtype-in-decode",
        kind="accumulate.lowp",
        reference="inferred from flash-attention PR 2336, where parts are stored in bf16",
        shows="out",
        trigger=both(sixteen_bits, one_query, over(BLOCK, "kv_length")),
        steps=_values_if(lambda call: call.q_length == 1),
    ),
    _bug(
        "out-of-groups-from-rounded-halves",
        kind="splitkv.partial-dtype",
        reference="inferred from flash-attention PR 2336; ring-flash-attention issue 42",
        shows="out",
        trigger=both(sixteen_bits, grouped),
        steps=PlainSteps(values=_heads_added_in_pairs),
    ),
    _bug(
        "denominator-rounded-between-blocks",
        kind="accumulate.lowp",
        reference="inferred from helion PR 2141",
        shows=_FORWARD,
        trigger=both(sixteen_bits, over(4 * BLOCK, "kv_length")),
        steps=PlainSteps(total=_total_by_blocks),
    ),
    _bug(
        "denominator-sums-rounded-weights-if-causal",
        kind="p.lowp-before-sum",
        reference="inferred from flash-attention issue 2322",
        shows=_FORWARD,
        trigger=both(sixteen_bits, has("causal")),
        steps=PlainSteps(total=_total_of_rounded_if_causal),
    ),
    _bug(
        "sinks-rounded-to-operands-in-decode",
        kind="sink.dtype",
        reference="inferred from mlx issue 3452: one query has a kernel of its own",
        shows=_FORWARD,
        trigger=both(sixteen_bits, one_query, has("sinks")),
        steps=PlainSteps(sinks=_sinks_rounded_in_decode),
    ),
    _bug(
        "scale-rounded-to-operands",
        kind="scale.dtype",
        reference="inferred from flax, which divides queries by a root cast to their dtype",
        shows=_FORWARD,
        trigger=sixteen_bits,
        steps=PlainSteps(scale=_scale_rounded),
    ),
    _bug(
        "logits-rounded-under-a-window",
        kind="precision.lowp-stats",
        reference="inferred from MaxText commit fbef426f5",
        shows=_FORWARD,
        trigger=both(sixteen_bits, has("window")),
        steps=PlainSteps(scaled=_logits_rounded_under_window),
    ),
    _bug(
        "out-truncated-under-a-window",
        kind="rounding.truncation",
        reference="inferred from kernels that store the upper half of an f32",
        shows="out",
        trigger=both(sixteen_bits, has("window")),
        steps=PlainSteps(out=_out_cut_under_window),
    ),
    _bug(
        "logsumexp-rounded-in-groups",
        kind="residual.dtype",
        reference="inferred from jax commit 178e622ef1, where logsumexp has the dtype of the keys",
        shows="logsumexp",
        trigger=both(sixteen_bits, grouped),
        steps=PlainSteps(residuals=_logsumexp_rounded_in_groups),
    ),
    _bug(
        "max-logits-rounded-if-causal",
        kind="residual.dtype",
        reference="inferred from jax commit 178e622ef1",
        shows="max_logits",
        trigger=both(sixteen_bits, has("causal")),
        steps=PlainSteps(residuals=_maxima_rounded_if_causal),
    ),
    _bug(
        "logsumexp-in-bf16-where-differentiated",
        kind="residual.dtype",
        reference="inferred from attention-gym issue 37: what a call returns depends on who differentiates",
        shows="logsumexp dq dk",
        trigger=trains(),
        steps=PlainSteps(residuals=_logsumexp_in_bf16),
        back=BackwardSteps(),
        alone=PlainSteps(),
    ),
)
