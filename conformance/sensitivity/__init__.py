"""Measure what the gate can see: by a bank of planted bugs, and by errors of known size."""

from __future__ import annotations

from conformance.sensitivity.bank import PlantedBug

__all__ = ["PlantedBug"]
