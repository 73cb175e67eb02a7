"""Measure which faults the checks detect, with a bank of planted bugs and with errors of known size."""

from __future__ import annotations

from tests.bank.planted_bug import PlantedBug

__all__ = ["PlantedBug"]
