"""The operand `soft_cap`: a number that bounds each logit `x`, which becomes `soft_cap * tanh(x / soft_cap)`."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from cases.operand import OptionalOperand
from cases.operand_validation import CallSizes, validate_positive_number


def _validate(name: str, value: Any, sizes: CallSizes, dtypes: Collection[str]) -> None:
    validate_positive_number(name, value, none="no cap")


# A soft cap far above any logit. It changes logits by less than their rounding.
HIGH_CAP = 2.0**20

OPERAND = OptionalOperand(
    name="soft_cap",
    arrays=(),
    field="soft_cap",
    form="softcapC",
    levels=(30.0,),
    number=re.compile(r"(?:soft)?cap(\d+(?:\.\d+)?)"),
    description="soft cap of the logits",
    words="a soft cap",
    grid_levels=(2.0, 30.0),
    combined_level=30.0,
    special=HIGH_CAP,
    stored=True,
    validate=_validate,
    cap=lambda problem: problem.soft_cap,
)
