"""Define calls with few optional operands or none, as models make them, for `calls`, `transforms` and `sharding`.

A kernel may have a fast path for exactly these calls. Nearly all other cases have several optional operands at once.
The cases with a single one are in f32, or have as many key/value heads as query heads. So they do not reach a path that
is taken only without other operands.

Models make these calls: training on whole and on packed sequences, a window with sinks or with a soft cap, a bias for
each pair of query and key, and serving. Some calls have fewer queries than keys and some have more, where positions
count from the first key. Some have as many batch rows as heads, where a mask or a bias differs between rows. One call
has a single query under a window.

Lengths and sides of windows are next to multiples of 32, 64 or 128. So the last block of a row or of a window holds one
position, or lacks one.

A kernel may also have a path for each set of optional operands. Scale, soft cap, sinks, bias and segment ids have 32
sets. The training cases of the level `quick` lack most sets of two and of three: each pair of operands occurs, but
together with further operands. Each missing set with a scale or a soft cap has a call here. A bias for each head has
two calls: with grouped heads and without. Each operand by itself has a call under a full and one under a causal mask.
These have more positions than a block, and a last block that is not full.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from cases.case import Case
from cases.operand import OptionalOperand
from cases.operand_registry import OPTIONAL, REMOVABLE, WITH_OWN_CASES
from impls.contract.implementation import Implementation


def _with_length(length: int) -> dict[str, Any]:
    """Return the fields of a case for equal numbers of queries and keys."""
    return {"q_length": length, "kv_length": length}


_LONE = _with_length(200)
_ONE_HEAD = {"num_q_heads": 1, "num_kv_heads": 1}
_SEQUENCE_ENDS = "1-40-7-31-12-3-39-25-5-18-33-9"
_MANY_ROWS: dict[str, Any] = {"batch": 12, "times_heads": 3}
CALLS: dict[str, dict[str, Any]] = {
    # Lengths of 160: three blocks of 64, the last one half filled.
    "plain": {"mask": "causal", "batch": 1, "q_length": 160, "kv_length": 160},
    # Segment ids that are equal at the first and last position of a block, and different between them.
    "documents": {"mask": "causal", "segments": "segamid", **_with_length(255)},
    # Labels that kernels give to padding, without a mask that hides the padding behind them.
    "labelled": {"mask": "full", "segments": "segwild", "batch": 1, **_with_length(223)},
    "sunk": {"mask": "window-l129-r0", "sinks": True, **_with_length(191)},
    "capped": {"mask": "window-l64-r1", "soft_cap": 30.0, **_with_length(129)},
    "biased": {"mask": "full", "bias": "biaspair", **_with_length(127)},
    # The window reaches 65 keys ahead of the query: more than one block of 64, and not a whole number of blocks.
    "ahead": {"phase": "prefill", "mask": "window-l65-r65", "batch": 1, **_with_length(257)},
    # The window has no limit on its right, and there are 120 more keys than queries, which is more than a block of 64.
    "open": {"phase": "prefill", "mask": "window-l9-rinf", "batch": 1, "q_length": 40, "kv_length": 160},
    # Windows of calls with unlike lengths. A plain function gets them as `window` if they are counted from where it
    # counts: here from the first key, and in the next call so that the last query is at the last key.
    "begun": {"phase": "prefill", "mask": "window-l40-r3", "batch": 1, "q_length": 72, "kv_length": 200},
    "ended": {"phase": "prefill", "mask": "window-l40-r3-o-101", "batch": 1, "q_length": 200, "kv_length": 99},
    # Positions above 2048, which f16 and bf16 cannot all represent exactly.
    "far": {"phase": "prefill", "mask": "causal-o2176", "batch": 1, "q_length": 128, "kv_length": 2304},
    # More than sixteen blocks of 128 along both axes, and positions that f16 cannot represent exactly.
    "long": {"phase": "prefill", "mask": "causal", "batch": 1, **_ONE_HEAD, **_with_length(2176)},
    # A segment id occurs again more than 128 keys later, in a block of 128 whose first key has a larger id.
    "returning": {
        "phase": "prefill",
        "mask": "causal",
        "segments": "segwild",
        "batch": 1,
        **_ONE_HEAD,
        **_with_length(1089),
    },
    "first": {"phase": "prefill", "mask": "causal", "q_length": 16},
    # The first query of each block sees all keys of a block of 64 or 128 but the last.
    "chunk": {"phase": "prefill", "mask": "causal-o126", "batch": 1, "q_length": 258, "kv_length": 384},
    "tall": {"phase": "prefill", "mask": "causal", "bias": "biasbatch", "batch": 4, "q_length": 100},
    # As many batch rows as query heads: twelve, which is more than eight.
    "served": {**_MANY_ROWS, "phase": "decode", "mask": f"lengths-{_SEQUENCE_ENDS}", "sinks": True, "q_length": 1},
    "lone": {"phase": "decode", "mask": "window-l3-r2", "q_length": 1},
    "scaled": {"mask": "causal", "scale": 0.3, **_with_length(193)},
    # One operand without a window, at a length of several blocks that none of them divides.
    "scaled_alone": {"mask": "full", "scale": 0.3, **_LONE},
    "capped_alone": {"mask": "full", "soft_cap": 2.0, **_LONE},
    "capped_causal": {"mask": "causal", "soft_cap": 30.0, **_LONE},
    "sunk_alone": {"mask": "full", "sinks": True, **_LONE},
    "sunk_causal": {"mask": "causal", "sinks": True, **_LONE},
    "scaled_documents": {"mask": "causal", "scale": 0.3, "segments": "seg", "batch": 9, **_with_length(63)},
    "scaled_capped": {"mask": "causal", "scale": 0.3, "soft_cap": 30.0, **_with_length(33)},
    "scaled_capped_documents": {"mask": "full", "scale": 0.3, "soft_cap": 30.0, "segments": "seg", **_with_length(127)},
    "scaled_sunk": {"mask": "full", "scale": 0.3, "sinks": True, **_with_length(65)},
    # A sequence with segment id zero, which kernels may use for padding, and with logits near zero, as padding has.
    "scaled_sunk_documents": {"mask": "full", "scale": 0.3, "sinks": True, "segments": "segwild", **_with_length(63)},
    "scaled_biased": {"mask": "full", "scale": 0.3, "bias": "biashead"},
    "scaled_biased_documents": {"mask": "causal", "scale": 0.3, "bias": "biashead", "segments": "seg"},
    "capped_sunk": {"mask": "causal", "soft_cap": 30.0, "sinks": True, **_with_length(31)},
    "capped_sunk_documents": {"mask": "full", "soft_cap": 30.0, "sinks": True, "segments": "seg", **_with_length(65)},
    "capped_biased": {"mask": "causal", "soft_cap": 30.0, "bias": "biaspair"},
    "biased_heads": {"mask": "causal", "bias": "biashead", **_LONE},
    "biased_apart": {"mask": "full", "bias": "biashead", "grouped": False, **_LONE},
}
OTHER_MASKS: dict[str, tuple[str, bool]] = {
    "window": ("window-l31-r5", False),
    "dense": ("dense-d60", True),
    "causal_alone": ("causal", False),
    "full": ("full", True),
    "window_with_operands": ("window-l31-r5", True),
}
"""Masks under which transformed and sharded calls are made too, and whether the case's optional operands stay.

The case itself is causal and has all operands. So each kind of mask meets each operand, and each stands alone. A kernel
may have a path that it takes only without other operands.
"""
_DEFAULTS: dict[str, Any] = {
    **{operand.field: operand.absent for operand in REMOVABLE},
    "batch": 2,
    "q_length": 40,
    "kv_length": 40,
    "head_dim": 64,
    "v_head_dim": 64,
}
# Numbers of query and key/value heads, dtypes, and the block to which lengths are rounded up: the variants of a call.
# The first supported variant is used. Grouped heads come before ungrouped ones, unless the call has `grouped=False`.
# Dtypes of 16 bits come before f32. The stated lengths come before lengths that are rounded up to whole blocks.
_HEADS = (4, 2), (4, 4)
_DTYPES = ("bf16", "f16", "f32")
_BLOCK = 128


def are_made_elsewhere(case: Case) -> bool:
    """Return whether calls without optional operands are those of another case, which lacks an operand of this one."""
    return any(getattr(case, operand.field) != operand.absent for operand in WITH_OWN_CASES)


def replace_mask(case: Case, spec: str, *, keep_operands: bool) -> Case:
    """Return the case under another mask, with its optional operands or without them."""
    absent: dict[str, Any] = {operand.field: operand.absent for operand in REMOVABLE}
    return dataclasses.replace(case, mask=spec, **({} if keep_operands else absent))


def list_operands_with_calls(implementation: Implementation, case: Case) -> list[OptionalOperand]:
    """List the opt-in operands with calls of their own that `implementation` offers.

    An operand that has its own cases is listed only if `case` is one of them.
    """
    offered = [operand for operand in OPTIONAL if operand.calls and operand.name in implementation.offers]
    return [o for o in offered if not o.has_own_cases or getattr(case, o.field) != o.absent]


def iter_variants(case: Case, call: Mapping[str, Any]) -> Iterator[Case]:
    """Yield `case` changed to `call`, an entry of `CALLS`, in variants of heads, dtype and lengths, preferred first."""
    fields = {name: value for name, value in call.items() if name not in ("grouped", "times_heads")}
    factor = call.get("times_heads", 1)
    head_counts = _HEADS if call.get("grouped", True) else _HEADS[::-1]
    with_defaults = {**_DEFAULTS, **fields}
    whole_blocks = {name: -(-with_defaults[name] // _BLOCK) * _BLOCK for name in ("q_length", "kv_length")}
    lengths: tuple[dict[str, Any], ...] = ({}, whole_blocks) if with_defaults["q_length"] > 1 else ({},)
    for padded, (num_q_heads, num_kv_heads), dtype in itertools.product(lengths, head_counts, _DTYPES):
        heads = {"num_q_heads": factor * num_q_heads, "num_kv_heads": factor * num_kv_heads, "dtype": dtype}
        changes: dict[str, Any] = {**_DEFAULTS, **heads, **fields, **padded}
        yield dataclasses.replace(case, **changes)
