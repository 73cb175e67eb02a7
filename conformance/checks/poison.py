"""Check `poison`: NaN, infinity or huge numbers in keys that no query may attend to change no result.

The poisoned problem is run by the compiled programs of the unpoisoned one, and must give the same expected results.
NaN in a key that queries attend to must stay visible in their rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from cases import quantization
from cases.moba_mask import depends_on_data
from cases.operand_registry import RESIDUALS
from conformance.check_api.judgement import Judgement, add_label, build_unsupported
from conformance.check_api.subject import Subject
from conformance.checks.forward import judge_further, judge_out, judge_residual
from conformance.checks.gradients import judge_gradients
from reports import records

# The huge number, by dtype. It is larger than any other value, but small enough that its dot product with ordinary
# values is finite in the dtype.
_HUGE = {"f32": 2.0**40, "bf16": 2.0**40, "f16": 2.0**8}


def check_poison(subject: Subject) -> Iterator[Judgement]:
    """Check that NaN, infinity or huge numbers in dead keys and values reach no output, residual or gradient.

    A dead key is one that no query may attend to. For stored operands, unused memory is poisoned too: pages that belong
    to no sequence, rows past the lengths, and padding.

    Check also that NaN in a key that queries attend to makes their rows NaN.
    """
    yield from _check_visible_nan(subject)
    if not subject.problem.dead_keys.any() and subject.problem.storage is None:
        return
    for name, value in (("nan", np.nan), ("inf", np.inf), ("huge", _HUGE[subject.case.dtype])):
        if subject.implementation.behind_mask == "finite" and not np.isfinite(value):
            yield build_unsupported(name, "keys and values behind the mask are declared to be finite")
        elif name == "huge" or name in subject.selection.poisons:
            yield from _check_poisoned(subject, name, value)


def _check_poisoned(subject: Subject, name: str, value: float) -> Iterator[Judgement]:
    """Check results and gradients with the poison `value`; `name` labels the observables."""
    clean = subject.problem
    problem = dataclasses.replace(
        clean,
        k=np.where(clean.unread_keys[..., None], _cast_poison(value, clean.k.dtype), clean.k),
        v=np.where(clean.dead_keys[..., None], _cast_poison(value, clean.v.dtype), clean.v),
    )
    if clean.kv_scales is not None:
        dead_keys = clean.unread_keys
        if clean.kv_zeros is not None:  # all keys of a page share theirs
            assert clean.storage is not None
            dead_keys = quantization.reduce_pages(dead_keys, clean.storage.held.shape[1])
        changed: dict[str, Any] = {}
        for field, pair in (("kv_scales", clean.kv_scales), ("kv_zeros", clean.kv_zeros)):
            if pair is not None:
                changed[field] = (
                    _poison_scales(pair[0], dead_keys, value),
                    _poison_scales(pair[1], clean.dead_keys, value),
                )
        problem = dataclasses.replace(problem, **changed)
    if clean.storage is not None:
        problem = dataclasses.replace(problem, storage=dataclasses.replace(clean.storage, stale=value))
    # If the implementation declares that an empty row is the mean of all values, the mean includes the poison. Such
    # rows are not judged, and gradients are not checked in a case with such rows.
    rows = subject.judged_residuals & ~(clean.empty_rows & (subject.implementation.empty_rows == "mean"))
    judged_out = rows.transpose(0, 2, 1)[..., None]
    judgements: list[Judgement] = []
    if subject.implementation.has_residual_call:
        result = subject.run_residuals(problem)
        judgements.append(judge_out(subject, result, judged=judged_out))
        judgements += [
            judge_residual(subject, residual, result, judged=rows)
            for residual in RESIDUALS
            if residual in subject.implementation.residuals
        ]
        judgements += judge_further(subject, clean, subject.expectation, result.further)
    else:
        judgements.append(judge_out(subject, subject.run_forward(problem), judged=judged_out))
    if subject.has_gradients and not (subject.implementation.empty_rows == "mean" and clean.empty_rows.any()):
        cotangent = subject.full_cotangent
        result = subject.run_gradients(problem, subject.cotangents[cotangent])
        judgements += list(judge_gradients(subject, result, subject.get_expected_gradients(cotangent)))
    yield from add_label(name, judgements)


def _check_visible_nan(subject: Subject) -> Iterator[Judgement]:
    """Check that every query that attends to a key and value of NaN gets an output that is not finite."""
    problem = subject.problem
    if not subject.selection.visible_nan or problem.kv_scales is not None or depends_on_data(problem.mask):
        return  # numbers of a quantised cache cannot be NaN, and queries that choose keys need not choose NaN
    seen = np.broadcast_to(problem.allowed, (*subject.judged_residuals.shape, problem.k.shape[1]))  # [B, N, T, S]
    key = _choose_visible_key(seen)
    k, v = problem.k.copy(), problem.v.copy()
    k[:, key], v[:, key] = np.nan, np.nan
    out = subject.run_forward(dataclasses.replace(problem, k=k, v=v)).values["out"]
    attends = seen[..., key]
    if problem.bias is not None:  # a key that the bias hides must hold finite numbers
        attends = attends & ~np.isneginf(np.broadcast_to(problem.bias, seen.shape)[..., key])
    if not attends.any():
        return  # no query attends to any key
    lost = int((np.moveaxis(attends, 1, 2) & np.isfinite(out.astype(np.float64)).any(axis=-1)).sum())
    reason = f"{lost} rows that attend to a key and value of NaN hold finite numbers" if lost else ""
    yield Judgement(observable="out.visible", verdict=records.FAIL if lost else records.PASS, reason=reason)


def _choose_visible_key(seen: np.ndarray) -> int:
    """Choose a key that some row of `seen [B, N, T, S]` attends to, if possible a row that sees no other key."""
    alone = seen & (seen.sum(axis=-1, keepdims=True) == 1)
    return int(np.argmax((alone if alone.any() else seen).any(axis=(0, 1, 2))))


def _cast_poison(value: float, dtype: np.dtype) -> np.ndarray:
    """Cast the poison to a dtype; quantised dtypes get their largest number for NaN or infinity that they lack."""
    largest = quantization.find_largest(dtype)
    poison = value if largest is None or (np.isnan(value) and dtype == quantization.STORED["fp8"]) else largest
    return np.asarray(poison).astype(dtype)


def _poison_scales(scales: np.ndarray, dead: np.ndarray, value: float) -> np.ndarray:
    """Poison the scales of the tokens marked in `dead [B, S, K]`, if each token has its own scale."""
    if scales.ndim == 4:
        dead = dead[..., None]
    elif scales.shape != dead.shape:
        return scales
    return np.where(dead, _cast_poison(value, scales.dtype), scales)
