"""The models of paged calls that take pages with scales: those of paged calls, with what pages hold as one more axis.

Only kernels that offer such pages are asked by these. So the grids of the others stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cases.case import Case
from cases.model import Axis, Model
from cases.quantized import PAGES_HOLD
from cases.serving.grids import MODELS

_CACHES = Axis("kv_cache", PAGES_HOLD, rare=True)


def _with_scales(model: Model) -> Model:
    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        return dataclasses.replace(model.assemble(levels, seed), kv_cache=levels["kv_cache"])

    return dataclasses.replace(model, axes=(*model.axes, _CACHES), assemble=assemble)


SCALED: tuple[Model, Model] = (_with_scales(MODELS["paged"][0]), _with_scales(MODELS["paged"][1]))
"""The models of features and of sizes."""
