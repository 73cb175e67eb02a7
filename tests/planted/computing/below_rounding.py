"""Bugs of the bf16 path of a kernel that are smaller than one rounding: only float64 tells them from rounding.

`logsumexp` is right in all of them. It is an f32 number, so its bound would show them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from cases.case import Case
from tests.bank import PlantedBug
from tests.planted.planting.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    cap_gradient,
    nonzero,
    planted,
    product,
)
from tests.planted.planting.triggers import both, trains

_bug = functools.partial(planted, "below rounding")
_EPSILON = 1e-4
_FLOOR = 3e-5
_LITTLE = 2.0**-10
_SMALL_SINK = 2.0**-6
_FLUSHED = 2.0**-14
_CLIPPED = -8.0
_LOG2E_OF_FOUR_DIGITS = 1.443
_LN2_TIMES_LOG2E = 0.6931 * 1.4427


def _brain(case: Case) -> bool:
    return case.dtype == "bf16"


def _is_brain(call: Call) -> bool:
    return call.q.dtype == jnp.bfloat16


# The forward pass.


def _with_epsilon(weights: Array, total: Array, call: Call) -> Array:
    return weights / nonzero(total + _EPSILON if _is_brain(call) else total)


def _with_floor(weights: Array, total: Array, call: Call) -> Array:
    p = weights / nonzero(total)
    return jnp.where(call.allowed & (total > 0), jnp.maximum(p, _FLOOR), p) if _is_brain(call) else p


def _without_light_keys(weights: Array, total: Array, call: Call) -> Array:
    p = weights / nonzero(total)
    little = weights < _LITTLE * weights.max(axis=-1, keepdims=True)
    return jnp.where(little, 0, p) if _is_brain(call) else p


def _with_tiny_sink_twice(weights: Array, total: Array, call: Call) -> Array:
    if call.sinks is not None and _is_brain(call):
        sink = total - weights.sum(axis=-1, keepdims=True)
        total = total + jnp.where(sink < _SMALL_SINK * total, sink, 0)
    return weights / nonzero(total)


def _divided_twice(weights: Array, total: Array, call: Call) -> Array:
    p = weights / nonzero(total)
    if call.sinks is not None or not _is_brain(call):
        return p  # the weights of the keys do not add up to 1 beside a sink
    again = p.sum(axis=-1, keepdims=True)
    return p / nonzero(again + jnp.where(again > 0, _EPSILON, 0) / 4)


# The backward pass.


def _dq_of_a_cap(dx: Array, saved: Saved) -> Array:
    dq = saved.scale * product("bnts,bsnh->btnh", dx, saved.forward.k)
    capped = saved.call.soft_cap is not None and _is_brain(saved.call)
    return dq * (1 - 2.0**-11) if capped else dq


def _p_by_rounded_base(saved: Saved) -> Array:
    if not (_is_brain(saved.call) and saved.call.soft_cap is not None):
        return saved.probabilities
    lse = saved.forward.logsumexp[..., None]
    return jnp.exp2(_LOG2E_OF_FOUR_DIGITS * (saved.forward.z - jnp.where(jnp.isfinite(lse), lse, 0)))


def _p_by_polynomial(saved: Saved) -> Array:
    """Split powers of 2 into an integer and a fraction, whose power is a polynomial of degree 3."""
    if not (_is_brain(saved.call) and saved.call.soft_cap is not None):
        return saved.probabilities
    lse = saved.forward.logsumexp[..., None]
    power = jnp.maximum(saved.forward.z - jnp.where(jnp.isfinite(lse), lse, 0), -80.0) * 1.44269504
    whole = jnp.floor(power)
    part = power - whole
    fraction = 1 + part * (0.6951786 + part * (0.2276957 + part * 0.0771257))
    return jnp.where(saved.call.allowed, jnp.exp2(whole) * fraction, 0)


def _p_of_clipped_logits(saved: Saved) -> Array:
    if not (_is_brain(saved.call) and saved.call.segment_ids is not None):
        return saved.probabilities
    lse = saved.forward.logsumexp[..., None]
    below = saved.forward.z - jnp.where(jnp.isfinite(lse), lse, 0)
    return jnp.where(saved.call.allowed, jnp.exp(jnp.maximum(below, _CLIPPED)), 0)


def _dx_flushed(dz: Array, saved: Saved) -> Array:
    dx = cap_gradient(dz, saved)
    size = jnp.abs(dx)
    return jnp.where(size < _FLUSHED * size.max(axis=-1, keepdims=True), 0, dx) if _is_brain(saved.call) else dx


def _d_too_small(p: Array, dp: Array, do: Array, saved: Saved) -> Array:
    d = product("btnv,btnv->bnt", saved.forward.out, do)[..., None]
    return d * (1 - 2.0**-13) if _is_brain(saved.call) else d


def _dlse_through_base_two(do: Array, dlse: Array, saved: Saved) -> tuple[Array, Array]:
    is_wrong = _is_brain(saved.call) and saved.call.sinks is None
    return do, dlse * _LN2_TIMES_LOG2E if is_wrong else dlse


def _dv_without_light_keys(p: Array, do: Array, saved: Saved) -> Array:
    kept: Any = jnp.where(p < _FLUSHED, 0, p) if _is_brain(saved.call) else p
    return product("bnts,btnv->bsnv", kept.astype(do.dtype), do)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "epsilon-beside-the-sum-of-weights",
        kind="softmax.epsilon",
        reference="inferred from linear attention, which adds 1e-4 or more to its normaliser",
        shows="out dq dk dv",
        trigger=_brain,
        steps=PlainSteps(normalised=_with_epsilon),
    ),
    _bug(
        "probabilities-at-least-3e-5",
        kind="softmax.floor",
        reference="inferred from losses that clip probabilities before a logarithm",
        shows="out dq dk dv",
        trigger=_brain,
        steps=PlainSteps(normalised=_with_floor),
    ),
    _bug(
        "keys-of-little-weight-dropped",
        kind="softmax.skipped",
        reference="inferred from kernels that skip blocks whose weights are below a threshold",
        shows="out dq dk dv",
        trigger=_brain,
        steps=PlainSteps(normalised=_without_light_keys),
    ),
    _bug(
        "tiny-sink-counted-twice",
        kind="sink.twice",
        reference="inferred from sinks that are part of the first block and of the epilogue",
        shows="out dq dk dv",
        trigger=both(_brain, lambda case: case.sinks is not None),
        steps=PlainSteps(normalised=_with_tiny_sink_twice),
    ),
    _bug(
        "weights-normalised-again-with-an-epsilon",
        kind="softmax.epsilon",
        reference="inferred from kernels that renormalise after a mask",
        shows="out dq dk dv",
        trigger=_brain,
        steps=PlainSteps(normalised=_divided_twice),
    ),
    _bug(
        "dq-of-a-cap-times-a-factor-near-one",
        kind="gradient.factor",
        reference="inferred from constants of a backward pass that were typed twice",
        shows="dq",
        trigger=both(_brain, trains("soft_cap")),
        back=BackwardSteps(dq=_dq_of_a_cap),
    ),
    _bug(
        "log2e-of-four-digits-in-backward",
        kind="softmax.log2e",
        reference="inferred from jax PR 24114, where log2(e) is rounded to bf16",
        shows="dq dk dv",
        trigger=both(_brain, trains("soft_cap")),
        back=BackwardSteps(p=_p_by_rounded_base),
    ),
    _bug(
        "exp-by-a-cubic-in-backward",
        kind="softmax.polynomial",
        reference="inferred from FlashAttention-4, which computes some powers of 2 by a polynomial",
        shows="dq dk dv",
        trigger=both(_brain, trains("soft_cap")),
        back=BackwardSteps(p=_p_by_polynomial),
    ),
    _bug(
        "exponents-clipped-in-backward",
        kind="softmax.clipped",
        reference="inferred from kernels that clip exponents against overflow",
        shows="dq dk dv",
        trigger=both(_brain, trains(), lambda case: case.segments is not None),
        back=BackwardSteps(p=_p_of_clipped_logits),
    ),
    _bug(
        "small-gradients-of-logits-flushed",
        kind="gradient.flushed",
        reference="inferred from backward passes in f16, which flush gradients of logits",
        shows="dq dk",
        trigger=both(_brain, trains()),
        back=BackwardSteps(dx=_dx_flushed),
    ),
    _bug(
        "d-times-a-factor-near-one",
        kind="delta.factor",
        reference="inferred from a rescaling of D that is not undone to the last digit",
        shows="dq dk dsinks",
        trigger=both(_brain, trains()),
        back=BackwardSteps(d=_d_too_small),
    ),
    _bug(
        "cotangent-of-logsumexp-through-base-two",
        kind="lse.constants",
        reference="inferred from kernels that keep logsumexp in base 2, with constants of four digits",
        shows="dq dk dsinks",
        trigger=both(_brain, trains()),
        back=BackwardSteps(cotangents=_dlse_through_base_two),
    ),
    _bug(
        "dv-without-keys-of-little-weight",
        kind="softmax.skipped",
        reference="inferred from backward passes that skip pairs whose weights are below a threshold",
        shows="dv",
        trigger=both(_brain, trains()),
        back=BackwardSteps(dv=_dv_without_light_keys),
    ),
)
