"""Every bug planted in the plain kernel dies at `quick`, by what it shows."""

from __future__ import annotations

import pytest

from conformance.sensitivity import PlantedBug
from tests.planted import (
    bias,
    empty_rows,
    heads,
    masks,
    precision,
    residuals,
    scale,
    segments,
    sinks,
    soft_cap,
    softmax,
    windows,
)
from tests.planted.judging import first_kill, shows_as_said

FAMILIES = (
    bias,
    empty_rows,
    heads,
    masks,
    precision,
    residuals,
    scale,
    segments,
    sinks,
    soft_cap,
    softmax,
    windows,
)
BUGS: tuple[PlantedBug, ...] = tuple(bug for family in FAMILIES for bug in family.BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_bug_dies_by_what_it_shows(bug: PlantedBug) -> None:
    red = first_kill(bug, "quick")
    assert red, "survives the quick grid"
    seen = sorted({f"{record.check} {record.observable}" for record in red})
    assert shows_as_said(bug, red), f"dies by {seen}, not by {bug.shows}"


def test_names_are_unique() -> None:
    names = [bug.name for bug in BUGS]
    assert sorted(set(names)) == sorted(names)
