"""Kernels that take lists of keys: correct ones pass, and each planted bug is red at level `quick`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from cases.case import Case
from cases.masks import Dense, HeadWindow, Listed, Mask, VaryingWindow
from conformance.check_api.scopes import ImplementationGrids
from impls.contract.implementation import Implementation
from impls.dot_product.implementation import build_implementation
from impls.listed.attention import attention
from impls.listed.implementation import IMPLEMENTATIONS
from reports.records import FAIL, PASS, UNSUPPORTED
from tests.bank import PlantedBug
from tests.checks.test_checks import judge
from tests.planted.features.lists import BUGS
from tests.planted.planting import listed

KERNELS: dict[str, Callable[..., Implementation]] = {
    "gathered": listed.gathered,
    "scattered": listed.scattered,
    "paged": listed.paged,
}


@functools.cache
def build_grids(kernel: str) -> ImplementationGrids:
    return ImplementationGrids(KERNELS[kernel]("right"), "quick", 0)


@functools.cache
def list_quick_cases(kernel: str) -> tuple[Case, ...]:
    """List the cases of the grids at `quick`: first those in f32 with normal values, the smallest of them first."""
    cases = {case: None for grid in build_grids(kernel).all_grids for case in grid.cases}

    def order(case: Case) -> tuple[bool, bool, int]:
        size = case.batch * case.num_q_heads * case.q_length * case.kv_length
        return case.dtype != "f32", case.distribution != "normal", size

    return tuple(sorted(cases, key=order))


def find_kernel(bug: PlantedBug) -> str:
    return next(name for name, build in KERNELS.items() if bug.build.func is build)  # type: ignore[attr-defined]


def list_red(implementation: Implementation, case: Case, check: str) -> set[str]:
    """List the observables that are red."""
    return {one.observable.split(".")[0] for one in judge(implementation, case.id, check) if one.verdict == FAIL}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_red(bug: PlantedBug) -> None:
    """It is red in one of the first cases of `quick` that can show it."""
    shown = [case for case in list_quick_cases(find_kernel(bug)) if bug.trigger(case)]
    assert shown, "no case of the grid can show it"
    checks = ("gradients",) if all(name.startswith("d") for name in bug.shows) else ("forward", "poison")
    implementation = bug.build()
    red = next((red for case in shown[:4] for check in checks if (red := list_red(implementation, case, check))), set())
    assert red


@pytest.mark.parametrize("check", ["forward", "gradients", "poison", "arguments", "independence"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_correct_kernel_passes(kernel: str, check: str) -> None:
    grid = build_grids(kernel).grid
    cases = (grid.singles[0], grid.combined[0])
    judged = [one for case in cases for one in judge(KERNELS[kernel]("right"), case.id, check)]
    assert {one.verdict for one in judged} <= {PASS, UNSUPPORTED}
    assert not judged or PASS in {one.verdict for one in judged}


@pytest.mark.parametrize(
    "spec",
    [
        "train/f32/B2.T12.S20.N2.K1.H8.V8/listed-k6/normal/s0",
        "train/f32/B2.T12.S20.N2.K1.H8.V8/causal-o8_and_lengths-9-20_and_listed-k30/normal/s0",
    ],
)
def test_our_kernels_pass(spec: str) -> None:
    for implementation in (build_implementation("dot_product"), IMPLEMENTATIONS[0]):
        for check in ("forward", "gradients"):
            assert {one.verdict for one in judge(implementation, spec, check)} == {PASS}


@pytest.mark.parametrize(
    "mask", [HeadWindow((1, 3)), VaryingWindow(2, (0,), 2), Dense(np.ones((1, 2, 4, 4), bool))], ids=str
)
def test_masks_that_differ_by_head_are_refused_beside_lists(mask: Mask) -> None:
    x = jnp.ones((1, 4, 2, 8))
    lists = Listed(np.zeros((1, 4, 3), np.int32))
    with pytest.raises(NotImplementedError, match=r"^(dense_head|placed):"):
        attention(x, x, x, mask=lists & mask)
