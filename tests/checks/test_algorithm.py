"""The check `algorithm` sees errors below one rounding, and accuses no kernel for its constants or its rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cases.case import Case
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import BEYOND_ROUNDING, FAIL, PASS, UNJUDGED, Record

_CASE = Case(dtype="bf16", mask="causal", q_length=32, kv_length=32, num_q_heads=2, num_kv_heads=1)


def attend(weigh: Callable[[Any], Any], q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attend with weights `[B, N, T, S]` that a function computes from logits in f32."""
    k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k, precision="highest") * q.shape[-1] ** -0.5
    if causal:
        logits = jnp.where(jnp.tri(logits.shape[-2], logits.shape[-1], dtype=bool), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", weigh(logits), v, precision="highest").astype(q.dtype)


def judge(function: Any, checks: Sequence[str] = ("algorithm",), case: Case = _CASE) -> list[Record]:
    planned = run_plan.plan_case(build_implementation(function, "kernel"), case, [CHECKS_BY_NAME[x] for x in checks])
    return [r for r in Runner(Settings(), confirmed=0).run(planned.jobs) if r.check in checks]


def verdicts(records: Sequence[Record]) -> dict[str, str]:
    return {record.observable: record.verdict for record in records}


def in_base_two(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    def weigh(logits: Any) -> Any:
        logits = logits * math.log2(math.e)
        weights = jnp.exp2(logits - lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
        return weights / weights.sum(axis=-1, keepdims=True)

    return attend(weigh, q, k, v, causal)


@declare(softmax="input", group_sums="input")
def in_bf16(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    def weigh(logits: Any) -> Any:
        return jax.nn.softmax(logits.astype(q.dtype), axis=-1)

    return attend(weigh, q, k, v, causal)


@declare(scaled_q="base2")
def with_scaled_queries(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    q = q * (math.log2(math.e) * q.shape[-1] ** -0.5)  # in bf16, where the constant is off by 2^-9

    def weigh(logits: Any) -> Any:
        logits = logits * q.shape[-1] ** 0.5
        weights = jnp.exp2(logits - lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
        return weights / weights.sum(axis=-1, keepdims=True)

    return attend(weigh, q, k, v, causal)


@pytest.mark.parametrize("kernel", [in_base_two, in_bf16, with_scaled_queries])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_rounding_and_rounded_constants_are_no_error(kernel: Any, dtype: str) -> None:
    assert set(verdicts(judge(kernel, case=dataclasses.replace(_CASE, dtype=dtype))).values()) == {PASS}


def with_epsilon(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    def weigh(logits: Any) -> Any:
        weights = jnp.exp(logits - lax.stop_gradient(logits.max(axis=-1, keepdims=True)))
        return weights / (weights.sum(axis=-1, keepdims=True) + 1e-4)

    return attend(weigh, q, k, v, causal)


def test_an_error_below_one_rounding_is_seen_where_other_checks_see_nothing() -> None:
    found = judge(with_epsilon, ("forward", "gradients", "algorithm"))
    by_check = {
        check: verdicts([r for r in found if r.check == check]) for check in ("forward", "gradients", "algorithm")
    }
    assert by_check["forward"]["out"] == by_check["gradients"]["dv"] == PASS
    assert by_check["algorithm"]["out"] == by_check["algorithm"]["dv"] == FAIL
    wrong = next(r for r in found if (r.check, r.observable) == ("algorithm", "out"))
    assert wrong.figures[BEYOND_ROUNDING] == 0
    assert wrong.reason.startswith("in float64, ratio ")


def without_scale(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    return attend(lambda logits: jax.nn.softmax(1.1 * logits, axis=-1), q, k, v, causal)


def test_a_plain_error_is_beyond_rounding() -> None:
    wrong = next(record for record in judge(without_scale) if record.observable == "out")
    assert (wrong.verdict, wrong.figures[BEYOND_ROUNDING]) == (FAIL, 1)


def by_bits(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    def weigh(logits: Any) -> Any:
        top = lax.stop_gradient(logits.max(axis=-1, keepdims=True))
        bits = lax.bitcast_convert_type(jnp.exp(logits - top), jnp.int32)
        weights = lax.bitcast_convert_type(bits, jnp.float32)
        return weights / weights.sum(axis=-1, keepdims=True)

    return attend(weigh, q, k, v, causal)


def test_a_program_that_looks_at_bits_is_unjudged_with_the_line() -> None:
    (found,) = judge(by_bits)
    assert (found.observable, found.verdict) == ("all", UNJUDGED)
    assert "bitcast_convert_type" in found.reason
    assert "test_algorithm.py:" in found.reason
