"""Define the model of one operand: every case has the operand, combined with masks, sizes and other operands.

An operand with cases of its own (`OptionalOperand.has_own_cases`) is no axis of `cases.feature_model`: a new axis would
change the covering array, and so every case of the kernels that support the operand.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from cases import feature_model
from cases.case import Case
from cases.covering_model import Axis, Lengths, Model
from cases.operand import OptionalOperand
from cases.score_functions import CAPTURED

# Fewer levels than in the model of all features: whole and partial blocks, both orders of lengths, one query.
_LENGTHS = (
    Lengths("train", 128, 128),
    Lengths("train", 48, 200),
    Lengths("prefill", 64, 320),
    Lengths("decode", 1, 200),
    Lengths("train", 321, 321),
)
_LEVELS: dict[str, tuple[Any, ...]] = {
    "mask": ("full", "causal", "window", "lengths", "dense"),
    "distribution": ("normal", "large", "cancel", "dominant"),
    "heads": ((1, 2, 2), (2, 4, 2), (1, 6, 2), (3, 2, 1)),
    "depths": ((64, 64), (16, 48)),
    "bias": (None, "biashead", "biaskey"),
    "segments": (None, "seg"),
    "soft_cap": (None, 2.0, 30.0),
}


# Gradients of captured arrays are told from wrong ones best in f32, so each function has all masks and heads there.
_CAPTURES = (*((name, "f32") for name in CAPTURED), *zip(CAPTURED, ("bf16", "f16", "bf16"), strict=True))


@functools.cache
def build_operand_model(operand: OptionalOperand) -> Model:
    """Build the model whose cases all have `operand`."""
    fixed = {operand.field: operand.levels[0]}
    axes = (Axis("lengths", _LENGTHS), *_list_axes(operand.field))
    return Model(axes, feature_model.are_compatible, functools.partial(_assemble, fixed), strongest=3)


@functools.cache
def build_plain_model() -> Model:
    """Build the model of all optional operands and the usual masks at few lengths, without an operand in every case."""
    axes = (Axis("lengths", _LENGTHS), *_list_axes())
    return Model(axes, feature_model.are_compatible, functools.partial(_assemble, {}), strongest=3)


@functools.cache
def build_capture_model() -> Model:
    """Build the model whose cases all have a score function that captures an array, and gradients."""

    def expand(levels: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the level of the axis `score` by the score function and the dtype that it stands for."""
        score, dtype = levels.get("score", (None, "f32"))
        return {**levels, "score": score, "dtype": dtype}

    lengths = tuple(level for level in _LENGTHS if level.phase == "train")
    axes = (Axis("lengths", lengths), Axis("score", _CAPTURES), *_list_axes("score", "alibi", "dtype"))
    return Model(
        axes,
        lambda levels: feature_model.are_compatible(expand(levels)),
        lambda levels, seed: _assemble({}, expand(levels), seed),
        strongest=3,
    )


def _list_axes(*left_out: str) -> tuple[Axis, ...]:
    """List the axes of `cases.feature_model` other than lengths, caches and those left out, with fewer levels."""
    axes = []
    for axis in feature_model.AXES[1:]:
        levels = _LEVELS.get(axis.name, axis.levels)
        if axis.name not in ("kv_cache", "own_window", *left_out):
            combined = axis.combined if axis.combined in levels else None
            axes.append(dataclasses.replace(axis, levels=levels, combined=combined))
    return tuple(axes)


def _assemble(fixed: Mapping[str, Any], levels: Mapping[str, Any], seed: int) -> Case:
    """Build the case of these levels; axes that are not there have their first level."""
    missing = {axis.name: axis.levels[0] for axis in feature_model.AXES}
    return dataclasses.replace(feature_model.assemble({**missing, **levels}, seed), **fixed)
