"""Test that bugs of a paged kernel whose programs share the keys of a sequence are seen, in the interpreter.

They are not in the bank: for an interpreted kernel, the whole gate takes minutes a bug.
"""

from __future__ import annotations

import pytest

from tests.bank import PlantedBug
from tests.planted.computing.paged_gpu import BUGS
from tests.sensitivity.interpreted_bugs import assert_detected_as_declared, iter_near_jobs
from tests.sensitivity.nightly_bugs import sample_by_stride


@pytest.mark.parametrize("bug", sample_by_stride(len(BUGS), BUGS))
def test_a_bug_of_shares_dies_by_what_it_shows(bug: PlantedBug) -> None:
    assert_detected_as_declared(bug, iter_near_jobs(bug, bug.build(), ("forward", "residuals"), cases=3))
