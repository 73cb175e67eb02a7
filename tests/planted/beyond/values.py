"""Bugs that only some values show: hard-coded thresholds, infinities, zeros, ties, tiny and huge ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from cases.case import Case
from cases.masks import Mask
from conformance.mutation.kernels import blockwise
from conformance.mutation.kernels.block_triggers import several_blocks
from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    capped,
    denominator,
    planted,
    product,
    stop,
    with_sinks,
)
from conformance.mutation.kernels.rounding import rounded
from conformance.mutation.kernels.steps import Block, Running, logits
from conformance.mutation.kernels.triggers import both, empty_rows, has, masked, trains
from tests.bank import PlantedBug

_bug = functools.partial(planted, "values")
_FORWARD = "out logsumexp"
_GRADIENTS = "dq dk dv"
_F16_MAX = 65504.0
# The largest change of the maximum that is left for later, in natural logarithms.
_LAZY = 100.0
_SHORT_LOG2E = 1.44269
_TINY = 1e-8


def _single(case: Case) -> bool:
    return case.dtype == "f32"


# Cotangents.


def _do_through_f16(do: Array, dlse: Array, saved: Saved) -> tuple[Array, Array]:
    """Of bf16, f16 keeps every significant bit, but not the range."""
    return (rounded(do, jnp.float16) if do.dtype == jnp.bfloat16 else do), dlse


def _do_clipped(do: Array, dlse: Array, saved: Saved) -> tuple[Array, Array]:
    return jnp.clip(do, -_F16_MAX, _F16_MAX), dlse


def _do_through_amax(do: Array, dlse: Array, saved: Saved) -> tuple[Array, Array]:
    """Divided by the largest, guarded against zero by a constant, and multiplied by it again."""
    top = jnp.abs(do).max().astype(jnp.float32)
    return (do.astype(jnp.float32) / (top + 1e-6) * top).astype(do.dtype), dlse


def _tiny_rows_skipped(do: Array, dlse: Array, saved: Saved) -> tuple[Array, Array]:
    there = jnp.abs(do).max(axis=-1, keepdims=True) > _TINY
    return jnp.where(there, do, 0), dlse


def _dlse_if_large(do: Array, dlse: Array, saved: Saved) -> tuple[Array, Array]:
    return do, jnp.where(jnp.abs(dlse).max() > 1e-6, dlse, 0)


# Rows of zeros.


def _mask_without_zero_keys(mask: Mask, call: Call) -> Array:
    """Keys of nothing but zeros are taken for padding."""
    there = (call.k != 0).any(axis=(2, 3))[:, None, None]
    return jnp.asarray(mask.dense(call.q_length, call.kv_length)) & there


def _tied_weights(z: Array, pivot: Array, call: Call) -> Array:
    """Only the first of the largest logits counts where several are equal."""
    weights = jnp.exp(z - pivot)
    top = z.max(axis=-1, keepdims=True)
    first = jnp.argmax(z, axis=-1)[..., None] == jnp.arange(z.shape[-1])
    every = (z == top).all(axis=-1, keepdims=True)  # a row of equal logits
    return jnp.where(every & ~first, 0, weights)


# Infinities and large numbers in biases, sinks and logits.


def _guarded_by_mask(top: Array, sinks: Array | None, call: Call) -> Array:
    """Rows without keys are known by the mask; a bias may hide keys as well."""
    pivot = top if sinks is None else jnp.maximum(top, sinks[:, None])
    return stop(jnp.where(call.empty & ~jnp.isfinite(pivot), 0, pivot))[..., None]


def _floored(top: Array, sinks: Array | None, call: Call) -> Array:
    """The maximum is kept above -1e4, so that it is finite: rows that lie lower lose all their weights."""
    return jnp.maximum(with_sinks(top, sinks, call), -1e4)


def _unguarded_with_sinks(top: Array, sinks: Array | None, call: Call) -> Array:
    """A sink keeps the maximum finite, unless it is infinite itself."""
    return with_sinks(top, sinks, call) if sinks is None else stop(jnp.maximum(top, sinks[:, None]))[..., None]


def _finite_bias(bias: Array, call: Call) -> Array:
    return jnp.where(jnp.isfinite(bias), bias, jnp.finfo(jnp.float32).min / 2)


def _clamped_bias(bias: Array, call: Call) -> Array:
    return jnp.maximum(bias, -1e4)


def _far_sinks_left_out(sinks: Array, call: Call) -> Array:
    """Sinks are bounded, so that their exponential needs no maximum."""
    return jnp.clip(sinks, -80, 80)


def _sink_by_what_is_left(d: Array, dlse: Array, saved: Saved) -> Array:
    """The sink's weight is what the keys leave of one: nothing but rounding if it is small."""
    left = 1 - saved.probabilities.sum(axis=-1)
    return left * (dlse - d)[..., 0]


def _logits_cut(x: Array, call: Call) -> Array:
    return jnp.clip(capped(x, call), -_F16_MAX, _F16_MAX)


def _lazy_pivot(state: Running, z: Array, block: Block) -> Array:
    """The maximum is only raised once it is far too low: the weights overflow before that."""
    top = z.max(axis=-1)
    rises = (top - jnp.where(jnp.isfinite(state.pivot), state.pivot, -jnp.inf)) > _LAZY
    first = ~jnp.isfinite(state.pivot)
    return jnp.where(first | rises, jnp.maximum(state.pivot, top), state.pivot)


def _pivot_over_hidden(state: Running, z: Array, block: Block) -> Array:
    """The maximum runs over masked logits too: as good, unless they are far larger."""
    every, _ = logits(product("bkgth,bksh->bkgts", block.q, block.k), block)
    live = jnp.isfinite(z).any(axis=-1)
    return jnp.maximum(state.pivot, jnp.where(live, every.max(axis=-1), -jnp.inf))


def _small_total(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    return denominator(weights, sinks, pivot, call) + jnp.where(call.empty[..., None], 0, 1e-6)


# Soft caps and scales.


def _cap(change: Callable[[float], float | None]) -> PlainSteps:
    def cap(x: Array, call: Call) -> Array:
        if call.soft_cap is None:
            return x
        used = change(call.soft_cap)
        return x if used is None else used * jnp.tanh(x / used)

    return PlainSteps(cap=cap)


def _tanh_by_exponentials(x: Array, call: Call) -> Array:
    """A quotient of sums of exponentials: no number where they overflow."""
    if call.soft_cap is None:
        return x
    y = x / call.soft_cap
    up, down = jnp.exp(y), jnp.exp(-y)
    # Near zero the difference would cancel, and the usual tanh is taken.
    return call.soft_cap * jnp.where(jnp.abs(y) < 1, jnp.tanh(y), (up - down) / (up + down))


def _backward_base_two(saved: Saved) -> Array:
    lse = saved.forward.logsumexp[..., None]
    return jnp.exp2((saved.forward.z - jnp.where(jnp.isfinite(lse), lse, 0)) * _SHORT_LOG2E)


def _capped_at(low: float, high: float) -> Callable[[Case], bool]:
    return lambda case: case.soft_cap is not None and low < case.soft_cap < high


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "cotangent-through-f16-in-bf16-kernels",
        kind="cotangent.range",
        reference="inferred from transformers' clamps to the range of f16, which bf16 exceeds",
        shows=_GRADIENTS,
        trigger=both(trains(), lambda case: case.dtype == "bf16"),
        back=BackwardSteps(cotangents=_do_through_f16),
    ),
    _bug(
        "cotangent-clipped-to-the-range-of-f16",
        kind="cotangent.range",
        reference="inferred from transformers' clamps to the range of f16",
        shows=_GRADIENTS,
        trigger=trains(),
        back=BackwardSteps(cotangents=_do_clipped),
    ),
    _bug(
        "cotangent-over-its-largest-plus-epsilon",
        kind="cotangent.epsilon",
        reference="inferred from delayed scaling in TransformerEngine: amax and its guard",
        shows=_GRADIENTS,
        trigger=trains(),
        back=BackwardSteps(cotangents=_do_through_amax),
    ),
    _bug(
        "cotangent-rows-near-zero-skipped",
        kind="cotangent.threshold",
        reference="inferred from backward kernels that skip rows without a loss",
        shows=_GRADIENTS,
        trigger=trains(),
        back=BackwardSteps(cotangents=_tiny_rows_skipped),
    ),
    _bug(
        "cotangent-of-logsumexp-near-zero-dropped",
        kind="cotangent.threshold",
        reference="inferred from flash-attention PR 2706: the term of dlse taken as rare",
        shows="dq dk",
        trigger=trains(),
        back=BackwardSteps(cotangents=_dlse_if_large),
    ),
    _bug(
        "keys-of-zeros-are-padding",
        kind="values.zero-rows",
        reference="inferred from Keras' masking, where a vector of zeros is no time step",
        shows=_FORWARD,
        steps=PlainSteps(mask=_mask_without_zero_keys),
    ),
    _bug(
        "equal-logits-count-once",
        kind="values.ties",
        reference="inferred from MoBA issue 23, where ties are taken by value in one route and by index in another",
        shows=_FORWARD,
        steps=PlainSteps(weights=_tied_weights),
    ),
    _bug(
        "pivot-of-rows-hidden-by-bias-unguarded",
        kind="nan.m-minus-m",
        reference="vllm issue 48364; pytorch issue 110213, where the bias hides a row",
        shows=_FORWARD,
        trigger=has("bias"),
        steps=PlainSteps(pivot=_guarded_by_mask),
    ),
    _bug(
        "pivot-not-below-minus-ten-thousand",
        kind="sentinel.finite-inf",
        reference="burn PR 4697, whose softmax floors the maximum at -1e4; flashinfer issue 4267",
        shows=_FORWARD,
        steps=PlainSteps(pivot=_floored),
    ),
    _bug(
        "bias-infinities-made-finite",
        kind="bias.infinite",
        reference="inferred from transformers issue 38690 and PRs that put finfo.min for -inf",
        shows=_FORWARD,
        trigger=has("bias"),
        steps=PlainSteps(bias=_finite_bias),
    ),
    _bug(
        "bias-not-below-minus-ten-thousand",
        kind="bias.clamp",
        reference="inferred from onnxruntime's mask_filter_value of -10000",
        shows=_FORWARD,
        trigger=has("bias"),
        steps=PlainSteps(bias=_clamped_bias),
    ),
    _bug(
        "pivot-unguarded-where-there-are-sinks",
        kind="sink.infinite",
        reference="inferred from flash-attention PR 2706: a row without keys has its sink",
        shows=_FORWARD,
        trigger=both(has("sinks"), empty_rows),
        steps=PlainSteps(pivot=_unguarded_with_sinks),
    ),
    _bug(
        "sinks-kept-within-eighty",
        kind="sink.clamp",
        reference="inferred from fla PR 831, where a large sink overflows",
        shows=_FORWARD,
        trigger=has("sinks"),
        steps=PlainSteps(sinks=_far_sinks_left_out),
    ),
    _bug(
        "dsinks-by-what-keys-leave-of-one",
        kind="sink.cancellation",
        reference="inferred from flash-attention PR 2706",
        shows="dsinks",
        trigger=trains("sinks"),
        back=BackwardSteps(dsinks=_sink_by_what_is_left),
    ),
    _bug(
        "logits-clamped-to-the-range-of-f16",
        kind="logits.clamp",
        reference="inferred from transformers' clamps to the range of f16, and flashinfer issue 4267",
        shows=_FORWARD,
        steps=PlainSteps(cap=_logits_cut),
    ),
    blockwise.planted(
        name="pivot-raised-too-late",
        family="values",
        kind="online.lazy-rescale",
        reference="inferred from the lazy rescaling of FlashAttention-4, with its threshold too large",
        shows=("out", "logsumexp"),
        trigger=several_blocks,
        pivot=_lazy_pivot,
    ),
    blockwise.planted(
        name="pivot-over-hidden-logits",
        family="values",
        kind="online.masked-max",
        reference="inferred from pytorch PR 156379: a maximum that is only an upper bound",
        shows=("out", "logsumexp"),
        trigger=masked,
        pivot=_pivot_over_hidden,
    ),
    _bug(
        "denominator-with-a-small-constant",
        kind="denominator.epsilon",
        reference="inferred from burn PR 4697, whose softmax guards its sum by 1e-6",
        shows=_FORWARD,
        trigger=_single,
        steps=PlainSteps(total=_small_total),
    ),
    _bug(
        "soft-cap-above-a-hundred-is-none",
        kind="cap.threshold",
        reference="inferred from sglang issue 33915: a cap that one backend does not know",
        shows=_FORWARD,
        trigger=_capped_at(100, float("inf")),
        steps=_cap(lambda cap: None if cap > 100 else cap),
    ),
    _bug(
        "soft-cap-below-one-is-none",
        kind="cap.threshold",
        reference="inferred from Megatron-LM PR 6590, where 0 stands for no cap",
        shows=_FORWARD,
        trigger=_capped_at(0, 1),
        steps=_cap(lambda cap: None if cap < 1 else cap),
    ),
    _bug(
        "soft-cap-cast-to-an-integer",
        kind="cap.cast",
        reference="inferred from sgl-kernel-xpu PR 491, where the cap passes through another interface",
        shows=_FORWARD,
        trigger=lambda case: case.soft_cap is not None and case.soft_cap % 1 != 0,
        steps=_cap(lambda cap: float(max(1, int(cap)))),
    ),
    _bug(
        "tanh-by-exponentials-that-overflow",
        kind="cap.overflow",
        reference="vllm issue 56578, PR 56579; tokenspeed PR 183",
        shows=_FORWARD,
        trigger=has("soft_cap"),
        steps=PlainSteps(cap=_tanh_by_exponentials),
    ),
    _bug(
        "probabilities-recomputed-with-six-digits-of-log2e",
        kind="exp2.constant",
        reference="inferred from kernels that write the constant in digits",
        shows=_GRADIENTS,
        trigger=both(trains(), _single),
        back=BackwardSteps(p=_backward_base_two),
    ),
)
