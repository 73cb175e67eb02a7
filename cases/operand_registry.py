"""List the operands of a call, and the names of what a call returns.

A new optional operand is a module of `cases.optional_operands` and a line of `OPTIONAL`, and a field of each class
of `cases.case_fields`. Every package that handles operands reads this list: drawing, validation, calls, sharding,
checks and reports. So do the oracle and its bounds.
"""

from __future__ import annotations

from cases.operand import LogitOperand, Operand, OptionalOperand
from cases.optional_operands import (
    alibi_slopes_operand,
    bias_operand,
    kv_scales_operand,
    logit_scale_operand,
    scale_operand,
    score_mod_operand,
    score_table_operand,
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
"""The optional operands, in the order in which a case id has their components, and in which they are drawn."""
LOGIT_OPERANDS: tuple[LogitOperand, ...] = (*OPTIONAL, score_table_operand.OPERAND)
"""The optional operands, and the array that a score function captures."""
OPERANDS: tuple[Operand, ...] = (*REQUIRED, *LOGIT_OPERANDS)

GRADIENT_OF = {operand.name: operand.gradient for operand in OPERANDS if operand.gradient}
"""Names of gradients by name of the operand, for operands that have a gradient."""
OPERAND_OF = {gradient: operand for operand, gradient in GRADIENT_OF.items()}
"""Names of operands by name of the gradient."""
RESIDUALS = ("logsumexp", "max_logits")
"""Names of the residuals, which have one number for each row of the softmax."""
FURTHER_RESULTS = ("head_max_logits", "weights", "dropped_weights")
"""Names of the opt-in results that a call may return among its residuals (docs/contract.md, "Further results")."""
GRADIENTS = tuple(GRADIENT_OF.values())
OBSERVABLES = ("out", *RESIDUALS, *FURTHER_RESULTS, *GRADIENTS)
"""What a call returns, with its residuals, further results and gradients, in the contract's order."""
REMOVABLE = tuple(operand for operand in OPTIONAL if operand.description)
"""Operands that may be left out of a problem. The scales of quantised keys and values may not."""
ABSENCE_IGNORED = frozenset(operand.field for operand in OPTIONAL if operand.is_absence_ignored)
"""The case fields of operands that comparisons of cases ignore if a case lacks them."""
POSITIONAL = tuple(operand.name for operand in OPTIONAL if operand.is_positional)
"""Names of operands that depend on the positions of queries and keys."""
WITH_OWN_CASES = tuple(operand for operand in OPTIONAL if operand.has_own_cases)
"""Operands with a covering array of their own (`cases.operand_model`)."""
