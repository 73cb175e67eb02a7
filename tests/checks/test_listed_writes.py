"""Calls that write pages and take lists of keys: correct ones pass, and each planted bug is red at level `quick`."""

from __future__ import annotations

import functools

import pytest

from cases.case import Case
from conformance.check_api.scopes import ImplementationGrids
from impls.contract.implementation import Implementation
from impls.listed.implementation import IMPLEMENTATIONS
from reports.records import FAIL, PASS, UNSUPPORTED
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.planting.listed_writes import written
from tests.planted.serving.listed_writes import BUGS

OURS = next(one for one in IMPLEMENTATIONS if one.name == "listed_paged_update")


@functools.cache
def list_quick_cases() -> tuple[Case, ...]:
    """List the cases of the grid at `quick`: first those in f32 with normal values, the smallest of them first."""
    cases = ImplementationGrids(written("right"), "quick", 0).grid.cases

    def order(case: Case) -> tuple[bool, bool, int]:
        size = case.batch * case.num_q_heads * case.q_length * case.kv_length
        return case.dtype != "f32", case.distribution != "normal", size

    return tuple(sorted(cases, key=order))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    """It is red in one of the first cases of `quick` that can show it."""
    shown = [case for case in list_quick_cases() if bug.trigger(case)]
    implementation = bug.build()
    assert any(one.verdict == FAIL for case in shown[:4] for one in judge(implementation, case.id, "forward"))


@pytest.mark.parametrize("check", ["forward", "poison", "decoding"])
@pytest.mark.parametrize("implementation", [written("right"), OURS], ids=lambda one: one.name)
def test_a_correct_kernel_passes(implementation: Implementation, check: str) -> None:
    judged = [one for case in list_quick_cases()[:4] for one in judge(implementation, case.id, check)]
    assert {one.verdict for one in judged} <= {PASS, UNSUPPORTED}
    assert not judged or PASS in {one.verdict for one in judged}
