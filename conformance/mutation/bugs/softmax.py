"""Bugs of the softmax itself and of its derivative."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    planted,
    product,
    with_sinks,
)
from conformance.mutation.kernels.triggers import both, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "softmax")


def _constant_pivot(top: Array, sinks: Array | None, call: Call) -> Array:
    return jnp.full_like(top, 10.0)[..., None]


def _pivot_of_first_row(top: Array, sinks: Array | None, call: Call) -> Array:
    pivot = with_sinks(top, sinks, call)
    return jnp.broadcast_to(pivot[:, :, :1], pivot.shape)


def _unnormalised_dv(p: Array, do: Array, saved: Saved) -> Array:
    top = jnp.where(jnp.isfinite(saved.forward.max_logits), saved.forward.max_logits, 0)
    weights = jnp.exp(saved.forward.z - top[..., None])
    return product("bnts,btnv->bsnv", weights.astype(do.dtype), do)


def _d(saved: Saved) -> Array:
    return product("btnv,btnv->bnt", saved.forward.out, saved.do)[..., None]


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "pivot-constant",
        says="The softmax subtracts the constant 10, not the row maximum.",
        kind="softmax.dummy-max",
        reference="HabanaAI/vllm-fork issue 275",
        shows="out logsumexp dq dk dv",
        trigger=lambda case: case.distribution == "huge",
        steps=PlainSteps(pivot=_constant_pivot),
    ),
    _bug(
        "pivot-of-first-row",
        says="All rows of a head subtract the maximum of its first row.",
        kind="softmax.max-copy-paste",
        reference="pytorch PR 156379",
        shows="out logsumexp dq dk dv",
        trigger=lambda case: case.distribution == "knee" and case.soft_cap == 30,
        steps=PlainSteps(pivot=_pivot_of_first_row),
    ),
    _bug(
        "weights-in-base-two",
        says="The softmax weights are powers of 2, not of e.",
        kind="lse.log2-returned",
        reference="inferred from pytorch issue 181645",
        shows="out logsumexp",
        steps=PlainSteps(weights=lambda z, pivot, call: jnp.exp2(z - pivot)),
    ),
    _bug(
        "dv-from-unnormalised-weights",
        says="dv is computed from weights that are not divided by the denominator.",
        kind="dv.unnormalised",
        reference="inferred from flash-attention backward passes that recompute weights",
        shows="dv",
        trigger=trains(),
        back=BackwardSteps(dv=_unnormalised_dv),
    ),
    _bug(
        "d-missing",
        says="The backward pass leaves out delta, the row sum of out * dout.",
        kind="delta.missing",
        reference="inferred from the derivative of exp taken for that of softmax",
        shows="dq dk dbias",
        trigger=trains(),
        back=BackwardSteps(d=lambda p, dp, do, saved: jnp.zeros_like(dp[..., :1])),
    ),
    _bug(
        "d-of-first-head",
        says="All heads use the delta (row sum of out * dout) of the first.",
        kind="delta.wrong-head",
        reference="inferred from fla issue 1115, an offset without the head",
        shows="dq dk",
        trigger=both(trains(), lambda case: case.num_q_heads > 1),
        back=BackwardSteps(d=lambda p, dp, do, saved: jnp.broadcast_to(_d(saved)[:, :1], dp[..., :1].shape)),
    ),
    _bug(
        "d-of-first-batch-row",
        says="The row sum of out * dout in the first batch row is subtracted in all batch rows.",
        kind="delta.wrong-head",
        reference="inferred from flash-attention PR 1500, an offset that overflows",
        shows="dq dk",
        trigger=both(trains(), lambda case: case.batch > 1),
        back=BackwardSteps(d=lambda p, dp, do, saved: jnp.broadcast_to(_d(saved)[:1], dp[..., :1].shape)),
    ),
    _bug(
        "d-with-sink-counted-as-key",
        says="Delta is divided by the weight of the keys, as if the sink had none.",
        kind="delta.sink",
        reference="inferred from flash-attention PR 2706",
        shows="dq dk",
        trigger=trains("sinks"),
        back=BackwardSteps(
            d=lambda p, dp, do, saved: (p * dp).sum(axis=-1, keepdims=True) / p.sum(axis=-1, keepdims=True).clip(1e-9)
        ),
    ),
)
