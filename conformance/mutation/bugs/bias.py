"""Bugs of the additive bias and its gradient."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    capped,
    planted,
    stop,
    sum_to_shape,
)
from conformance.mutation.kernels.rounding import rounded
from conformance.mutation.kernels.triggers import both, grouped, has, masked, one_query, sixteen_bits, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "bias")
_FORWARD = "out logsumexp max_logits"
_bias = has("bias")
_trained = trains("bias")


def _of_kv_heads(bias: Array, call: Call) -> Array:
    return bias if bias.shape[1] == 1 else bias[:, jnp.arange(bias.shape[1]) // call.group]


def _transposed(bias: Array, call: Call) -> Array:
    return bias.swapaxes(2, 3) if bias.shape[2] == bias.shape[3] else bias


def _missing_in_tail(bias: Array, call: Call) -> Array:
    return jnp.where(jnp.arange(bias.shape[3]) < call.kv_length // 64 * 64, bias, 0)


def _broadcast_axes(saved: Saved) -> tuple[int, ...]:
    assert saved.call.bias is not None
    return tuple(axis for axis, n in enumerate(saved.call.bias.shape) if n == 1)


def _mean(dx: Array, dz: Array, saved: Saved) -> Array:
    return dx.mean(axis=_broadcast_axes(saved), keepdims=True)


def _running_sum_in_operands_dtype(dx: Array, dz: Array, saved: Saved) -> Array:
    assert saved.call.bias is not None
    for axis in _broadcast_axes(saved):
        total = jnp.zeros_like(jnp.take(dx, jnp.array([0]), axis=axis))
        for part in jnp.split(dx, dx.shape[axis], axis=axis):
            total = rounded(total + part, saved.call.q.dtype)
        dx = total
    return dx


def _behind_mask_too(dx: Array, dz: Array, saved: Saved) -> Array:
    """Logits recomputed for `dbias` without the mask."""
    assert saved.call.bias is not None
    p = saved.probabilities_of(capped(saved.forward.x, saved.call))
    return sum_to_shape(jnp.where(saved.call.allowed, dx, p), saved.call.bias.shape)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "bias-ignored-in-decode",
        says="The bias is ignored if there is a single query.",
        kind="bias.dropped-by-path",
        reference="inferred from mlx issue 3452, where the path for one query drops an operand",
        shows=_FORWARD,
        trigger=both(_bias, one_query),
        steps=PlainSteps(bias=lambda bias, call: bias * (call.q_length > 1)),
    ),
    _bug(
        "bias-subtracted",
        says="The bias is subtracted from the logits, not added.",
        kind="alibi.sign",
        reference="attention-gym PR 86",
        shows=_FORWARD,
        trigger=_bias,
        steps=PlainSteps(biased=lambda x, bias, call: x - bias),
    ),
    _bug(
        "bias-before-scale",
        says="The bias is added before the scale, so that it is scaled too.",
        kind="bias.order-of-ops",
        reference="HKUSTDial PR 199",
        shows=_FORWARD,
        trigger=_bias,
        steps=PlainSteps(
            bias=lambda bias, call: bias * (call.q.shape[-1] ** -0.5 if call.scale is None else call.scale)
        ),
    ),
    _bug(
        "bias-read-in-operands-dtype",
        says="The bias is rounded to the dtype of the queries before it is added.",
        kind="dbias.fp32-nan",
        reference="jax issue 32242",
        shows=_FORWARD,
        trigger=both(_bias, sixteen_bits, lambda case: case.bias != "biaskey"),
        steps=PlainSteps(bias=lambda bias, call: bias.astype(call.q.dtype).astype(jnp.float32)),
    ),
    _bug(
        "bias-missing-in-tail",
        says="Keys past the last whole block of 64 get no bias.",
        kind="alibi.boundary",
        reference="flash-attention PR 540",
        shows=_FORWARD,
        trigger=both(_bias, lambda case: case.kv_length % 64 != 0),
        steps=PlainSteps(bias=_missing_in_tail),
    ),
    _bug(
        "bias-of-kv-head",
        says="Each query head takes the bias at the index of its key/value head.",
        kind="perhead-bias-gqa",
        reference="inferred from torch-xpu-ops issue 5090",
        shows=_FORWARD,
        trigger=both(_bias, grouped, lambda case: case.bias != "biaskey"),
        steps=PlainSteps(bias=_of_kv_heads),
    ),
    _bug(
        "bias-of-first-batch-row",
        says="All batch rows use the bias of the first.",
        kind="bias.per-batch",
        reference="inferred from masks shared across the batch",
        shows=_FORWARD,
        trigger=both(_bias, lambda case: case.batch > 1 and case.bias != "biashead"),
        steps=PlainSteps(bias=lambda bias, call: bias[:1]),
    ),
    _bug(
        "bias-transposed",
        says="A square bias is read with queries and keys swapped.",
        kind="bias.transposed",
        reference="inferred from attention-gym PR 86, q - k for k - q",
        shows=_FORWARD,
        trigger=both(_bias, lambda case: case.q_length == case.kv_length and case.bias != "biaskey"),
        steps=PlainSteps(bias=_transposed),
    ),
    _bug(
        "bias-without-gradient",
        says="The bias is a constant for the backward pass, so that dbias is zero.",
        kind="dbias.none",
        reference="jax issue 27184",
        shows="dbias",
        trigger=_trained,
        steps=PlainSteps(bias=lambda bias, call: stop(bias)),
    ),
    _bug(
        "dbias-averaged-over-broadcast-axes",
        says="dbias is the mean over the axes along which the bias is broadcast, not the sum.",
        kind="dbias.broadcast",
        reference="inferred from HKUSTDial PR 199",
        shows="dbias",
        trigger=both(_trained, lambda case: case.bias != "bias"),
        back=BackwardSteps(dbias=_mean),
    ),
    _bug(
        "dbias-summed-in-operands-dtype",
        says="The sum of dbias over broadcast axes is rounded to the input dtype after every term.",
        kind="dbias.dtype",
        reference="tokamax commits 021710e, 04ed9b7",
        shows="dbias",
        trigger=both(_trained, sixteen_bits, lambda case: case.bias != "bias"),
        back=BackwardSteps(dbias=_running_sum_in_operands_dtype),
    ),
    _bug(
        "dbias-scaled",
        says="dbias is multiplied by the softmax scale.",
        kind="dbias.scale",
        reference="inferred from flash-attention PR 2657",
        shows="dbias",
        trigger=_trained,
        back=BackwardSteps(dbias=lambda dx, dz, saved: saved.scale * sum_to_shape(dx, saved.call.bias.shape)),
    ),
    _bug(
        "dbias-behind-the-mask",
        says="Pairs behind the mask enter dbias with the probabilities they would have without it.",
        kind="bwd.mask-s-vs-p",
        reference="inferred from tokamax commits ddce6dc, 4f95d5f",
        shows="dbias",
        trigger=both(_trained, masked),
        back=BackwardSteps(dbias=_behind_mask_too),
    ),
)
