"""The models of paged calls that take pages with scales: those of paged calls, with what pages hold as one more axis.

Only kernels that offer such pages are asked by these. So the grids of the others stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.quantization import PAGED_CACHES, PAGES_HOLD, WHOLE_CACHES
from cases.storage_forms.stored_grids import MODELS


def _add_scales(model: Model, caches: tuple[str | None, ...]) -> Model:
    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        return dataclasses.replace(model.assemble(levels, seed), kv_cache=levels["kv_cache"])

    return dataclasses.replace(model, axes=(*model.axes, Axis("kv_cache", caches, rare=True)), assemble=assemble)


def _build_models(*caches: str | None) -> tuple[Model, Model]:
    features, sizes = MODELS["paged"]
    return _add_scales(features, caches), _add_scales(sizes, caches)


SCALED = _build_models(None, *PAGED_CACHES)
"""The models of features and of sizes, for scales of each token and head."""
WHOLE = _build_models(None, *WHOLE_CACHES)
"""Likewise, for one scale of all keys and one of all values."""
SCALED_BOTH = _build_models(*PAGES_HOLD)
"""Likewise, for kernels that take both."""
