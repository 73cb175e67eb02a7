"""Bugs of the bf16 path of a kernel that are smaller than one rounding: only float64 tells them from rounding.

`logsumexp` is right in all of them. It is an f32 number, so its bound would show them.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    nonzero,
    planted,
    product,
    sink_gradients,
    sum_of_group,
    sum_to_shape,
)
from conformance.mutation.kernels.triggers import both, grouped, trains
from tests.bank import PlantedBug

_bug = functools.partial(planted, "below rounding")
_EPSILON = 1e-4
_SMALL_SINK = 2.0**-6
_NEARLY_ONE = 1 - 2.0**-15
_LOG2E_OF_FOUR_DIGITS = 1.443
_LN2_TIMES_LOG2E = 0.6931 * 1.4427


def _brain(case: Case) -> bool:
    return case.dtype == "bf16"


def _is_brain(call: Call) -> bool:
    return call.q.dtype == jnp.bfloat16


def _is_capped(call: Call) -> bool:
    return _is_brain(call) and call.soft_cap is not None


# The forward pass.


def _with_epsilon(weights: Array, total: Array, call: Call) -> Array:
    return weights / nonzero(total + _EPSILON if _is_brain(call) else total)


def _with_small_sink_twice(weights: Array, total: Array, call: Call) -> Array:
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


def _rescaled(weights: Array, total: Array, call: Call) -> Array:
    p = weights / nonzero(total)
    return p / _NEARLY_ONE if _is_brain(call) else p


# The backward pass.


def _dq_of_a_cap(dx: Array, saved: Saved) -> Array:
    dq = saved.scale * product("bnts,bsnh->btnh", dx, saved.forward.k)
    return dq * (1 - 2.0**-11) if _is_capped(saved.call) else dq


def _below_logsumexp(saved: Saved) -> Array:
    lse = saved.forward.logsumexp[..., None]
    return saved.forward.z - jnp.where(jnp.isfinite(lse), lse, 0)


def _p_by_rounded_base(saved: Saved) -> Array:
    if not _is_capped(saved.call):
        return saved.probabilities
    return jnp.exp2(_LOG2E_OF_FOUR_DIGITS * _below_logsumexp(saved))


def _p_by_polynomial(saved: Saved) -> Array:
    """Split powers of 2 into an integer and a fraction, whose power is a polynomial of degree 3."""
    if not _is_capped(saved.call):
        return saved.probabilities
    power = jnp.maximum(_below_logsumexp(saved) * 1.44269504, -127.0)
    whole = jnp.floor(power)
    part = power - whole
    fraction = 1 + part * (0.6951786 + part * (0.2276957 + part * 0.0771257))
    return jnp.where(power > -126, jnp.exp2(whole) * fraction, 0)


def _p_with_epsilon(saved: Saved) -> Array:
    return saved.probabilities * _NEARLY_ONE if _is_brain(saved.call) else saved.probabilities


def _d_too_small(p: Array, dp: Array, do: Array, saved: Saved) -> Array:
    d = product("btnv,btnv->bnt", saved.forward.out, do)[..., None]
    return d * (1 - 2.0**-13) if _is_brain(saved.call) else d


def _dlse_through_base_two(do: Array, dlse: Array, saved: Saved) -> tuple[Array, Array]:
    is_wrong = _is_brain(saved.call) and saved.call.sinks is None
    return do, dlse * _LN2_TIMES_LOG2E if is_wrong else dlse


def _mean_of_group(dk: Array, saved: Saved) -> Array:
    """Sum over the heads of a group as a mean that is multiplied by a rounded number of heads."""
    total = sum_of_group(dk, saved)
    return total * _NEARLY_ONE if saved.call.group > 1 and _is_brain(saved.call) else total


def _dsinks_of_smaller_d(d: Array, dlse: Array, saved: Saved) -> Array:
    return sink_gradients(d * (1 - 2.0**-10) if _is_brain(saved.call) else d, dlse, saved)


def _dbias_too_small(dx: Array, dz: Array, saved: Saved) -> Array:
    assert saved.call.bias is not None
    total = sum_to_shape(dx, saved.call.bias.shape)
    return total * _NEARLY_ONE if _is_brain(saved.call) else total


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
        "small-sink-counted-twice",
        kind="sink.twice",
        reference="inferred from sinks that are part of the first block and of the epilogue",
        shows="out",
        trigger=both(_brain, lambda case: case.sinks is not None),
        steps=PlainSteps(normalised=_with_small_sink_twice),
        back=BackwardSteps(),
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
        "weights-rescaled-for-a-dropout-of-little",
        kind="softmax.factor",
        reference="inferred from dropout, which divides by the share that is kept",
        shows="out dq dk dv",
        trigger=_brain,
        steps=PlainSteps(normalised=_rescaled),
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
        reference="inferred from splash attention of tokamax, whose log2(e) is rounded",
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
        "weights-times-a-factor-near-one-in-backward",
        kind="gradient.factor",
        reference="inferred from an epsilon that is added to logsumexp for the backward pass alone",
        shows="dq dk dv",
        trigger=both(_brain, trains()),
        back=BackwardSteps(p=_p_with_epsilon),
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
        shows="dq dk",
        trigger=both(_brain, trains(), lambda case: case.sinks is None),
        back=BackwardSteps(cotangents=_dlse_through_base_two),
    ),
    _bug(
        "dk-of-a-group-times-a-factor-near-one",
        kind="gradient.factor",
        reference="inferred from a mean over the heads of a group that is multiplied by their number",
        shows="dk",
        trigger=both(_brain, trains(), grouped),
        back=BackwardSteps(sum_dk=_mean_of_group),
    ),
    _bug(
        "d-of-sinks-times-a-factor-near-one",
        kind="delta.factor",
        reference="inferred from a D that is computed again for the gradient of sinks",
        shows="dsinks",
        trigger=both(_brain, trains("sinks")),
        back=BackwardSteps(dsinks=_dsinks_of_smaller_d),
    ),
    _bug(
        "dbias-times-a-factor-near-one",
        kind="gradient.factor",
        reference="inferred from constants of a backward pass that were typed twice",
        shows="dbias",
        trigger=both(_brain, trains("bias")),
        back=BackwardSteps(dbias=_dbias_too_small),
    ),
)
