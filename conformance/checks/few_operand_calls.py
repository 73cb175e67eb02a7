"""Calls with few operands or none, as models make them: a kernel may have a path for just these.

Nearly all cases of the grids have several operands at once, and those that have one are in f32, or have as many
key/value heads as query heads. A path that is taken where nothing else is given is not taken there. The calls are those
of models in training, on whole and on packed sequences, under a window with sinks or with a soft cap, with a bias for
each pair, and in serving. Beside them there are fewer queries than keys, and more, that are counted from the first key;
as many batch rows as heads, where a mask or a bias differs between rows; and one query under a window.

Lengths and sides of windows lie beside borders of blocks of 32, 64 or 128: the last block of a row or of a window holds
one place, or lacks one.

A kernel may have a path for every set of operands, too. Of the 32 that five operands have, the grids at `quick` leave
out most of those of two and three in training: all pairs occur, beside others. Those with a scale or a soft cap have a
call each, and so has a bias of heads, in groups and not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from cases.case import Case
from cases.operand_registry import REMOVABLE


def _with_length(length: int) -> dict[str, Any]:
    """As many queries as keys."""
    return {"q_length": length, "kv_length": length}


_ONE_HEAD = {"num_q_heads": 1, "num_kv_heads": 1}
_SEQUENCE_ENDS = "1-40-7-31-12-3-39-25-5-18-33-9"
_MANY_ROWS: dict[str, Any] = {"batch": 12, "times_heads": 3}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"mask": "causal", "batch": 1, "q_length": 160, "kv_length": 160},  # three blocks of 64
    # Blocks whose first and last labels are equal, and others between them.
    "documents": {"mask": "causal", "segments": "segamid", **_with_length(127)},
    "sunk": {"mask": "window-l129-r0", "sinks": True, **_with_length(191)},
    "capped": {"mask": "window-l64-r1", "soft_cap": 30.0, **_with_length(129)},
    "biased": {"mask": "full", "bias": "biaspair", **_with_length(127)},
    # Keys ahead of the query: more than a block of 64, and no whole number of blocks.
    "ahead": {"phase": "prefill", "mask": "window-l65-r65", "batch": 1, **_with_length(257)},
    # All keys ahead, and more of them than queries by more than a block.
    "open": {"phase": "prefill", "mask": "window-l9-rinf", "batch": 1, "q_length": 40, "kv_length": 160},
    # Places that f16 does not tell apart, and bf16 less so.
    "far": {"phase": "prefill", "mask": "causal-o2176", "batch": 1, "q_length": 128, "kv_length": 2304},
    # More than sixteen blocks of 128 each way, and places that f16 does not tell apart.
    "long": {"phase": "prefill", "mask": "causal", "batch": 1, **_ONE_HEAD, **_with_length(2176)},
    # A label that comes back more than a block of 128 later, in a block that begins with a larger one.
    "returning": {
        "phase": "prefill",
        "mask": "causal",
        "segments": "segwild",
        "batch": 1,
        **_ONE_HEAD,
        **_with_length(1089),
    },
    "first": {"phase": "prefill", "mask": "causal", "q_length": 16},
    "tall": {"phase": "prefill", "mask": "causal", "bias": "biasbatch", "batch": 4, "q_length": 100},
    # As many batch rows as heads, more than eight.
    "served": {**_MANY_ROWS, "phase": "decode", "mask": f"lengths-{_SEQUENCE_ENDS}", "sinks": True, "q_length": 1},
    "lone": {"phase": "decode", "mask": "window-l3-r2", "q_length": 1},
    "scaled": {"mask": "causal", "scale": 0.3, **_with_length(65)},
    "scaled_documents": {"mask": "causal", "scale": 0.3, "segments": "seg", "batch": 9, **_with_length(63)},
    "scaled_capped": {"mask": "causal", "scale": 0.3, "soft_cap": 30.0, **_with_length(33)},
    "scaled_capped_documents": {"mask": "full", "scale": 0.3, "soft_cap": 30.0, "segments": "seg", **_with_length(127)},
    "scaled_sunk": {"mask": "full", "scale": 0.3, "sinks": True, **_with_length(65)},
    # A sequence labelled zero, as padding of a last block may be, and logits around zero, as padded keys have.
    "scaled_sunk_documents": {"mask": "full", "scale": 0.3, "sinks": True, "segments": "segwild", **_with_length(63)},
    "scaled_biased": {"mask": "full", "scale": 0.3, "bias": "biashead"},
    "scaled_biased_documents": {"mask": "causal", "scale": 0.3, "bias": "biashead", "segments": "seg"},
    "capped_sunk": {"mask": "causal", "soft_cap": 30.0, "sinks": True, **_with_length(31)},
    "capped_sunk_documents": {"mask": "full", "soft_cap": 30.0, "sinks": True, "segments": "seg", **_with_length(65)},
    "capped_biased": {"mask": "causal", "soft_cap": 30.0, "bias": "biaspair"},
    "biased_heads": {"mask": "causal", "bias": "biashead"},
    "biased_apart": {"mask": "full", "bias": "biashead", "grouped": False},
}
ALIBI_CALLS: dict[str, dict[str, Any]] = {
    "sloped": {"mask": "causal", "alibi": True},
    "sloped_sunk": {"mask": "causal", "alibi": True, "sinks": True},
    "sloped_ahead": {"phase": "prefill", "mask": "window-l9-r3", "alibi": True, "kv_length": 72},
}
"""Of kernels that offer ALiBi: under a causal mask it is a number for each key, as far as weights go, but for sinks.

A window is counted from the first key and distances from the last one: that differs where there are fewer queries.
"""
_DEFAULTS: dict[str, Any] = {
    **{operand.field: operand.absent for operand in REMOVABLE},
    "batch": 2,
    "q_length": 40,
    "kv_length": 40,
    "head_dim": 64,
    "v_head_dim": 64,
}
# Of each call the first form that is supported: heads in groups before heads by themselves, unless the call says
# otherwise, 16 bits before 32, the lengths that are told before the next whole blocks.
_HEADS = (4, 2), (4, 4)
_DTYPES = ("bf16", "f16", "f32")
_BLOCK = 128


def iter_variants(case: Case, call: Mapping[str, Any]) -> Iterator[Case]:
    """`case` made one of `CALLS`, in the forms in which it can be asked, the first one first."""
    told = {name: value for name, value in call.items() if name not in ("grouped", "times_heads")}
    times = call.get("times_heads", 1)
    order = _HEADS if call.get("grouped", True) else _HEADS[::-1]
    usual = {**_DEFAULTS, **told}
    whole = {name: -(-usual[name] // _BLOCK) * _BLOCK for name in ("q_length", "kv_length")}
    lengths: tuple[dict[str, Any], ...] = ({}, whole) if usual["q_length"] > 1 else ({},)
    for blocks, (num_q_heads, num_kv_heads), dtype in itertools.product(lengths, order, _DTYPES):
        heads = {"num_q_heads": times * num_q_heads, "num_kv_heads": times * num_kv_heads, "dtype": dtype}
        changes: dict[str, Any] = {**_DEFAULTS, **heads, **told, **blocks}
        yield dataclasses.replace(case, **changes)
