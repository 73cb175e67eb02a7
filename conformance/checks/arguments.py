"""Check `arguments`: each optional argument changes `out` by the amount that the oracle computes.

A kernel that accepts an argument and ignores it fails. The check compares two calls, with the argument and without.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from cases.lightning_mask import Lightning
from cases.masks import Full, Listed, Mask, OwnWindow, iter_leaves, list_conjuncts
from cases.moba_mask import Moba
from cases.operand_registry import REMOVABLE
from cases.operand_values import Problem
from cases.storage_forms.form_registry import FORMS
from cases.storage_forms.mask_sides import find_first_tokens
from cases.storage_forms.storage_layout import Storage
from conformance.check_api.judgement import Judgement
from conformance.check_api.subject import Subject
from conformance.truth.rounding_bounds import Bounded, compute_expectation


def check_arguments(subject: Subject) -> Iterator[Judgement]:
    """Check that leaving out an argument changes `out` by the amount that the oracle computes."""
    for name, without in iter_without_argument(subject.problem):
        arithmetic = subject.implementation.arithmetic
        expected_without = compute_expectation(without, arithmetic, empty_rows=subject.empty_rows).forward["out"]
        expected = subject.expectation.forward["out"]
        effect = Bounded(expected.value - expected_without.value, expected.bound + expected_without.bound)
        out = subject.forward.values["out"].astype(np.float64)
        out_without = subject.executor.forward(without).values["out"].astype(np.float64)
        judged = subject.judged_out & ~without.empty_rows.transpose(0, 2, 1)[..., None]
        yield subject.judge("out", out - out_without, effect, judged, label=f"effect_of_{name}")


def iter_without_argument(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield each argument that can be left out, with the problem without it."""
    if isinstance(problem.mask, Moba):
        all_chunks = dataclasses.replace(problem.mask, topk=problem.mask.count_chunks(problem.k.shape[1]))
        yield "gates", dataclasses.replace(problem, mask=all_chunks)
    elif isinstance(problem.mask, Lightning):
        all_keys = dataclasses.replace(problem.mask, topk=problem.k.shape[1])
        yield "top_k", dataclasses.replace(problem, mask=all_keys)
    elif problem.storage is not None:
        if (widened := _widen_window(problem, problem.storage)).mask != problem.mask:
            yield "window", widened
    elif problem.mask != Full():
        yield "mask", dataclasses.replace(problem, mask=_allow_all(problem))
    for operand in REMOVABLE:
        if getattr(problem, operand.name) is not None:
            yield operand.name, problem.without(operand.name)


def _allow_all(problem: Problem) -> Mask:
    """Return a mask that allows all pairs: lists of all keys, if the problem has lists, for calls that need some."""
    if not any(isinstance(part, Listed) for part in iter_leaves(problem.mask)):
        return Full()
    batch, q_length, kv_length = *problem.q.shape[:2], problem.k.shape[1]
    return Listed(np.tile(np.arange(kv_length, dtype=np.int32), (batch, q_length, 1)))


def _widen_window(problem: Problem, storage: Storage) -> Problem:
    """Return the problem with another window, to see that the window matters.

    The window becomes unlimited on the left. If the storage form holds only some of the last keys (a ring buffer), it
    becomes the widest window whose keys are all stored. A window that is the widest already becomes the narrowest. The
    lengths of sequences do not change.
    """
    widest = FORMS[storage.form].find_widest_left(storage, find_first_tokens(problem.mask))

    def widen(window: OwnWindow) -> OwnWindow:
        return dataclasses.replace(window, left=0 if widest is not None and window.left == widest else widest)

    parts = [widen(x) if isinstance(x, OwnWindow) else x for x in list_conjuncts(problem.mask)]
    return dataclasses.replace(problem, mask=functools.reduce(lambda one, other: one & other, parts))
