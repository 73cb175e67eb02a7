"""Front ends: what they are, their derivatives, how far f32 may be off, and that a wrong one is seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import front_ends as definitions
from cases.case import Case, CaseIdError
from cases.case_id import parse_case_id
from cases.front_end_cases import select_front_end_cases
from cases.operand_values import draw_problem, draw_raw_projections
from conformance.checks import CHECKS_BY_NAME
from conformance.judging.job import Job
from conformance.judging.run_plan import plan_case
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.reference import front_end_reference
from conformance.truth.comparison import compare
from conformance.truth.front_end_oracle import FrontEnd
from conformance.truth.rounding_bounds import Bounded, OperandErrors, compute_expectation
from conformance.truth.running_error import BoundedNumber
from impls import dot_product
from impls.contract.declarations import Arithmetic
from reports.records import FAIL, PASS, Record
from tests.comparison_asserts import LIMIT, compute_float64_bounds

DOT = dot_product.IMPLEMENTATIONS[0]
ALL = select_front_end_cases("standard", 0)
F32 = [case for case in ALL if case.dtype == "f32"]


def test_every_step_is_judged_at_quick_or_is_a_kind_of_rotary() -> None:
    quick = {step for case in select_front_end_cases("quick", 0) for step in case.steps}
    assert set(definitions.STEPS) - quick == {"partial", "sections", "decoupled"}
    assert {step for case in ALL for step in case.steps} == set(definitions.STEPS)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_ids_read_back(case: Case) -> None:
    assert parse_case_id(case.id) == case
    assert plan_case(DOT, case).jobs[0].checks[-1].name == "front_end"


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("rope", "'rope' in front end 'rope' is none of rms, l2, half"),
        ("half-rms-half", "has a step twice"),
        ("half-shared", "shares k and v, so V must equal H, got 24 and 16"),
    ],
)
def test_what_is_no_front_end_is_refused(steps: str, message: str) -> None:
    with pytest.raises(CaseIdError, match=message):
        Case(front_end=steps, head_dim=16, v_head_dim=24)


@pytest.mark.parametrize(("step", "multiple"), [("half", 8), ("decoupled", 6)])
def test_rotary_needs_whole_pairs(step: str, multiple: int) -> None:
    with pytest.raises(CaseIdError, match=f"H must be a multiple of {multiple}, got 20"):
        Case(front_end=step, head_dim=20)


@pytest.mark.parametrize("step", ["half", "interleaved", "partial"])
def test_rotary_keeps_lengths_and_sees_only_distances(step: str) -> None:
    rng = np.random.default_rng(0)
    x = np.broadcast_to(rng.normal(size=(1, 1, 1, 16)), (1, 9, 1, 16))
    y = np.broadcast_to(rng.normal(size=(1, 1, 1, 16)), (1, 9, 1, 16))
    q, k, _ = definitions.apply_front_end((step,), definitions.Raw(x, y, y))
    lengths, other_lengths = np.linalg.norm(x, axis=-1), np.linalg.norm(y, axis=-1)
    # Tolerance: of each coordinate a cosine, a sine, two products and a sum, then two norms of 16: up to 32 roundings.
    np.testing.assert_allclose(np.linalg.norm(q, axis=-1), lengths, rtol=32 * 2.0**-53, atol=0)
    products = np.einsum("bthd,bshd->ts", q, k)
    # An angle of up to 8 is off by 8 roundings, and turns by as much, in q and k of either product; the rest as above.
    roundings = 64 * 2.0**-53 * (lengths * other_lengths).max()
    for distance in range(9):
        # Tolerance: 64 roundings of what |q| |k| is at most.
        np.testing.assert_allclose(np.diagonal(products, distance), products[0, distance], rtol=0, atol=roundings)


def test_two_layouts_of_rotary_are_one_with_the_dimensions_permuted() -> None:
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 16))
    order = np.concatenate([np.arange(0, 16, 2), np.arange(1, 16, 2)])
    half, _, _ = definitions.apply_front_end(("half",), definitions.Raw(x[..., order], x, x))
    interleaved, _, _ = definitions.apply_front_end(("interleaved",), definitions.Raw(x, x, x))
    # Tolerance: on either side a cosine, a sine, two products and a sum of two coordinates, rounded at their size.
    np.testing.assert_allclose(half, interleaved[..., order], rtol=0, atol=2 * 5 * 2.0**-53 * 2 * np.abs(x).max())


@pytest.mark.parametrize("case", F32, ids=str)
def test_the_oracle_is_the_definition_and_its_derivative(case: Case) -> None:
    raw = draw_raw_projections(case)
    wide: dict[str, Any] = {
        name: None if x is None else x.astype(np.float64) for name, x in dataclasses.asdict(raw).items()
    }
    truth = FrontEnd.of(case.steps, raw)
    after = (truth.q.after, truth.k.after, truth.v)
    bounded = compute_float64_bounds({name: Bounded(x.value, x.error) for name, x in zip("qkv", after, strict=True)}, 2)
    for exact, stated in zip(bounded.values(), definitions.apply_front_end(case.steps, raw), strict=True):
        assert compare(stated, exact).ratio <= LIMIT
    rng = np.random.default_rng(0)
    cotangents = [rng.normal(size=x.value.shape) for x in after]
    dq, dk, dv = (Bounded(x, np.zeros_like(x)) for x in cotangents)
    found = compute_float64_bounds(truth.pull_back(dq, dk, dv, 0.0, 0.0))
    # Of what a result changes by, both of whose values are rounded, and of the sum of such changes.
    of_change = sum(LIMIT * (x.bound * np.abs(c)).sum() for x, c in zip(bounded.values(), cotangents, strict=True))

    def difference(name: str, direction: np.ndarray, step: float) -> float:
        above, below = (
            definitions.apply_front_end(case.steps, definitions.Raw(**{**wide, name: wide[name] + s * direction}))
            for s in (step, -step)
        )
        return sum(((x - y) * c).sum() for x, y, c in zip(above, below, cotangents, strict=True)) / (2 * step)

    step = 2.0**-14
    for name, gradient in found.items():
        direction = rng.normal(size=gradient.value.shape)
        near, far = (difference(name, direction, s) for s in (step, 2 * step))
        terms, places = np.abs(gradient.value * direction).sum(), np.abs(gradient.value * wide[name]).sum()
        # Tolerance: truncation, which is a third of what it grows by from one step to two; rounding of two results, and
        # of the places that they are taken at, over two steps; that of the gradient itself.
        tolerance = abs(far - near) + of_change / (2 * step) + 2.0**-53 * places / step
        tolerance += LIMIT * (gradient.bound * np.abs(direction)).sum()
        assert tolerance < 1e-6 * terms
        assert abs((gradient.value * direction).sum() - near) <= tolerance  # Tolerance: as just derived


@pytest.mark.parametrize("case", F32[:2], ids=str)
def test_f32_stays_within_the_stated_error(case: Case) -> None:
    raw = draw_raw_projections(case)
    truth = FrontEnd.of(case.steps, raw)
    at_q, at_kv = definitions.compute_positions(case.q_length, case.kv_length)
    given = {name: x for name, x in dataclasses.asdict(raw).items() if x is not None}
    q, k, _ = front_end_reference.apply_front_end(
        case.steps,
        given.pop("q"),
        given.pop("k"),
        given.pop("v", None),
        q_positions=at_q,
        kv_positions=at_kv,
        **given,
    )
    for got, exact in ((q, truth.q.after), (k, truth.k.after)):
        stored = exact.stored(2.0**-24, 0.0)
        comparison = compare(np.asarray(got), Bounded(stored.value, stored.error))
        assert 0.01 < comparison.ratio < 1.5


floats = st.floats(0.125, 8, width=32) | st.floats(-8, -0.125, width=32)


@settings(max_examples=80, deadline=None)
@given(st.lists(floats, min_size=3, max_size=12))
def test_running_errors_bound_what_f32_does(values: list[float]) -> None:
    f32 = np.asarray(values, np.float32)
    x = BoundedNumber.exact(f32)

    def formula(x: Any, total: Callable[[Any], Any], root: Callable[[Any], Any]) -> Any:
        mean = total(x * x) / (
            BoundedNumber.exact(len(values)) if isinstance(x, BoundedNumber) else np.float32(len(values))
        )
        unit = x / root(mean)
        return unit * unit - unit * x + x

    expected = formula(x, lambda a: a.sum(axis=0), lambda a: a.sqrt())
    got = formula(f32, lambda a: a.sum(dtype=np.float32), np.sqrt)
    assert got.dtype == np.float32
    turned, again = np.cos(f32) * np.sin(f32), x.cos() * x.sin()
    for computed, exact in ((got, expected), (turned, again)):
        assert compare(computed, Bounded(exact.value, exact.error)).ratio <= 1


def test_errors_of_operands_widen_the_bounds_by_what_they_do() -> None:
    problem = draw_problem(parse_case_id("train/f32/B1.T20.S24.N4.K2.H8.V8/causal-o4/softcap5/sinks/normal/s0"))
    rng = np.random.default_rng(0)
    wide = {name: getattr(problem, name).astype(np.float64) for name in ("q", "k", "v")}
    errors = {name: 1e-4 * np.abs(x) for name, x in wide.items()}
    moved = {name: x + errors[name] * rng.choice([-1, 1], x.shape) for name, x in wide.items()}
    there = dataclasses.replace(problem, **moved)
    inexact = OperandErrors("f32", **errors)
    near = compute_expectation(dataclasses.replace(problem, **wide), Arithmetic(), inexact=inexact)
    exact = OperandErrors("f32", **{name: np.zeros_like(x) for name, x in wide.items()})
    far = compute_expectation(there, Arithmetic(), inexact=exact).forward
    sharp = compute_expectation(dataclasses.replace(problem, **wide), Arithmetic(), inexact=exact)
    for name in ("out", "logsumexp", "max_logits"):
        assert compare(far[name].value, near.forward[name]).ratio < 1
        assert compare(far[name].value, sharp.forward[name]).ratio > 20


def judged(front_end: Callable[..., Any] | None, case: Case) -> list[Record]:
    job = Job(dataclasses.replace(DOT, front_end=front_end), case, (CHECKS_BY_NAME["front_end"],))
    return Runner(Settings()).judge(job)


@pytest.mark.parametrize("case", F32, ids=str)
def test_the_reference_front_end_passes(case: Case) -> None:
    found = judged(None, case)
    names = {record.observable for record in found}
    assert {"out", "dq_raw", "dk_raw"} <= names
    assert ("dv_raw" in names) != ("shared" in case.steps)
    assert {record.verdict for record in found} == {PASS}


def test_a_front_end_of_the_users_is_judged_in_its_place() -> None:
    def without_norm(steps: tuple[str, ...], *args: Any, **options: Any) -> Any:
        return front_end_reference.apply_front_end(tuple(s for s in steps if s != "rms"), *args, **options)

    found = judged(without_norm, select_front_end_cases("quick", 0)[0])
    assert {record.observable for record in found if record.verdict == FAIL} >= {"out", "dq_raw", "dk_raw"}


def test_gradients_stop_where_a_front_end_stops_them() -> None:
    def stopped(steps: tuple[str, ...], q: jax.Array, k: jax.Array, v: Any, **options: Any) -> Any:
        return front_end_reference.apply_front_end(steps, q, jax.lax.stop_gradient(k), v, **options)

    found = judged(stopped, select_front_end_cases("quick", 0)[0])
    assert {record.observable for record in found if record.verdict == FAIL} == {"dk_raw"}


def test_a_case_with_a_front_end_has_its_operands() -> None:
    case = select_front_end_cases("quick", 0)[1]
    raw, problem = draw_raw_projections(case), draw_problem(case)
    np.testing.assert_array_equal(problem.v, raw.k)
    assert not np.array_equal(problem.k, raw.k)
    assert jnp.asarray(problem.q).dtype == jnp.float32
