"""How much a run judges, the least first."""

from __future__ import annotations

LEVELS = ("smoke", "quick", "standard", "deep")
"""`smoke` is where `quick` begins; each of the others has a grid of its own, with the cases of those before it."""

GRID_LEVELS = LEVELS[1:]
