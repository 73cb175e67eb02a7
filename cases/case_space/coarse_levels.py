"""Describe a case coarsely, so that a few cases show together whether an error belongs to one property of a case.

An error that belongs to one of these properties does not occur in cases with the other levels of that property. So if
cases that have all levels between them fail in the same way, no property explains it.
"""

from __future__ import annotations

from cases import mask_spec
from cases.case import Case
from cases.operand_registry import OPTIONAL

_BLOCK = 128
"""Kernels that take whole blocks only take multiples of this length and depth, as a rule."""
_USUAL_DEPTH = 64
_MASK_ARGUMENTS = ("causal", "window", "lengths")
"""The masks that most kernels take by an argument of their own."""


def find_given_operands(case: Case) -> frozenset[str]:
    """Return the names of the optional operands that a case has."""
    return frozenset(each.name for each in OPTIONAL if getattr(case, each.field) != each.absent)


def find_coarse_levels(case: Case) -> frozenset[str]:
    """Return the levels that a case has of each coarse property.

    The properties are phase, dtype, batch, order of the lengths, groups of heads, depths, whether lengths and depth are
    multiples of a block, the mask, and each optional operand.
    """
    operands = find_given_operands(case)
    masks = set(_MASK_ARGUMENTS).intersection(mask_spec.list_mask_features(case.mask))
    order = "T=S" if case.q_length == case.kv_length else "T<S" if case.q_length < case.kv_length else "T>S"
    has_length_blocks = not (case.q_length % _BLOCK or case.kv_length % _BLOCK)
    has_depth_blocks = not case.head_dim % _BLOCK
    return frozenset(
        {
            case.phase,
            case.dtype,
            "B=1" if case.batch == 1 else "B>1",
            order,
            "N=K" if case.num_q_heads == case.num_kv_heads else "N>K",
            "V=H" if case.v_head_dim == case.head_dim else "V!=H",
            f"lengths {'in' if has_length_blocks else 'not in'} blocks",
            f"depth {'in' if has_depth_blocks else 'not in'} blocks",
            *(["all in blocks"] if has_length_blocks and has_depth_blocks else []),
            *([f"H={_USUAL_DEPTH}"] if case.head_dim == _USUAL_DEPTH else []),
            "no mask" if case.mask == "full" else "mask",
            *masks,
            *(operands or {"no operands"}),
        }
    )
