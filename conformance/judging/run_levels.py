"""Name the levels of a run, which say how many cases and checks are run."""

from __future__ import annotations

LEVELS = ("smoke", "quick", "standard", "deep")
"""The levels, from the fewest cases to the most.

`smoke` is the beginning of `quick`. Each other level has a grid (a fixed set of cases), which contains the cases of the
levels before.
"""

GRID_LEVELS = LEVELS[1:]
"""The levels that have a grid."""


def get_grid_level(level: str) -> str:
    """Return the level whose grid has the cases of a run at `level`."""
    return "quick" if level == "smoke" else level
