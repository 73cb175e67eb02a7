"""Values behind the mask never matter: NaN, infinity and huge numbers in keys that no query may attend to.

Neither the compiled functions nor what is expected of them differ from the clean case: nothing may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from cases import quantization
from cases.operand_registry import RESIDUALS
from conformance.check_api.judgement import Judgement, add_label, build_unsupported
from conformance.check_api.subject import Subject
from conformance.checks.forward import judge_out, judge_residual
from conformance.checks.gradients import judge_gradients

# Large enough to swamp anything, small enough that a dot product of it with ordinary values stays finite in the dtype.
_HUGE = {"f32": 2.0**40, "bf16": 2.0**40, "f16": 2.0**8}


def check_poison(subject: Subject) -> Iterator[Judgement]:
    """Poison in dead keys and values reaches neither outputs nor residuals nor gradients.

    Where operands are stored, it also lies where nobody's are: in pages without an owner, behind lengths, in padding.
    """
    if not subject.problem.dead_keys.any() and subject.problem.storage is None:
        return
    for name, value in (("nan", np.nan), ("inf", np.inf), ("huge", _HUGE[subject.case.dtype])):
        if subject.implementation.behind_mask == "finite" and not np.isfinite(value):
            yield build_unsupported(name, "keys and values behind the mask are declared to be finite")
        elif name == "huge" or name in subject.rotation.poisons:
            yield from _check_poisoned(subject, name, value)


def _check_poisoned(subject: Subject, name: str, value: float) -> Iterator[Judgement]:
    clean = subject.problem
    problem = dataclasses.replace(
        clean,
        k=np.where(clean.unread_keys[..., None], _cast_poison(value, clean.k.dtype), clean.k),
        v=np.where(clean.dead_keys[..., None], _cast_poison(value, clean.v.dtype), clean.v),
    )
    if clean.kv_scales is not None:
        k_scales, v_scales = clean.kv_scales
        k_scales = _poison_scales(k_scales, clean.unread_keys, value)
        problem = dataclasses.replace(problem, kv_scales=(k_scales, _poison_scales(v_scales, clean.dead_keys, value)))
    if clean.storage is not None:
        problem = dataclasses.replace(problem, storage=dataclasses.replace(clean.storage, stale=value))
    # Rows that average all of v see the poison rightly; they are left out, and get no cotangent.
    rows = subject.judged_residuals & ~(clean.empty_rows & (subject.implementation.empty_rows == "mean"))
    judged_out = rows.transpose(0, 2, 1)[..., None]
    found: list[Judgement] = []
    if subject.implementation.residuals:
        result = subject.run_residuals(problem)
        found.append(judge_out(subject, result, judged=judged_out))
        found += [
            judge_residual(subject, residual, result, judged=rows)
            for residual in RESIDUALS
            if residual in subject.implementation.residuals
        ]
    else:
        found.append(judge_out(subject, subject.executor.forward(problem), judged=judged_out))
    if subject.has_gradients and not (subject.implementation.empty_rows == "mean" and clean.empty_rows.any()):
        cotangent = subject.full_cotangent
        result = subject.run_gradients(problem, subject.cotangents[cotangent])
        found += list(judge_gradients(subject, result, subject.expected_gradients(cotangent)))
    yield from add_label(name, found)


def _cast_poison(value: float, dtype: np.dtype) -> np.ndarray:
    """The value, or the largest number where a dtype of caches has none that is as bad."""
    top = quantization.find_largest(dtype)
    bad = value if top is None or (np.isnan(value) and dtype == quantization.STORED["fp8"]) else top
    return np.asarray(bad).astype(dtype)


def _poison_scales(scales: np.ndarray, dead: np.ndarray, value: float) -> np.ndarray:
    """Scales `[B or 1, S or 1, K]` with the value for `dead [B, S, K]` tokens, those that have scales of their own."""
    return np.where(dead, np.float32(value), scales) if scales.shape == dead.shape else scales
