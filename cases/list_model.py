"""Define the models of attention by lists of keys: in every case each query has a list (`cases.masks.Listed`).

The models are those of calls without lists, with one more axis: the number of entries of a list. A kernel that takes
lists, but need not get them, has these cases beside its others. A kernel that needs lists has no others. A kernel that
also takes a window beside its lists has a few further cases.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from cases import operand_model, size_model
from cases.case import Case
from cases.covering_model import Axis, Lengths, Model
from cases.storage_forms.form_cases import load_form_cases
from cases.storage_forms.form_registry import FORMS

# One key and more keys than most cases have are among the numbers, and numbers that no block divides.
_ENTRIES = Axis("listed", (16, 1, 5, 64, 300), combined=16)
# In long caches, masks and segment ids leave no key of a short list, and then the case tells nothing.
_SIZE_ENTRIES = Axis("listed", (64, 16, 300), combined=64)


def add_list(case: Case, count: int) -> Case:
    """Return the case with a list of `count` entries for each query, beside its mask."""
    return dataclasses.replace(case, mask=f"{'' if case.mask == 'full' else f'{case.mask}_and_'}listed-k{count}")


@functools.cache
def build_list_models(form: str | None, *, writes_pages: bool = False) -> tuple[Model, Model]:
    """Build the models of features and of sizes for a storage form; for dense operands if it is None."""
    if form is None:
        return _add_lists(_add_head_masks(operand_model.build_plain_model())), _add_lists(
            size_model.MODEL, _SIZE_ENTRIES
        )
    features, sizes = _find_models(form, writes_pages)
    return _add_lists(features), _add_lists(sizes, _SIZE_ENTRIES)


def _find_models(form: str, writes_pages: bool) -> tuple[Model, Model]:
    cases = load_form_cases(form)
    return cases.models if cases.find_models is None else cases.find_models(writes_pages, frozenset())


def _add_head_masks(model: Model) -> Model:
    """Add masks that differ by head, while all heads have the same lists."""
    axes = (
        dataclasses.replace(axis, levels=(*axis.levels, "densehead")) if axis.name == "mask" else axis
        for axis in model.axes
    )
    return dataclasses.replace(model, axes=tuple(axes))


def _add_lists(model: Model, entries: Axis = _ENTRIES) -> Model:
    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        return add_list(model.assemble(levels, seed), levels["listed"])

    return dataclasses.replace(model, axes=(*model.axes, entries), assemble=assemble, strongest=min(3, model.strongest))


# (entries of a list, left side of the window): lists shorter and longer than the window, lists of nearly all keys.
_UNIONS = Axis("listed", ((16, 7), (5, 0), (64, 20), (300, 33)))
_UNION_LENGTHS = (Lengths("train", 100, 100), Lengths("prefill", 24, 130), Lengths("decode", 1, 200))
_UNION_LEVELS: Mapping[str, tuple[Any, ...]] = {
    "mask": ("causal", "full", "lengths"),
    "heads": ((1, 2, 2), (2, 4, 2), (3, 2, 1)),
    "depths": ((64, 64), (16, 48)),
    "distribution": ("normal", "large", "dominant"),
    "window": ("inf", None),
    "page": (16, 5),
    "soft_cap": (None, 30.0),
    "sinks": (False, True),
    "first": (0, 1),
    "shared": (False, True),
    "segments": (None, "seg"),
}


@functools.cache
def build_union_model(form: str | None, *, writes_pages: bool = False) -> Model:
    """Build the model of lists with a window beside them, for a storage form; for dense operands if it is None."""
    base = operand_model.build_plain_model() if form is None else _find_models(form, writes_pages)[0]
    axes = []
    for axis in base.axes:
        levels = _UNION_LENGTHS if form is None and axis.name == "lengths" else axis.levels
        if axis.name in _UNION_LEVELS:
            levels = tuple(level for level in levels if level in _UNION_LEVELS[axis.name]) or levels[:2]
        elif axis.name not in ("lengths", "dtype"):
            levels = levels[: 4 if axis.name == "shape" else 1]
        combined = axis.combined if axis.combined in levels else None
        axes.append(dataclasses.replace(axis, levels=levels, combined=combined))

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        return add_union(base.assemble(levels, seed), *levels["listed"])

    return dataclasses.replace(base, axes=(*axes, _UNIONS), assemble=assemble, strongest=2)


def add_union(case: Case, count: int, left: int) -> Case:
    """Return the case with lists of `count` entries, and a window of `left` keys and the query's own beside them.

    The window ends at the query's own position: the queries are the last tokens. The mask of the case holds for both.
    Of a stored case, only whether it is causal is kept.
    """
    ends = "-".join(map(str, case.kv_lengths))
    if case.stored is not None and not FORMS[case.stored.form].is_dense:
        causal = "causal_and_" if case.mask.startswith("own") else ""
        return dataclasses.replace(case, mask=f"{causal}listed-k{count}_or_window-l{left}-r0_at-{ends}")
    ahead = case.kv_length - case.q_length
    offset = f"-o{ahead}" if ahead else ""
    causal = f"causal{offset}_and_" if case.mask.startswith("causal") else ""
    lengths = f"lengths-{ends}_and_" if "lengths" in case.mask else ""
    mask = f"{causal}{lengths}listed-k{count}_or_{lengths}window-l{left}-r0{offset}"
    return dataclasses.replace(case, mask=mask)
