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


@functools.cache
def build_operand_model(operand: OptionalOperand) -> Model:
    """Build the model whose cases all have `operand`."""
    return _build_model({operand.field: operand.levels[:1]})


@functools.cache
def build_capture_model() -> Model:
    """Build the model whose cases all have a score function that captures an array."""
    return _build_model({"score": CAPTURED, "alibi": (False,)})


def _build_model(fields: Mapping[str, tuple[Any, ...]]) -> Model:
    """Build the model whose cases have the given levels in these fields."""
    axes = [Axis("lengths", _LENGTHS)]
    for axis in feature_model.AXES[1:]:
        levels = _LEVELS.get(axis.name, axis.levels)
        if axis.name not in ("kv_cache", "own_window", *fields):
            combined = axis.combined if axis.combined in levels else None
            axes.append(dataclasses.replace(axis, levels=levels, combined=combined))
    axes += [Axis(field, levels) for field, levels in fields.items() if len(levels) > 1]
    missing = {axis.name: axis.levels[0] for axis in feature_model.AXES}
    fixed = {field: levels[0] for field, levels in fields.items() if len(levels) == 1}

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        return dataclasses.replace(feature_model.assemble({**missing, **levels}, seed), **fixed)

    return Model(tuple(axes), feature_model.are_compatible, assemble, strongest=3)
