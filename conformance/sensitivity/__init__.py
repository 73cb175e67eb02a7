"""Measure which faults the checks detect, with a bank of planted bugs and with errors of known size."""

from __future__ import annotations

from conformance.sensitivity.bank import PlantedBug

__all__ = ["PlantedBug"]
