"""The operands of a call in one list, and the names of what a call returns.

A new optional operand is a module of `cases.optional_operands` and a line of `OPTIONAL`, a field of `cases.case.Case`
and one of `cases.operand_values.Problem`. Whatever draws, validates, passes on, cuts, shards, judges or describes
operands reads this list. So do the oracle and its bounds.
"""

from __future__ import annotations

from cases.operand import Operand, OptionalOperand
from cases.optional_operands import (
    alibi_slopes_operand,
    bias_operand,
    kv_scales_operand,
    logit_scale_operand,
    scale_operand,
    score_mod_operand,
    segment_ids_operand,
    sinks_operand,
    soft_cap_operand,
)

REQUIRED = (
    Operand(name="q", arrays=(("B", "T", "N", "H"),), gradient="dq"),
    Operand(name="k", arrays=(("B", "S", "K", "H"),), gradient="dk"),
    Operand(name="v", arrays=(("B", "S", "K", "V"),), gradient="dv"),
)
OPTIONAL: tuple[OptionalOperand, ...] = (
    segment_ids_operand.OPERAND,
    soft_cap_operand.OPERAND,
    sinks_operand.OPERAND,
    bias_operand.OPERAND,
    scale_operand.OPERAND,
    kv_scales_operand.OPERAND,
    alibi_slopes_operand.OPERAND,
    score_mod_operand.OPERAND,
    logit_scale_operand.OPERAND,
)
"""The order of the parts of a case id, and that in which the values of a case are drawn."""
OPERANDS: tuple[Operand, ...] = (*REQUIRED, *OPTIONAL)

GRADIENT_OF = {operand.name: operand.gradient for operand in OPERANDS if operand.gradient}
"""The gradient's name by the operand's, for operands that have one."""
RESIDUALS = ("logsumexp", "max_logits")
GRADIENTS = tuple(GRADIENT_OF.values())
OBSERVABLES = ("out", *RESIDUALS, *GRADIENTS)
"""What a call returns, with its residuals and its gradients, in the contract's order."""
REMOVABLE = tuple(operand for operand in OPTIONAL if operand.description)
"""Operands without which a problem still has a meaning. Stored keys and values have none without their scales."""
QUIET = frozenset(operand.field for operand in OPTIONAL if operand.is_quiet)
"""The case fields of operands whose absence says nothing about a case."""
POSITIONAL = tuple(operand.name for operand in OPTIONAL if operand.is_positional)
"""Names of operands that depend on the positions of queries and keys."""
WITH_OWN_CASES = tuple(operand for operand in OPTIONAL if operand.has_own_cases)
"""Operands with a covering array of their own (`cases.operand_model`)."""
