"""Calls that write quantised pages: correct ones in two styles pass, and each planted bug is red at quick."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from cases.case import Case
from cases.quantization import WRITTEN_CACHES
from conformance.check_api.scopes import ImplementationGrids
from impls.contract.implementation import Implementation
from reports.records import FAIL, PASS
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.planting.scaled_writes import scatter_writing, token_writing
from tests.planted.serving.scaled_writes import BUGS

_LOOKED_AT = 3  # how many cases of the grid may be needed to see a bug


@functools.cache
def _list_quick_cases() -> tuple[Case, ...]:
    """List the cases of the grid of features at level quick, those that compute the least first."""
    cases = ImplementationGrids(scatter_writing("right"), "quick", 0).grid.cases
    return tuple(sorted(cases, key=lambda case: case.batch * case.q_length * case.kv_length * case.num_q_heads))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    cases = [case for case in _list_quick_cases() if bug.trigger is None or bug.trigger(case)]
    check = "residuals" if "logsumexp" in bug.shows else "forward"
    for case in cases[:_LOOKED_AT]:
        red = {one.observable.split(".")[0] for one in judge(bug.build(), case.id, check) if one.verdict == FAIL}
        if red:
            assert red <= set(bug.shows)
            return
    raise AssertionError(f"green on {[case.id for case in cases[:_LOOKED_AT]]}")


@pytest.mark.parametrize("build", [scatter_writing, token_writing])
@pytest.mark.parametrize("cache", WRITTEN_CACHES)
def test_a_correct_kernel_passes(build: Callable[[str], Implementation], cache: str) -> None:
    cases = [case for case in _list_quick_cases() if case.kv_cache == cache]
    for case in {case.dtype: case for case in reversed(cases)}.values():
        for check in ("forward", "residuals"):
            assert {one.verdict for one in judge(build("right"), case.id, check)} == {PASS}
