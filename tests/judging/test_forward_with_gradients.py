"""One program computes the forward pass and the gradients of a small case, and judges both as two programs would."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from cases.case import parse_case_id
from conformance import declare, records
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS_BY_NAME
from conformance.contract import Implementation
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import build_implementation
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.truth.tolerances import load_default_tolerances
from tests.kernels import naive

CASE = parse_case_id("train/f32/B2.T37.S37.N4.K2.H16.V16/causal/normal/s0")
CHECKS = tuple(CHECKS_BY_NAME[name] for name in ("forward", "primal", "gradients"))


@declare(behind_mask="finite")
def right(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    return naive.attention(q, k, v, causal=causal)


@jax.custom_vjp
def _raise_in_backward(x: jax.Array) -> jax.Array:
    return x


def _backward(residual: None, dx: jax.Array) -> tuple[jax.Array]:
    raise ValueError("no backward pass")


_raise_in_backward.defvjp(lambda x: (x, None), _backward)


@declare(behind_mask="finite")
def raises_in_backward(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    return _raise_in_backward(naive.attention(q, k, v, causal=causal))


@jax.custom_vjp
def _double_in_forward(x: jax.Array) -> jax.Array:
    return x


_double_in_forward.defvjp(lambda x: (2 * x, None), lambda residual, dx: (dx,))


@declare(behind_mask="finite")
def wrong_under_differentiation(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    return _double_in_forward(naive.attention(q, k, v, causal=causal))


def build(function: Any) -> Implementation:
    return build_implementation(function, function.__name__)


def judge(function: Any, *, small: bool, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], str]:
    if not small:
        monkeypatch.setattr("conformance.check_api.subject._MAX_PAIRS_OF_ONE_PROGRAM", 0)
    found = Runner(Settings()).judge(Job(build(function), CASE, CHECKS))
    return {(record.check, record.observable): record.verdict for record in found}


@pytest.mark.parametrize("function", [right, raises_in_backward, wrong_under_differentiation])
def test_verdicts_are_those_of_separate_programs(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    together = judge(function, small=True, monkeypatch=monkeypatch)
    assert together == judge(function, small=False, monkeypatch=monkeypatch)
    assert together["forward", "out"] == records.PASS
    assert (set(together.values()) == {records.PASS}) == (function is right)


def test_one_program_has_the_results_of_two() -> None:
    subject = Subject(Executor(build(right)), CASE, load_default_tolerances(), needs_gradients=True)
    alone = Subject(Executor(build(right)), CASE, load_default_tolerances())
    assert subject._forward_and_gradients is not None
    assert alone._forward_and_gradients is None
    np.testing.assert_allclose(subject.forward.values["out"], alone.forward.values["out"], rtol=1e-5, atol=1e-6)
    for name, value in alone.gradients("random").values.items():
        np.testing.assert_allclose(subject.gradients("random").values[name], value, rtol=1e-4, atol=1e-5)
