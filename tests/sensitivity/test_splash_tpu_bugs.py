"""Test that passages which bugs change in the splash kernels exist, and what the fast interpreter sees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from impls import splash_tpu
from impls.contract.implementation import Implementation
from reports.records import ERROR
from tests.bank import PlantedBug
from tests.bank.examination import iter_red_records, shows_as_declared
from tests.planted.bank import BANK, SEEN
from tests.planted.computing.splash_tpu import BUGS
from tests.planted.planting.source_change import Change, changed
from tests.sensitivity.nightly_bugs import sample_by_kind

# Only the TPU interpreter simulates cores and asynchronous copies.
_NEED_TPU_INTERPRETER = {"splash-steps-declared-parallel", "splash-fused-dq-read-before-it-is-there"}
# `test_bank` judges the others by day, by the same checks.
_AT_NIGHT = {parameter.id for parameter in sample_by_kind(BANK) if pytest.mark.nightly in parameter.marks}


def kernel(implementation: Implementation) -> Callable[..., Any]:
    assert isinstance(implementation.call, functools.partial)
    return implementation.call.func


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_passage_that_a_bug_changes_is_there(bug: PlantedBug) -> None:
    planted = bug.build()
    assert planted.name == bug.name
    assert kernel(planted) is not splash_tpu.attention
    assert kernel(bug.build()) is kernel(planted)


@pytest.mark.bank
@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if bug.name in _AT_NIGHT - _NEED_TPU_INTERPRETER], ids=lambda bug: bug.name
)
def test_interpret_mode_sees_it_too(bug: PlantedBug) -> None:
    seen = {check: detection for check, detection in SEEN.get(bug.name, {}).items() if check != "interpreter"}
    found = iter_red_records(bug, "quick", seen)
    reds = (red for red in found if red.check != "interpreter" and red.verdict != ERROR)
    assert any(shows_as_declared(bug, red) for red in reds)


def test_a_passage_that_is_not_there_once_is_refused() -> None:
    change = Change("forward", "no such passage", "")
    with pytest.raises(ValueError, match="forward has the passage 'no such passage' 0 times"):
        changed("impls.splash_tpu", "planted_nothing", change)
    with pytest.raises(ValueError, match=r"impls\.splash_tpu has no module forwards"):
        changed("impls.splash_tpu", "planted_nowhere", Change("forwards", "", ""))
