"""Tests of second derivatives, and of rows that have neither a key nor a sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cases.case_id import parse_case_id
from conformance import declare
from conformance.check_api.subject import Subject
from conformance.checks.differentiation import check_second_derivatives
from conformance.checks.limits import check_limits
from conformance.execution.executor import Executor
from conformance.execution.implementation_registry import find_implementation
from conformance.execution.plain_functions import build_implementation
from conformance.truth import tolerances
from reports.records import FAIL, PASS, UNSUPPORTED
from tests.kernels import naive

_CASE = "train/f32/B1.T24.S24.N2.K2.H16.V16/full/normal/s0"
_SUNK = "train/f32/B1.T24.S24.N2.K2.H16.V16/full/seg/sinks/normal/s0"


def build_subject(function: Callable[..., Any], case: str) -> Subject:
    return Subject(
        Executor(build_implementation(function, "kernel")), parse_case_id(case), tolerances.load_default_tolerances()
    )


def build_function(pull: Callable[..., Any]) -> Callable[..., Any]:
    """Build the correct function with a custom backward pass `pull(operands, cotangent)`."""

    @declare(behind_mask="finite")
    def function(q: Any, k: Any, v: Any) -> Any:
        call = jax.custom_vjp(naive.attention)
        call.defvjp(lambda *x: (naive.attention(*x), x), pull)
        return call(q, k, v)

    return function


def right(operands: Any, cotangent: Any) -> Any:
    return jax.vjp(naive.attention, *operands)[1](cotangent)


def constant(operands: Any, cotangent: Any) -> Any:
    return right(jax.tree.map(lax.stop_gradient, operands), cotangent)


def constant_for_values(operands: Any, cotangent: Any) -> Any:
    q, k, v = operands
    return right((q, k, lax.stop_gradient(v)), cotangent)


@pytest.mark.parametrize(
    ("pull", "wrong"),
    [(right, set()), (constant, {"second.dq", "second.dk", "second.dv"}), (constant_for_values, {"second.dv"})],
)
def test_what_is_computed_must_be_right(pull: Callable[..., Any], wrong: set[str]) -> None:
    found = list(check_second_derivatives(build_subject(build_function(pull), _CASE)))
    assert {judgement.observable for judgement in found} == {"second.dq", "second.dk", "second.dv"}
    assert {judgement.observable for judgement in found if judgement.verdict == FAIL} == wrong


def test_what_is_refused_is_shown() -> None:
    def refuse(saved: None, cotangent: Any) -> Any:
        raise NotImplementedError("first derivatives only")

    def once(operands: Any, cotangent: Any) -> Any:
        passed_on = jax.custom_vjp(lambda x: x)
        passed_on.defvjp(lambda x: (x, None), refuse)
        return right(jax.tree.map(passed_on, operands), cotangent)

    (judgement,) = check_second_derivatives(build_subject(build_function(once), _CASE))
    assert (judgement.observable, judgement.verdict) == ("second", UNSUPPORTED)
    assert judgement.reason == "NotImplementedError: first derivatives only"


@pytest.mark.parametrize(("guarded", "verdict"), [(True, PASS), (False, FAIL)])
def test_a_row_without_keys_whose_sink_is_minus_infinity_is_empty(guarded: bool, verdict: str) -> None:
    @declare(behind_mask="finite", empty_rows="zero")
    def function(q: Any, k: Any, v: Any, *, segment_ids: Any = None, sinks: Any = None) -> Any:
        z = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * q.shape[-1] ** -0.5
        if segment_ids is not None:
            same = segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :]
            z = jnp.where(same, z, -jnp.inf)
        top = z.max(axis=-1, keepdims=True)
        if sinks is not None:
            top = jnp.maximum(top, sinks[:, None, None])
        if guarded or sinks is None:
            top = jnp.where(jnp.isfinite(top), top, 0)
        weights = jnp.exp(z - lax.stop_gradient(top))
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sinks[:, None, None] - lax.stop_gradient(top))
        return jnp.einsum("bhts,bshd->bthd", weights / jnp.where(total == 0, 1, total), v, precision="highest")

    found = {judgement.observable: judgement.verdict for judgement in check_limits(build_subject(function, _SUNK))}
    assert found["out.nothing_left"] == verdict
    assert found["out.no_sinks"] == PASS


def test_sinks_of_minus_infinity_are_not_moved() -> None:
    case = parse_case_id("train/f32/B1.T24.S24.N4.K4.H16.V16/full/sinksedge/normal/s0")
    subject = Subject(Executor(find_implementation("dot_product")), case, tolerances.load_default_tolerances())
    found = {one.observable: one.verdict for one in check_second_derivatives(subject)}
    assert found["second.dsinks"] == PASS
