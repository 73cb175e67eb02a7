"""Name how much a run judges, from least to most."""

from __future__ import annotations

LEVELS = ("smoke", "quick", "standard", "deep")
"""`smoke` is the beginning of `quick`. Each other level has its own grid, which contains the cases of the levels before
it.
"""

GRID_LEVELS = LEVELS[1:]
