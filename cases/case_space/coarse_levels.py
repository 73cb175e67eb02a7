"""Describe a case coarsely, so that a few cases show together whether an error belongs to one property of a case.

An error that belongs to one of these properties does not occur in cases with the other levels of that property. So if
cases that have all levels between them fail in the same way, no property explains it.
"""

from __future__ import annotations

from cases.case import Case
from cases.operand_registry import OPTIONAL

_BLOCK = 128
"""Kernels that take whole blocks only take multiples of this length and depth, as a rule."""


def find_coarse_levels(case: Case) -> frozenset[str]:
    """Return the level of each coarse property of a case.

    The properties are phase, dtype, order of the lengths, groups of heads, mask, optional operands, whether lengths and
    depth are all multiples of a block, and whether values are as deep as keys.
    """
    operands = any(getattr(case, each.field) != each.absent for each in OPTIONAL if not each.is_absence_ignored)
    has_blocks = not any(size % _BLOCK for size in (case.q_length, case.kv_length, case.head_dim))
    return frozenset(
        {
            case.phase,
            case.dtype,
            "T=S" if case.q_length == case.kv_length else "T!=S",
            "N=K" if case.num_q_heads == case.num_kv_heads else "N!=K",
            "no mask" if case.mask == "full" else "mask",
            "operands" if operands else "no operands",
            "blocks" if has_blocks else "no blocks",
            "V=H" if case.v_head_dim == case.head_dim else "V!=H",
        }
    )
