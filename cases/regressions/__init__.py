"""Named regressions: bugs that public attention kernels really had, each as the least case that triggers it.

The grid reaches most of these conditions by its own means; here each stands by itself, with its reference, so that a
kernel which has the bug fails under the bug's name.
"""

from __future__ import annotations

from cases.regressions.mask_regressions import MASKS
from cases.regressions.numeric_regressions import NUMERICS
from cases.regressions.operand_regressions import FEATURES
from cases.regressions.regression import Regression
from cases.regressions.row_regressions import ROWS

__all__ = ["REGRESSIONS", "Regression", "find_regression"]

REGRESSIONS: tuple[Regression, ...] = (*MASKS, *ROWS, *FEATURES, *NUMERICS)
"""All of them, by subject."""

_BY_CASE = {regression.case.id: regression for regression in REGRESSIONS}


def find_regression(case_id: str) -> Regression | None:
    """The regression whose case has this id, or None. No two regressions share a case."""
    return _BY_CASE.get(case_id)
