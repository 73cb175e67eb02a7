"""Which planted bugs are asked for with every change, and which at night."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

from conformance.sensitivity import PlantedBug

_OF_A_KIND = 2


def asked(bugs: Iterable[PlantedBug]) -> list[ParameterSet]:
    """The bugs as parameters: two of a kind for the bank, and those that differ from them in detail at night."""
    seen: collections.Counter[str] = collections.Counter()
    parameters = []
    for bug in bugs:
        seen[bug.kind] += 1
        mark = pytest.mark.bank if seen[bug.kind] <= _OF_A_KIND else pytest.mark.nightly
        parameters.append(pytest.param(bug, id=bug.name, marks=mark))
    return parameters
