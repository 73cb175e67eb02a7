"""Bugs of forward mode: kernels whose results and gradients are right, and whose tangents are not."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.triggers import Trigger, both, grouped, masked, trains
from tests.bank import PlantedBug
from tests.planted.planting.pushed import TangentSteps, build_kernel
from tests.planted.planting.wrapped import Arrays, Statics, implementation, planted

_KERNELS = "inferred from tangent kernels of flash attention (arXiv:2410.11081)"
_TRAINS = trains()

correct = functools.partial(
    implementation,
    "correct",
    build_kernel(TangentSteps(), transposes_itself=True),
    tangents=("out", "logsumexp", "gradients"),
)


def _plant(
    name: str,
    steps: TangentSteps,
    *,
    kind: str,
    reference: str = _KERNELS,
    shows: tuple[str, ...] = ("out", "out_saved"),
    trigger: Trigger = _TRAINS,
    transposes_itself: bool = False,
    tangents: tuple[str, ...] = ("out", "logsumexp"),
    **declared: Any,
) -> PlantedBug:
    kernel = build_kernel(steps, transposes_itself=transposes_itself)
    return planted(
        name,
        kernel,
        family="tangents",
        kind=kind,
        reference=reference,
        shows=shows,
        trigger=trigger,
        tangents=tangents,
        **declared,
    )


def _leave_out(operand: str) -> TangentSteps:
    """The tangent of one operand is taken for zero."""

    def move(tangents: Arrays, statics: Statics) -> Arrays:
        return {name: jnp.zeros_like(x) if name == operand else x for name, x in tangents.items()}

    return TangentSteps(move=move)


def _scale_twice(tangents: Arrays, statics: Statics) -> Arrays:
    scale = tangents["q"].shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
    return {name: x * scale if name in ("q", "k") else x for name, x in tangents.items()}


def _average_in_bf16(p: Any, v: Any) -> Any:
    """Sum the products of weights and values in blocks of 32 keys, each partial sum in bf16."""
    total: Any = 0.0
    for start in range(0, p.shape[-1], 32):
        part = jnp.einsum("bnts,bsnv->btnv", p[..., start : start + 32], v[:, start : start + 32])
        total = jax.lax.reduce_precision(total + part, 8, 7)
    return total


_ROWS = ("out", "out_saved", "logsumexp")

BUGS: tuple[PlantedBug, ...] = (
    _plant(
        "tangent-without-the-row-mean",
        TangentSteps(center=lambda p, dz, mean: p * dz),
        kind="tangents.softmax",
        reference="inferred from jax.nn.softmax, whose tangent subtracts the mean of the row",
    ),
    _plant(
        "tangent-of-v-left-out",
        _leave_out("v"),
        kind="tangents.operand",
    ),
    _plant(
        "tangent-of-the-bias-left-out",
        _leave_out("bias"),
        kind="tangents.operand",
        shows=_ROWS,
        trigger=trains("bias"),
    ),
    _plant(
        "tangent-of-sinks-left-out",
        _leave_out("sinks"),
        kind="tangents.operand",
        shows=_ROWS,
        trigger=trains("sinks"),
    ),
    _plant(
        "tangent-scaled-twice",
        TangentSteps(move=_scale_twice),
        kind="tangents.scale",
        reference="inferred from jax 916e53a8a2",
        shows=_ROWS,
    ),
    _plant(
        "tangent-of-masked-pairs",
        TangentSteps(see=jnp.ones_like),
        kind="tangents.mask",
        shows=_ROWS,
        trigger=both(_TRAINS, masked),
    ),
    _plant(
        "tangent-without-the-slope-of-the-cap",
        TangentSteps(slope=jnp.ones_like),
        kind="tangents.soft-cap",
        reference="inferred from flash-attn PR 1033",
        shows=_ROWS,
        trigger=trains("soft_cap"),
    ),
    _plant(
        "tangents-of-keys-tiled-over-heads",
        TangentSteps(repeat=lambda x, group: jnp.tile(x, (1, 1, group, 1))),
        kind="tangents.heads",
        reference="inferred from jax-js issue 180",
        shows=_ROWS,
        trigger=both(_TRAINS, grouped),
    ),
    _plant(
        "tangent-of-logsumexp-not-divided",
        TangentSteps(log=lambda mean, total: mean * total),
        kind="tangents.logsumexp",
        shows=("logsumexp",),
        transposes_itself=True,  # so JAX can differentiate it everywhere, and no check asks for this gradient
        differentiable_residuals=False,
    ),
    _plant(
        "tangent-of-logsumexp-is-zero",
        TangentSteps(log=lambda mean, total: jnp.zeros_like(mean)),
        kind="tangents.logsumexp",
        reference="inferred from kernels that return their residuals under stop_gradient",
        shows=("logsumexp",),
    ),
    _plant(
        "tangent-summed-in-bf16",
        TangentSteps(average=_average_in_bf16),
        kind="tangents.precision",
        reference="inferred from flash-attention PR 2336",
    ),
    _plant(
        "tangent-keeps-probabilities-constant",
        TangentSteps(keep=jax.lax.stop_gradient),
        kind="tangents.second",
        reference="inferred from rules that take saved probabilities for constants",
        shows=("dq", "dk", "dv", "dsinks", "dbias", "second"),
        transposes_itself=True,
        tangents=("out", "logsumexp", "gradients"),
    ),
)
