"""Test that the check `program` says what products of f32 operands would be on a chip."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.lax import DotAlgorithmPreset

from cases.case import Case
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.conformity import CONFORMS, DOES_NOT_CONFORM, NOT_JUDGED, compute_conformity, summarize_implementations
from reports.record_groups import group_by_implementation
from reports.records import DEFAULT_PRECISION, FAIL, PASS, RED, UNJUDGED, Record
from tests.reports.report_samples import make_run_info

_CASE = Case(q_length=16, kv_length=16, num_q_heads=1, num_kv_heads=1, head_dim=16, v_head_dim=16)


def _attend(first: Any, second: Any, q: Any, k: Any, v: Any) -> Any:
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision=first) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v, precision=second)


def _judge(
    first: Any, second: Any, checks: Sequence[str] = ("program",), *, factor: float = 1.0, **declared: Any
) -> list[Record]:
    attend = functools.partial(_attend, first, second)
    implementation = build_implementation(declare(**declared)(lambda q, k, v: factor * attend(q, k, v)), "kernel")
    planned = run_plan.plan_case(implementation, _CASE, [CHECKS_BY_NAME[check] for check in checks])
    return Runner(Settings(), confirmed=0).run(planned.jobs)


def _judge_products(first: Any, second: Any) -> Record:
    return next(record for record in _judge(first, second) if record.observable == "products")


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


@pytest.mark.parametrize(
    ("precision", "declaration"),
    [
        (DotAlgorithmPreset.BF16_BF16_F32, "bf16"),
        (DotAlgorithmPreset.BF16_BF16_F32_X3, "tf32"),
        (jax.lax.Precision.HIGH, "tf32"),
    ],
)
def test_a_function_that_requests_less_than_f32_is_told_what_to_declare(precision: Any, declaration: str) -> None:
    record = _judge_products(precision, precision)
    assert record.verdict == FAIL
    assert f'products="{declaration}"' in record.reason
    assert precision.name in record.reason
    assert DEFAULT_PRECISION not in record.figures
    found = _judge(precision, precision, ("program", "forward"), products=declaration)
    assert compute_conformity(found) == CONFORMS
    wrong = _judge(precision, precision, ("program", "forward"), products=declaration, factor=1.1)
    assert compute_conformity(wrong) == DOES_NOT_CONFORM


def test_a_declaration_that_is_too_strict_for_what_is_requested_fails() -> None:
    preset = DotAlgorithmPreset.BF16_BF16_F32
    (record,) = (x for x in _judge(preset, preset, products="tf32") if x.observable == "products")
    assert record.verdict == FAIL
    assert 'products="bf16"' in record.reason


def test_a_setting_of_jax_is_no_request() -> None:
    with jax.default_matmul_precision("high"):
        assert _judge_products(None, None).figures[DEFAULT_PRECISION] == 1


@pytest.mark.parametrize("name", ["TF32_TF32_F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X9"])
def test_a_precision_that_this_platform_refuses_leaves_the_kernel_unjudged(name: str) -> None:
    preset = DotAlgorithmPreset[name]
    found = _judge(preset, preset, ("program", "forward", "gradients"))
    assert not any(record.verdict in RED for record in found)
    assert {record.verdict for record in found if record.check != "program"} == {UNJUDGED}
    assert all(name in record.reason for record in found if record.verdict == UNJUDGED)
    assert compute_conformity(found) == NOT_JUDGED


def test_what_runs_beside_a_refused_precision_is_judged_and_the_verdict_counts_the_rest() -> None:
    def attend(factor: float, q: Any, k: Any, v: Any) -> Any:
        refused = DotAlgorithmPreset.TF32_TF32_F32_X3 if q.dtype == jnp.float32 else None
        return (_attend(refused, refused, q, k, v) * factor).astype(q.dtype)

    def judge(factor: float) -> list[Record]:
        implementation = build_implementation(lambda q, k, v: attend(factor, q, k, v), "kernel")
        cases = (_CASE, dataclasses.replace(_CASE, dtype="f16"))
        jobs = [run_plan.plan_case(implementation, case, [CHECKS_BY_NAME["forward"]]).jobs[0] for case in cases]
        return Runner(Settings(), confirmed=0).run(jobs)

    (implementation,) = summarize_implementations(group_by_implementation(found := judge(1.0)), make_run_info())
    assert [record.verdict for record in found] == [UNJUDGED, PASS]
    assert "1 comparison unjudged" in implementation.text
    assert compute_conformity(judge(1.2)) == DOES_NOT_CONFORM
