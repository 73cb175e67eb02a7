"""Named regressions: published bugs of attention kernels, each with the smallest case that triggers the bug.

Runs judge these cases beside the fixed grid. The grid reaches most of the same conditions, but a kernel that fails a
regression's case fails under the name of a known bug, with a link to it.
"""

from __future__ import annotations

from cases.regressions.mask_regressions import MASKS
from cases.regressions.numeric_regressions import NUMERICS
from cases.regressions.operand_regressions import FEATURES
from cases.regressions.regression import Regression
from cases.regressions.row_regressions import ROWS

__all__ = ["REGRESSIONS", "Regression", "find_regression"]

REGRESSIONS: tuple[Regression, ...] = (*MASKS, *ROWS, *FEATURES, *NUMERICS)
"""All regressions, grouped by subject: masks, rows, operands, numerics."""

_BY_CASE = {regression.case.id: regression for regression in REGRESSIONS}


def find_regression(case_id: str) -> Regression | None:
    """Return the regression whose case has this id, or None; no two regressions share a case."""
    return _BY_CASE.get(case_id)
