"""The registry of operands: what it says of each one holds."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import pytest

from cases import feature_model, size_model
from cases.case import Case
from cases.case_id import parse_case_id
from cases.grid import build_grid
from cases.operand import OptionalOperand
from cases.operand_model import build_operand_model
from cases.operand_registry import OPTIONAL, WITH_OWN_CASES
from cases.operand_values import Problem, draw_problem
from cases.quantization import has_whole_scales
from conformance.truth import oracle
from impls.contract.implementation import validate_operands
from tests.comparison_asserts import assert_right, compute_expected

SIZES: dict[str, Any] = {"batch": 2, "q_length": 12, "kv_length": 15, "num_q_heads": 4, "num_kv_heads": 2}


def draw_with(operand: OptionalOperand, level: Any) -> Problem:
    phase = "prefill" if operand.name == "kv_scales" else "train"
    changed: dict[str, Any] = {operand.field: level}
    return draw_problem(Case(**SIZES, phase=phase, head_dim=8, v_head_dim=8, mask="causal-o3", **changed))


@pytest.mark.parametrize("operand", OPTIONAL, ids=lambda operand: operand.name)
def test_drawn_values_have_the_axes_that_the_operand_names_and_are_valid(operand: OptionalOperand) -> None:
    for level in operand.levels:
        if has_whole_scales(level):
            continue  # a number for all, in pages alone
        problem = draw_with(operand, level)
        value = getattr(problem, operand.name)
        sizes = dict(zip("BTSNK", (2, 12, 15, 4, 2), strict=True))

        def check(x: np.ndarray, axes: tuple[str, ...], sizes: dict[str, int] = sizes) -> None:
            allowed = [(1, sizes[axis]) if operand.broadcasts else (sizes[axis],) for axis in axes]
            assert len(x.shape) == len(axes)
            assert all(n in some for n, some in zip(x.shape, allowed, strict=True))

        operand.map_arrays(value, check)
        validate_operands(problem.q, problem.k, problem.v, **{operand.name: value})


@pytest.mark.parametrize("operand", [o for o in OPTIONAL if o.description and o.null], ids=lambda operand: operand.name)
def test_an_operand_at_its_null_value_changes_nothing(operand: OptionalOperand) -> None:
    problem = draw_with(operand, operand.levels[0])
    assert operand.null is not None
    plain = problem.without(operand.name)
    at_null = dataclasses.replace(problem, **{operand.name: operand.null(problem)})
    assert_right(dataclasses.asdict(oracle.compute_forward(at_null)), compute_expected(plain))
    given = oracle.compute_forward(problem).out
    assert np.abs(given - oracle.compute_forward(plain).out).max() > 1e-3  # Tolerance: far above rounding


@pytest.mark.parametrize("operand", OPTIONAL, ids=lambda operand: operand.name)
def test_a_wrong_operand_is_refused_by_its_name(operand: OptionalOperand) -> None:
    problem = draw_with(operand, operand.levels[0])
    with pytest.raises((TypeError, ValueError), match=operand.name):
        validate_operands(problem.q, problem.k, problem.v, **{operand.name: types.SimpleNamespace()})


def test_an_operand_that_nobody_knows_is_refused() -> None:
    problem = draw_with(OPTIONAL[0], OPTIONAL[0].levels[0])
    with pytest.raises(TypeError, match="no operand temperature"):
        validate_operands(problem.q, problem.k, problem.v, temperature=1.0)


@pytest.mark.parametrize("operand", WITH_OWN_CASES, ids=lambda operand: operand.name)
def test_an_operand_with_its_own_cases_is_in_all_of_them_and_in_no_others(operand: OptionalOperand) -> None:
    assert operand.field not in (*feature_model.NAMES, *size_model.MODEL.names)
    grid = build_grid("quick", 0, model=build_operand_model(operand))
    assert grid.coverage.covered == grid.coverage.feasible > 500
    cases = (*grid.cases, *grid.singles, *grid.combined)
    assert all(getattr(case, operand.field) == operand.levels[0] for case in cases)
    assert {case.phase for case in cases} == {"train", "prefill", "decode"}
    assert all(parse_case_id(case.id) == case for case in cases)
    (combined,) = grid.combined
    assert all(getattr(combined, field) for field in ("bias", "segments", "soft_cap", "sinks", "scale"))


def test_the_gradient_of_a_logit_scale_is_that_of_the_scale_by_head() -> None:
    """Where all heads have one factor, the gradients by head add up to the derivative by the fixed scale."""
    problem = draw_problem(parse_case_id("train/f32/B2.T12.S15.N4.K2.H6.V5/causal-o3/softcap2/logitscale/normal/s1"))
    do = np.random.default_rng(0).normal(size=(2, 12, 4, 5))
    scaled = dataclasses.replace(problem, scale=0.4, logit_scale=np.ones(4))
    step = 2.0**-20
    above, below = (
        float((oracle.compute_forward(dataclasses.replace(scaled, scale=0.4 + x)).out * do).sum())
        for x in (step, -step)
    )
    found = 0.4 * (above - below) / (2 * step)
    gradient = oracle.compute_backward(scaled, do)["dlogit_scale"]
    # Tolerance: truncation, step^2 times a third derivative around 1e3, and rounding of the losses over the step.
    np.testing.assert_allclose(gradient.sum(), found, rtol=0, atol=1e-6)
