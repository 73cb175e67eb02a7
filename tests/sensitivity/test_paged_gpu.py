"""Bugs of a paged kernel whose programs share the keys of a sequence are seen, in the interpreter.

They are not in the bank: all that the gate asks takes minutes a bug where a kernel is interpreted.
"""

from __future__ import annotations

import pytest

from conformance.sensitivity import PlantedBug
from tests.planted.computing.paged_gpu import BUGS
from tests.sensitivity.by_day import every
from tests.sensitivity.interpreted import assert_dies_by_what_it_shows, near


@pytest.mark.parametrize("bug", every(len(BUGS), BUGS))
def test_a_bug_of_shares_dies_by_what_it_shows(bug: PlantedBug) -> None:
    assert_dies_by_what_it_shows(bug, near(bug, bug.build(), ("forward", "residuals"), cases=3))
