"""Kernels whose functions capture arrays: a correct one passes, and each planted bug is red where it shows."""

from __future__ import annotations

import pytest

from reports.records import FAIL, PASS
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.features.captures import BUGS
from tests.planted.planting import flex

COMBINED = "train/f32/B2.T48.S200.N4.K2.H16.V48/causal-o152/softcap2/score-buckets/normal/s0"
CAPS = "train/f32/B2.T128.S128.N4.K2.H16.V16/causal/score-caps/normal/s0"
# The check and the case that show a bug, where they are not `gradients` on `CAPS`.
SHOWN = {
    "captured-array-of-the-first-head": ("forward", COMBINED),
    "captured-array-in-16-bits": ("forward", COMBINED),
    "captured-array-of-the-even-head": ("forward", COMBINED),
    "captured-array-of-the-first-call": ("calls", CAPS),
    "captured-ids-of-queries-and-keys-swapped": (
        "invariance",
        "train/f32/B2.T128.S128.N4.K2.H16.V48/causal/seg/normal/s0",
    ),
    "captured-ids-of-the-first-batch-row": ("forward", "train/f32/B3.T64.S72.N2.K1.H16.V16/full/segpad/normal/s0"),
    "captured-booleans-of-the-first-call": ("calls", "train/f32/B2.T64.S64.N2.K2.H16.V16/dense-d60/normal/s0"),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    check, case = SHOWN.get(bug.name, ("gradients", CAPS))
    red = {one.observable.split(".")[0] for one in judge(bug.build(), case, check) if one.verdict == FAIL}
    assert red & set(bug.shows), f"red are {sorted(red)}"


@pytest.mark.parametrize("check", ["forward", "gradients", "transforms", "arguments"])
@pytest.mark.parametrize("case", [COMBINED, CAPS])
def test_a_correct_kernel_passes(check: str, case: str) -> None:
    judged = judge(flex.implementation("right", captures=True), case, check)
    assert {one.verdict for one in judged} <= {PASS, "unsupported"}
    assert PASS in {one.verdict for one in judged}


def test_every_listed_bug_exists() -> None:
    assert SHOWN.keys() <= {bug.name for bug in BUGS}
