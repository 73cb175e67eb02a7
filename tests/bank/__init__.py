"""Measure which faults the checks detect, with a bank of planted bugs and with errors of known size.

`python -m tests.bank --help` has the commands. `tests/planted` has our bank.
"""

from __future__ import annotations

from conformance.mutation.planted_bug import PlantedBug

__all__ = ["PlantedBug"]
