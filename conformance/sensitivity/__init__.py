"""What the gate can catch, measured: a bank of planted bugs, which check sees which, and the smallest error seen."""

from __future__ import annotations

from conformance.sensitivity.bank import PlantedBug

__all__ = ["PlantedBug"]
