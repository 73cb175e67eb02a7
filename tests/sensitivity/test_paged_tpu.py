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
