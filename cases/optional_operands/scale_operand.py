"""The operand `scale`: the number that multiplies `<q, k>` in place of the default `1 / sqrt(H)`."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from cases.case_fields import CallOperands
from cases.operand import OptionalOperand
from cases.operand_validation import CallSizes, validate_positive_number


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_positive_number(name, value, none="1/sqrt(head_dim)")


def _build_null(problem: CallOperands) -> float:
    """Return `1 / sqrt(H)`, the scale that a call without the operand uses."""
    return float(problem.q.shape[-1] ** -0.5)


OPERAND = OptionalOperand(
    name="scale",
    arrays=(),
    field="scale",
    form="scaleX",
    levels=(0.3,),
    number=re.compile(r"scale(\d+(?:\.\d+)?)"),
    description="a scale other than 1/sqrt(H)",
    words="a scale",
    grid_levels=(0.3,),
    combined_level=0.3,
    special=1.0,
    stored=True,
    validate=_validate,
    null=_build_null,
)
