"""Conditions on a case under which bugs of the tiled kernel show."""

from __future__ import annotations

from typing import Any

import numpy as np

from cases import mask_spec
from cases.case import Case
from cases.masks import Causal, Full, Mask, Window, list_conjuncts
from cases.operand_values import DTYPES
from conformance.mutation.kernels.triggers import Trigger
from tests.planted.planting.tiled import BLOCK, Call


def whole_keys(case: Case) -> bool:
    """No key block is padded."""
    return case.kv_length % BLOCK == 0


def mask_of(case: Case) -> Mask:
    """The case's mask."""
    return mask_spec.build_mask(case.mask, case.batch, case.num_q_heads, case.q_length, case.kv_length, case.seed)


def call_of(case: Case) -> Call:
    """What the tiled kernel knows of a case before it sees arrays."""
    causal, window, left = False, None, False
    for part in list_conjuncts(mask_of(case)):
        if part == Causal():
            causal = True
        elif isinstance(part, Window) and not part.offset and window is None:
            window = (part.left, part.right)
        else:
            left = left or not isinstance(part, Full)
    return Call(
        case.batch, case.q_length, case.kv_length, case.scale or case.head_dim**-0.5, case.soft_cap, causal, window,
        left, case.segments is not None, DTYPES[case.dtype],
    )  # fmt: skip


def kv_blocks(least: int) -> Trigger:
    """At least so many key blocks."""
    return lambda case: call_of(case).kv_blocks >= least


def q_blocks(least: int) -> Trigger:
    """At least so many query blocks."""
    return lambda case: call_of(case).q_blocks >= least


def masked_by_array(case: Case) -> bool:
    """A mask that reaches the kernel as booleans."""
    return call_of(case).masked


def whole(size: int, least: int = 1) -> Trigger:
    """Both lengths are multiples of `size`, and at least `least`."""
    return lambda case: (
        not (case.q_length % size or case.kv_length % size) and (min(case.q_length, case.kv_length) >= least)
    )


def loses(right: Any, wrong: Any, along: str) -> Trigger:
    """The wrong range of blocks lacks some that the right one has; `along` the blocks that ask, `q` or `kv`."""

    def trigger(case: Case) -> bool:
        call = call_of(case)
        blocks = np.arange(call.q_blocks if along == "q" else call.kv_blocks)
        (first, stop), (wrong_first, wrong_stop) = (
            tuple(np.asarray(x) for x in ranges(call, blocks)) for ranges in (right, wrong)
        )
        return bool(((stop > first) & ((wrong_first > first) | (wrong_stop < stop))).any())

    return trigger
