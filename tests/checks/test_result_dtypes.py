"""Tests that each gradient must have the dtype of its operand, and each residual f32, even if values are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cases.case_id import parse_case_id
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import RED, Record
from tests.kernels import naive

_SHAPE = "B1.T24.S24.N4.K2.H16.V16"
NARROW = f"train/bf16/{_SHAPE}/full/normal/s0"


def judge(function: Callable[..., Any], *checks: str, case: str = NARROW) -> list[Record]:
    planned = run_plan.plan_case(
        build_implementation(function, "kernel"), parse_case_id(case), [CHECKS_BY_NAME[name] for name in checks]
    )
    return [record for record in Runner(Settings(), confirmed=0).run(planned.jobs) if record.verdict in RED]


def widen_gradients(names: tuple[str, ...]) -> Callable[..., Any]:
    """Build the correct function with gradients of these operands in f32, whatever the operands' dtype is."""

    @declare(behind_mask="finite")
    def attention(q: Any, k: Any, v: Any) -> Any:
        return call(q, k, v)

    @jax.custom_vjp
    def call(q: Any, k: Any, v: Any) -> Any:
        return naive.attention(q, k, v)

    def pull(operands: Any, do: Any) -> Any:
        wide = [x.astype(jnp.float32) for x in operands]
        pulled = jax.vjp(naive.attention, *wide)[1](do.astype(jnp.float32))
        named = zip(("q", "k", "v"), pulled, operands, strict=True)
        return tuple(x if name in names else x.astype(operand.dtype) for name, x, operand in named)

    call.defvjp(lambda *operands: (call(*operands), operands), pull)
    return attention


def test_a_gradient_in_another_dtype_than_its_operand_fails_though_its_values_are_right() -> None:
    found = judge(widen_gradients(("q", "k")), "gradients")
    assert {record.observable for record in found} == {"dq", "dk"}
    for record in found:
        operand = record.observable.removeprefix("d")
        assert record.reason == f"dtype is float32, must be that of {operand}, bfloat16"


def test_gradients_in_the_dtypes_of_their_operands_pass() -> None:
    assert judge(widen_gradients(()), "gradients", "primal") == []


@pytest.mark.parametrize(("declared", "red"), [({}, {"logsumexp", "max_logits"}), ({"residuals": "input"}, set())])
def test_residuals_are_f32_unless_another_dtype_is_declared(declared: dict[str, Any], red: set[str]) -> None:
    def attention(q: Any, k: Any, v: Any, *, save_residuals: bool = False) -> Any:
        out, residuals = naive.attention(q, k, v, save_residuals=True)
        residuals = {name: x.astype(q.dtype) for name, x in residuals.items()}
        return (out, residuals) if save_residuals else out

    given = declare(behind_mask="finite", **declared)(attention)
    found = [record for record in judge(given, "residuals") if "dtype" in record.reason]
    assert {record.observable for record in found} == red
    assert all("dtype is bfloat16, must be float32" in record.reason for record in found)


def test_residuals_stay_f32_under_x64() -> None:
    @declare(behind_mask="finite")
    def attention(q: Any, k: Any, v: Any, *, save_residuals: bool = False) -> Any:
        out, residuals = naive.attention(q, k, v, save_residuals=True)
        residuals = {name: x.astype(jnp.result_type(float)) for name, x in residuals.items()}
        return (out, residuals) if save_residuals else out

    found = judge(attention, "first_calls", case=f"train/f32/{_SHAPE}/full/normal/s0")
    assert {record.observable for record in found} == {"logsumexp.x64", "max_logits.x64"}
    assert all("float64" in record.reason for record in found)
