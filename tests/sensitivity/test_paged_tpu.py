"""Bugs of a paged kernel that copies its pages by itself are seen, by the interpreter that looks for races or by truth.

They are not in the bank: all that the gate asks takes minutes a bug where a kernel is interpreted.
"""

from __future__ import annotations

import pytest

from conformance.sensitivity import PlantedBug
from tests.planted.computing import paged_tpu, paged_tpu_latent, paged_tpu_scales
from tests.sensitivity.by_day import every
from tests.sensitivity.interpreted import assert_dies_by_what_it_shows, near

OTHERS = (*paged_tpu_latent.BUGS, *paged_tpu_scales.BUGS)


@pytest.mark.parametrize("bug", [*every(10, paged_tpu.BUGS), *every(8, OTHERS)])
def test_a_bug_of_copies_dies_by_what_it_shows(bug: PlantedBug) -> None:
    assert_dies_by_what_it_shows(bug, near(bug, bug.build(), ("interpreter", "forward"), cases=2))


@pytest.mark.parametrize("bug", OTHERS, ids=lambda bug: bug.name)
def test_the_passage_that_a_bug_changes_is_there(bug: PlantedBug) -> None:
    assert bug.build().name == bug.name
