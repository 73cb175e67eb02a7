"""Test what `quick` and `standard` see of bugs that were planted before there was a grid of sizes."""

from __future__ import annotations

import pytest

from tests.bank import PlantedBug
from tests.bank.examination import iter_red_records, shows_as_declared
from tests.planted.beyond.bank import BEYOND, LEVELS, SEEN, UNSEEN
from tests.sensitivity.nightly_bugs import sample_by_kind

_SEEN_AT_QUICK = 0.9
_SEEN_AT_STANDARD = 0.96


@pytest.mark.parametrize("bug", sample_by_kind((bug for bug in BEYOND if bug.name in SEEN), stride=3))
def test_a_bug_beyond_the_grid_dies_by_what_it_shows(bug: PlantedBug) -> None:
    assert any(shows_as_declared(bug, red) for red in iter_red_records(bug, LEVELS[bug.name], SEEN[bug.name]))


def test_all_of_this_bank_was_measured_and_most_of_it_is_seen() -> None:
    assert {*SEEN, *UNSEEN} == {bug.name for bug in BEYOND}
    assert set(LEVELS.values()) == {"quick", "standard"}
    assert list(LEVELS.values()).count("quick") >= _SEEN_AT_QUICK * len(BEYOND)
    assert len(SEEN) >= _SEEN_AT_STANDARD * len(BEYOND)
