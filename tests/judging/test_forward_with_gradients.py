"""One program computes the forward pass and the gradients of a small case, and judges both as two programs would."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from conformance import declare
from conformance.check_api.subject import Subject
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import build_implementation
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.truth.tolerances import load_default_tolerances
from impls.contract.implementation import Implementation
from reports.records import PASS
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


@declare(empty_rows="mean", behind_mask="finite")
def average_over_empty_rows(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(logits if mask is None else jnp.where(mask, logits, -1e30))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


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
    assert together["forward", "out"] == PASS
    assert (set(together.values()) == {PASS}) == (function is right)


def test_one_program_is_used_where_gradients_will_be_asked_for() -> None:
    for needed in (True, False):
        subject = Subject(Executor(build(right)), CASE, load_default_tolerances(), needs_gradients=needed)
        assert (subject._forward_and_gradients is not None) == needed
        assert subject.judge("out", subject.forward.values["out"], subject.expectation.forward["out"]).verdict == PASS
        for name, expected in subject.get_expected_gradients("random").items():
            assert subject.judge(name, subject.gradients("random").values[name], expected).verdict == PASS


def test_other_declarations_get_the_gradients_of_their_own_cotangents() -> None:
    """Check rows without keys: where they are not judged, their cotangent is zero."""
    empty = parse_case_id("train/f32/B1.T9.S9.N2.K2.H4.V4/causal-o-4/normal/s0")
    declared = build(average_over_empty_rows)
    before = Subject(Executor(declared), empty, load_default_tolerances(), needs_gradients=True)
    before.gradients("random")
    undefined = dataclasses.replace(declared, empty_rows="undefined")
    after = before.with_declarations(undefined)
    fresh = Subject(Executor(undefined), empty, load_default_tolerances(), needs_gradients=True)
    assert not np.array_equal(before.cotangents["random"].out, after.cotangents["random"].out)
    for name, value in fresh.gradients("random").values.items():
        np.testing.assert_array_equal(after.gradients("random").values[name], value)
