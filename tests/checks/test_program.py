"""Test that the check `program` says what products of f32 operands would be on a chip."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.records import DEFAULT_PRECISION, FAIL, PASS, Record

_CASE = Case(q_length=16, kv_length=16, num_q_heads=1, num_kv_heads=1, head_dim=16, v_head_dim=16)


def _attend(first: str | None, second: str | None, q: Any, k: Any, v: Any) -> Any:
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision=first) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v, precision=second)


def _judge_products(first: str | None, second: str | None) -> Record:
    attend = functools.partial(_attend, first, second)
    implementation = build_implementation(lambda q, k, v: attend(q, k, v), "kernel")
    planned = run_plan.plan_case(implementation, _CASE, [CHECKS_BY_NAME["program"]])
    found = Runner(Settings(), confirmed=0).run(planned.jobs)
    return next(record for record in found if record.observable == "products")


def test_a_function_that_leaves_all_its_products_to_jax_passes_with_a_note() -> None:
    record = _judge_products(None, None)
    assert record.verdict == PASS
    assert record.figures[DEFAULT_PRECISION] == 1
    assert "bf16" in record.reason
    assert "tf32" in record.reason


def test_a_function_that_requests_f32_passes_without_one() -> None:
    record = _judge_products("highest", "highest")
    assert (record.verdict, record.reason) == (PASS, "")
    assert DEFAULT_PRECISION not in record.figures


def test_a_mixture_fails() -> None:
    record = _judge_products("highest", None)
    assert record.verdict == FAIL
    assert DEFAULT_PRECISION not in record.figures
