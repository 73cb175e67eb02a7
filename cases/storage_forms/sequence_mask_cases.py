"""Build the covering-array models of masks and operands over stored sequences, beside causal masks and windows.

The forms `packed` and `paged` have such a model for kernels that offer a feature of `FEATURES`. Other kernels are
judged on the models of their form alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cases.case import Case
from cases.covering_model import Axis, Model
from cases.score_functions import CAPPING, LEVELS
from cases.storage_forms.sequence_shapes import Shape, build_model, fix_lengths, is_compatible

FEATURES = frozenset({"placed", "tree", "later_pages", "packed_segments", "alibi_slopes", "score_mod", "logit_scale"})
"""The opt-in features of masks and operands over stored sequences."""
# "causal" and "full" are as in other models. Chunks are longer and shorter than a page. Spans begin inside a page and
# end inside the next. `tree` stands for a tree of all queries of each sequence. `varying` differs by sequence and by
# head.
_MASKS = (
    "causal",
    "chunked-7",
    "window-l9-r3",
    "window-linf-r2",
    "full",
    "causal_or_spans-2-11-13-30",
    "dense-d40",
    "dense-d60_and_causal",
    "tree",
    "varying-l4",
)
FAR = Shape("far", fix_lengths((3, 700), (2, 9)))
"""Sequences of which one has positions that bf16 cannot all represent, nor 8 bits."""
_CROSS = "cross"
"""The name of the shape with sequences of fewer keys than queries, where queries have no positions."""
_AXES = (
    Axis("mask", _MASKS, combined="causal"),
    Axis("heads", ((4, 2), (2, 2), (6, 1)), combined=(4, 2)),
    Axis("depths", ((64, 64), (16, 48)), combined=(16, 48)),
    Axis("distribution", ("normal", "large", "dominant", "cancel"), cheap=True),
    Axis("dtype", ("f32", "bf16", "f16")),
    Axis("soft_cap", (None, 30.0), combined=30.0),
    Axis("sinks", (False, True), combined=True),
    Axis("alibi", (False, True), combined=True, rare=True),
    Axis("score", (None, *LEVELS), combined="score-rows", rare=True),
    Axis("logit_scale", (False, True), combined=True, rare=True),
)


def build_mask_model(form: str, shapes: tuple[Shape, ...], *axes: Axis, cross: Shape) -> Model:
    """Build the model of a storage form.

    Args:
      shapes: the sequences of its calls.
      axes: further axes: sizes of pages, segment ids.
      cross: sequences of a call without a mask, in which a sequence has fewer keys than queries.
    """
    cross = dataclasses.replace(cross, name=_CROSS)
    base = build_model(form, Axis("shape", (*shapes, cross)), Axis("window", ("inf",)), *_AXES[1:7], *axes)

    def assemble(levels: Mapping[str, Any], seed: int) -> Case:
        plain = base.assemble({"window": None, "scale": None, **levels}, seed)
        fields = {name: levels[name] for name in ("alibi", "score", "logit_scale", "segments") if name in levels}
        return dataclasses.replace(plain, mask=_write_mask(levels["mask"], plain), **fields)

    return Model((Axis("shape", (*shapes, cross)), *_AXES, *axes), _are_compatible, assemble, strongest=3)


def _write_mask(mask: str, case: Case) -> str:
    """Write the spec of `mask` at the ends of the sequences of `case`, which has lengths as its mask."""
    ends = "-".join(map(str, case.kv_lengths))
    if mask == "full":
        return case.mask
    if mask == "causal":
        return f"own-linf-{ends}"
    tree = "-".join(map(str, case.q_lengths))
    return f"{f'tree-{tree}' if mask == 'tree' else mask}_at-{ends}"


def _are_compatible(levels: Mapping[str, Any]) -> bool:
    """Return whether levels can stand in one case: without positions, there is no mask and no operand of positions."""
    crosses = "shape" in levels and levels["shape"].name == _CROSS
    if crosses and (levels.get("mask", "full") != "full" or levels.get("alibi") or levels.get("score")):
        return False
    if levels.get("score") in CAPPING and levels.get("soft_cap") is not None:
        return False
    return is_compatible(levels)
