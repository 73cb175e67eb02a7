"""Declarations: a right kernel passes with its declaration and fails without, and a wrong kernel fails with it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import pytest

from cases.case import parse_case_id
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.declarations import list_lenient_declarations
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.records import ERROR, FAIL, PASS, RED, UNSUPPORTED, Record
from tests.kernels import naive

SHAPE = "train/f32/B2.T16.S16.N2.K1.H16.V16"
FULL, BIAS = f"{SHAPE}/full/normal/s0", f"{SHAPE}/causal/bias/normal/s0"


def judge(function: Callable[..., Any], case: str, *checks: str, **declared: Any) -> dict[str, Record]:
    """Judge a function on one case, and return the records by check and observable."""
    kernel = build_implementation(declare(behind_mask="finite", **declared)(function), "kernel")
    chosen = [CHECKS_BY_NAME[name] for name in checks or ("forward",)]
    found = Runner(Settings()).run(run_plan.plan_case(kernel, parse_case_id(case), chosen).jobs)
    return {f"{record.check}.{record.observable}": record for record in found}


def list_red(found: Mapping[str, Record]) -> set[str]:
    assert found
    return {name for name, record in found.items() if record.verdict in RED}


def list_named(function: Callable[..., Any], **declared: Any) -> list[str]:
    """Return what the verdict names as declared."""
    return list_lenient_declarations(build_implementation(declare(**declared)(function), "kernel"))


def attend(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    return naive.attention(q, k, v, causal=causal, bias=bias)


def lose_bias_gradient(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    return attend(q, k, v, causal=causal, bias=None if bias is None else jax.lax.stop_gradient(bias))


@jax.custom_vjp
def without_gradient(bias: Any) -> Any:
    return bias


def raise_on_gradient(*_: Any) -> Any:
    raise RuntimeError("there is no gradient of the bias")


without_gradient.defvjp(raise_on_gradient, raise_on_gradient)


def raise_for_bias_gradient(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    return attend(q, k, v, causal=causal, bias=None if bias is None else without_gradient(bias))


def scale_query_gradient(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    q = 1.1 * q - jax.lax.stop_gradient(0.1 * q)
    return lose_bias_gradient(q, k, v, causal=causal, bias=bias)


QKV = ("q", "k", "v")


@pytest.mark.parametrize("kernel", [lose_bias_gradient, raise_for_bias_gradient])
def test_a_gradient_that_is_declared_not_to_exist_is_unsupported(kernel: Callable[..., Any]) -> None:
    checks = ("gradients", "differentiation")
    assert list_red(judge(kernel, BIAS, *checks))
    found = judge(kernel, BIAS, *checks, gradients=QKV)
    assert not list_red(found)
    assert {found[f"gradients.{name}"].verdict for name in ("dq", "dk", "dv")} == {PASS}
    assert found["gradients.dbias"].verdict == UNSUPPORTED
    assert "dbias is not offered" in found["gradients.dbias"].reason
    assert list_named(kernel, gradients=QKV) == ["no dbias"]
    assert "gradients.dq" in list_red(judge(scale_query_gradient, BIAS, "gradients", gradients=QKV))


def test_a_function_without_any_gradient_shows_it() -> None:
    found = judge(attend, BIAS, "gradients", gradients=())
    assert [(name, record.verdict) for name, record in found.items()] == [("gradients.all", UNSUPPORTED)]
    assert list_named(attend, gradients=()) == ["no dq dk dv dbias"]


@pytest.mark.parametrize("wrong", [("q", "biass"), "qkv", ("dq",)])
def test_gradients_are_named_by_operand(wrong: Any) -> None:
    with pytest.raises(ValueError, match="gradients"):
        declare(gradients=wrong)


def refuse_bias(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    if bias is not None:
        raise ValueError("no bias beside a causal mask")
    return attend(q, k, v, causal=causal)


def double_without_bias(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    return 2 * refuse_bias(q, k, v, causal=causal, bias=bias)


def refuse_second_call() -> Callable[..., Any]:
    calls: list[int] = []

    def attention(q: Any, k: Any, v: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("called before")
        return attend(q, k, v)

    return attention


def test_a_value_error_refuses_a_case_only_where_it_is_declared() -> None:
    assert judge(refuse_bias, BIAS)["forward.all"].verdict == ERROR
    refused = judge(refuse_bias, BIAS, refuses="ValueError")["forward.all"]
    assert refused.verdict == UNSUPPORTED
    assert "no bias beside a causal mask" in refused.reason
    assert list_named(refuse_bias, refuses="ValueError") == ['refuses="ValueError"']
    assert not list_red(judge(refuse_bias, FULL, refuses="ValueError"))
    assert judge(double_without_bias, FULL, refuses="ValueError")["forward.out"].verdict == FAIL


def test_a_call_that_was_accepted_before_is_no_refusal() -> None:
    found = judge(refuse_second_call(), FULL, "forward", "calls", refuses="ValueError")
    assert found["forward.out"].verdict == PASS
    assert found["calls.thread"].verdict == ERROR
    assert "called before" in found["calls.thread"].reason
