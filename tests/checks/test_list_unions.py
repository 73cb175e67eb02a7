"""Kernels that take a window beside lists of keys: correct ones pass, and each planted bug is red at level `quick`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from cases.case import Case
from conformance.check_api.scopes import ImplementationGrids
from impls.contract.implementation import Implementation
from impls.dot_product.implementation import build_implementation
from impls.listed.implementation import IMPLEMENTATIONS
from reports.records import FAIL, PASS, UNSUPPORTED
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.features.unions import BUGS
from tests.planted.planting import unions

KERNELS: dict[str, Callable[..., Implementation]] = {
    "joined": unions.joined,
    "merged": unions.merged,
    "paged": unions.paged,
}


@functools.cache
def list_quick_cases(kernel: str) -> tuple[Case, ...]:
    """List the cases of the grids at `quick`: first those in f32 with normal values, the smallest of them first."""
    grids = ImplementationGrids(KERNELS[kernel]("right"), "quick", 0)
    cases = dict.fromkeys(case for grid in grids.all_grids for case in grid.cases)

    def order(case: Case) -> tuple[bool, bool, int]:
        size = case.batch * case.num_q_heads * case.q_length * case.kv_length
        return case.dtype != "f32", case.distribution != "normal", size

    return tuple(sorted(cases, key=order))


def find_kernel(bug: PlantedBug) -> str:
    return next(name for name, build in KERNELS.items() if bug.build.func is build)  # type: ignore[attr-defined]  # a partial


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    """It is red in one of the first cases of `quick` that can show it."""
    shown = [case for case in list_quick_cases(find_kernel(bug)) if bug.trigger(case)]
    assert shown, "no case of the grid can show it"
    check = "gradients" if "dk" in bug.shows else "forward"
    implementation = bug.build()
    assert any(one.verdict == FAIL for case in shown[:4] for one in judge(implementation, case.id, check))


@pytest.mark.parametrize("check", ["forward", "gradients", "poison", "arguments", "transforms"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_correct_kernel_passes(kernel: str, check: str) -> None:
    cases = [case for case in list_quick_cases(kernel) if "local_window" in case.features][:2]
    by_head = [case for case in list_quick_cases(kernel) if "dense_head" in case.features][:1]
    judged = [one for case in (*cases, *by_head) for one in judge(KERNELS[kernel]("right"), case.id, check)]
    assert {one.verdict for one in judged} <= {PASS, UNSUPPORTED}
    assert not judged or PASS in {one.verdict for one in judged}


@pytest.mark.parametrize("check", ["forward", "gradients"])
@pytest.mark.parametrize(
    "implementation",
    [build_implementation("dot_product"), *IMPLEMENTATIONS],
    ids=lambda implementation: implementation.name,
)
def test_our_kernels_pass(implementation: Implementation, check: str) -> None:
    model = ImplementationGrids(implementation, "quick", 0).operand_grids[-1]
    assert all("local_window" in case.features for case in model.cases)
    judged = [one for case in model.cases[:3] for one in judge(implementation, case.id, check)]
    assert {one.verdict for one in judged} <= {PASS, UNSUPPORTED}
    assert not judged or PASS in {one.verdict for one in judged}


def test_a_window_at_each_rows_own_position_passes() -> None:
    case = "prefill/f32/B2.T6.S30.N2.K1.H8.V8/own-linf-30-11_and_listed-k7_or_own-l4-30-11/normal/s0"
    assert {one.verdict for one in judge(IMPLEMENTATIONS[0], case, "forward")} == {PASS}
