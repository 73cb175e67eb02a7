"""Compare exact tangents, and derivatives of gradients along a direction, with JAX's own in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from cases.counter_rng import draw_normal
from cases.operand_values import Problem, draw_problem
from conformance.truth.tangent_oracle import compute_gradient_tangents, compute_tangents
from impls.contract.declarations import Arithmetic, Formulas
from tests.comparison_asserts import assert_right, compute_float64_bounds, list_failures
from tests.truth.test_oracle import CASES, NAMES, cotangents, literal_forward, problem_of

Direction = dict[str, np.ndarray]


def draw_direction(problem: Problem, *names: str) -> Direction:
    found = {name: getattr(problem, name) for name in names or NAMES.values()}
    return {name: draw_normal(5, f"along-{name}", x.shape) for name, x in found.items() if x is not None}


def differentiate(problem: Problem, direction: Direction, do: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tangents of `out` and `logsumexp`, and the derivatives of the gradients of `<out, do>`, by JAX."""
    found = {x: getattr(problem, x) for x in NAMES.values()}
    with jax.enable_x64(True):
        operands = {x: jnp.asarray(v) for x, v in found.items() if v is not None}
        along = {x: jnp.asarray(direction.get(x, np.zeros(v.shape))) for x, v in operands.items()}

        def both(operands: Any, along: Any) -> Any:
            def differentiate_out(operands: Any) -> Any:
                return jax.grad(lambda operands: jnp.vdot(literal_forward(problem, operands)[0], do))(operands)

            out, lse = jax.jvp(lambda operands: literal_forward(problem, operands), (operands,), (along,))[1]
            return {"out": out, "logsumexp": lse}, jax.jvp(differentiate_out, (operands,), (along,))[1]

        tangents, gradients = jax.jit(both)(operands, along)
    return dict(tangents), {f"d{name}": x for name, x in gradients.items()}


@pytest.mark.parametrize("case_id", CASES)
def test_tangents_agree_with_jax(case_id: str) -> None:
    drawn, problem, (do, _) = draw_problem(parse_case_id(case_id)), problem_of(case_id), cotangents(case_id)
    given = [name for name in NAMES.values() if getattr(problem, name) is not None]
    for names in (given, *([name] for name in given)):
        direction = draw_direction(problem, *names)
        tangents, gradients = differentiate(problem, direction, do)
        # The bounds are those of f32, so the problem has its drawn dtype; its values are the same.
        found = compute_tangents(drawn, [direction], Arithmetic())[0]
        assert_right(tangents, compute_float64_bounds(found, 2))
        found = compute_gradient_tangents(drawn, direction, do, Arithmetic(), "zero")
        assert set(found) == set(gradients)
        assert_right(gradients, compute_float64_bounds(found, 2))


def test_a_direction_at_one_key_leaves_rows_that_cannot_see_it_exactly_as_they_are() -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T12.S12.N2.K1.H4.V4/causal/normal/s1"))
    k = np.zeros(problem.k.shape)
    k[0, 7, 0, 2] = 1.0
    found = compute_tangents(problem, [{"k": k}], Arithmetic())[0]
    for name, rows in (("out", 1), ("logsumexp", 2)):
        value, bound = (np.moveaxis(x, rows, 0) for x in (found[name].value, found[name].bound))
        assert not value[:7].any()
        assert not bound[:7].any()
        assert (bound[7:] > 0).all()
        assert list_failures({name: 1.001 * found[name].value}, found)


def test_declared_formulas_of_logsumexp_have_their_tangents() -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T12.S12.N2.K1.H4.V4/causal/sinks/normal/s1"))
    direction = draw_direction(problem)

    def compute(problem: Problem, **formulas: Any) -> np.ndarray:
        return compute_tangents(problem, [direction], Arithmetic(), Formulas(**formulas))[0]["logsumexp"].value

    np.testing.assert_allclose(compute(problem, logsumexp_base=2), compute(problem) / np.log(2), rtol=1e-12)
    np.testing.assert_array_equal(compute(problem, logsumexp_sink=False), compute(problem.without("sinks")))
