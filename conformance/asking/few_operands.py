"""Calls with one operand or none, as models make them: a kernel may have a path for just that.

Nearly all cases of the grids have several operands at once, and those that have one are in f32, or have as many
key/value heads as query heads. A path that is taken where nothing else is given is not taken there. The calls are those
of models in training, on whole and on packed sequences, under a window with sinks or with a soft cap, with a bias for
each pair, and in serving. Beside them there are fewer queries than keys, and more, that are counted from the first key;
as many batch rows as heads, where a mask or a bias differs between rows; and one query under a window.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from cases.case import Case
from cases.operands import REMOVABLE

CALLS: dict[str, dict[str, Any]] = {
    "plain": {"mask": "causal", "batch": 1, "q_length": 160, "kv_length": 160},  # three blocks of 64
    "documents": {"mask": "causal", "segments": "seg"},
    "sunk": {"mask": "window-l9-r0", "sinks": True},
    "capped": {"mask": "window-l9-r0", "soft_cap": 30.0},
    "biased": {"mask": "full", "bias": "biaspair"},
    "first": {"phase": "prefill", "mask": "causal", "q_length": 16},
    "tall": {"phase": "prefill", "mask": "causal", "bias": "biasbatch", "batch": 4, "q_length": 100},
    "served": {"phase": "decode", "mask": "lengths-1-40-7-31", "sinks": True, "batch": 4, "q_length": 1},
    "lone": {"phase": "decode", "mask": "window-l3-r2", "q_length": 1},
}
_USUAL: dict[str, Any] = {
    **{operand.field: operand.absent for operand in REMOVABLE},
    "batch": 2,
    "q_length": 40,
    "kv_length": 40,
    "head_dim": 64,
    "v_head_dim": 64,
}
# Of each call the first form that is supported: heads in groups before heads by themselves, 16 bits before 32, short
# before whole blocks.
_HEADS = (4, 2), (4, 4)
_DTYPES = ("bf16", "f16", "f32")
_BLOCKS: tuple[dict[str, Any], ...] = ({}, {"q_length": 128, "kv_length": 128})


def forms_of(case: Case, call: Mapping[str, Any]) -> Iterator[Case]:
    """`case` made one of `CALLS`, in the forms in which it can be asked, the first one first."""
    for blocks, (num_q_heads, num_kv_heads), dtype in itertools.product(_BLOCKS, _HEADS, _DTYPES):
        heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "dtype": dtype}
        changes: dict[str, Any] = {**_USUAL, **heads, **call, **blocks}
        if not blocks or changes["q_length"] > 1:
            yield dataclasses.replace(case, **changes)
