"""Choose which planted bugs are tested with every change, and which at night."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet

from tests.bank import PlantedBug


def sample_by_stride(stride: int, bugs: Iterable[PlantedBug]) -> list[ParameterSet]:
    """Return the bugs as test parameters, where each takes seconds.

    Every `stride`-th runs with the bank, the others at night.
    """
    marks = (pytest.mark.nightly, pytest.mark.bank)
    return [pytest.param(bug, id=bug.name, marks=marks[number % stride == 0]) for number, bug in enumerate(bugs)]


def sample_by_kind(bugs: Iterable[PlantedBug], stride: int = 1) -> list[ParameterSet]:
    """Return the bugs as test parameters.

    The first of every `stride`-th kind runs with the bank. The others run at night.
    """
    seen: dict[str, int] = {}
    parameters = []
    for bug in bugs:
        is_first = bug.kind not in seen
        number = seen.setdefault(bug.kind, len(seen))
        mark = pytest.mark.bank if is_first and number % stride == 0 else pytest.mark.nightly
        parameters.append(pytest.param(bug, id=bug.name, marks=mark))
    return parameters
