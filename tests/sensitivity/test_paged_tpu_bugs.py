"""Test that bugs of a paged kernel that copies its pages by itself are seen.

Either the interpreter that looks for races sees them, or the oracle does. They are not in the bank: for an interpreted
kernel, the whole gate takes minutes a bug.
"""

from __future__ import annotations

import pytest

from tests.bank import PlantedBug
from tests.planted.computing import paged_tpu, paged_tpu_latent, paged_tpu_masks, paged_tpu_scales
from tests.sensitivity.interpreted_bugs import assert_detected_as_declared, iter_near_jobs
from tests.sensitivity.nightly_bugs import sample_by_stride

OTHERS = (*paged_tpu_latent.BUGS, *paged_tpu_scales.BUGS)


@pytest.mark.parametrize("bug", [*sample_by_stride(10, paged_tpu.BUGS), *sample_by_stride(8, OTHERS)])
def test_a_bug_of_copies_dies_by_what_it_shows(bug: PlantedBug) -> None:
    assert_detected_as_declared(bug, iter_near_jobs(bug, bug.build(), ("interpreter", "forward"), cases=2))


@pytest.mark.parametrize("bug", sample_by_stride(8, paged_tpu_masks.BUGS))
def test_a_bug_of_masks_dies_by_what_it_shows(bug: PlantedBug) -> None:
    assert_detected_as_declared(bug, iter_near_jobs(bug, bug.build(), ("forward", "poison"), cases=3))
