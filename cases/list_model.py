"""Define the models of attention by lists of keys: in every case each query has a list (`cases.masks.Listed`).

The models are those of calls without lists, with one more axis: the number of entries of a list. A kernel that takes
lists, but need not get them, has these cases beside its others. A kernel that needs lists has no others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from cases import operand_model, size_model
from cases.case import Case
from cases.covering_model import Axis, Model
from cases.storage_forms.form_cases import load_form_cases

# One key and more keys than most cases have are among the numbers, and numbers that no block divides.
_ENTRIES = Axis("listed", (16, 1, 5, 64, 300), combined=16)


def add_list(case: Case, count: int) -> Case:
    """Return the case with a list of `count` entries for each query, beside its mask."""
    return dataclasses.replace(case, mask=f"{'' if case.mask == 'full' else f'{case.mask}_and_'}listed-k{count}")


@functools.cache
def build_list_models(form: str | None) -> tuple[Model, Model]:
    """Build the models of features and of sizes for a storage form; for dense operands if it is None."""
    if form is None:
        return _add_lists(operand_model.build_plain_model()), _add_lists(size_model.MODEL)
    features, sizes = load_form_cases(form).models
    return _add_lists(features), _add_lists(sizes)


def _add_lists(model: Model) -> Model:
    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        return add_list(model.assemble(levels, seed), levels["listed"])

    return dataclasses.replace(
        model, axes=(*model.axes, _ENTRIES), assemble=assemble, strongest=min(3, model.strongest)
    )
