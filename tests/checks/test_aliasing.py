"""Tests of the check `aliasing`.

A kernel that modifies an operand fails. One that refuses NumPy arrays is given JAX arrays.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from cases.case_id import parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import ERROR, FAIL, PASS, Record
from tests.kernels import naive, serving_attention

CASE = "train/f32/B1.T8.S8.N2.K2.H16.V16/full/normal/s0"


class WrongType(Exception):
    """An error as type checkers raise it."""


def judge(function: Callable[..., Any], case: str = CASE) -> dict[str, Record]:
    planned = run_plan.plan_case(
        build_implementation(function, "kernel"), parse_case_id(case), [CHECKS_BY_NAME["aliasing"]]
    )
    return {record.observable: record for record in Runner(Settings()).run(planned.jobs)}


def typed(q: Any, k: Any, v: Any) -> Any:
    if not all(isinstance(x, jax.Array) for x in (q, k, v)):
        raise WrongType("a JAX array is needed")
    return naive.attention(q, k, v)


def writes(q: Any, k: Any, v: Any) -> Any:
    if isinstance(q, np.ndarray):
        q *= 2
    return naive.attention(q, k, v)


def deletes(q: Any, k: Any, v: Any) -> Any:
    out = typed(q, k, v)
    if not isinstance(q, jax.core.Tracer):
        q.delete()
    return out


def deletes_from_the_third_call_on() -> Callable[..., Any]:
    calls = []

    def kernel(q: Any, k: Any, v: Any) -> Any:
        out = typed(q, k, v)
        if not isinstance(q, jax.core.Tracer):
            calls.append(out)
            if len(calls) > 2:
                q.delete()
        return out

    return kernel


def writes_after_it_returned(q: Any, k: Any, v: Any) -> Any:
    out = naive.attention(q, k, v)

    def write() -> None:
        jax.block_until_ready(out)
        time.sleep(0.1)
        q.fill(0)

    if isinstance(q, np.ndarray):
        threading.Thread(target=write).start()
    return out


def test_a_library_that_checks_types_is_given_what_it_accepts() -> None:
    found = judge(typed)
    assert {record.verdict for record in found.values()} == {PASS}
    assert found["operands.eager"].reason == "given JAX arrays, since NumPy arrays are refused (WrongType)"
    assert found["operands.jit"].reason == ""


@pytest.mark.parametrize("function", [writes, deletes, deletes_from_the_third_call_on(), writes_after_it_returned])
def test_who_changes_an_operand_fails(function: Callable[..., Any]) -> None:
    found = judge(function)
    assert found["operands.eager"].verdict == FAIL
    assert found["operands.eager"].reason == "the call writes into its operands, or deletes them: ['q']"
    assert found["operands.jit"].verdict == PASS


def test_what_raises_whatever_it_is_given_is_an_error() -> None:
    def raises(q: Any, k: Any, v: Any) -> Any:
        raise WrongType("never")

    assert {record.verdict for record in judge(raises).values()} == {ERROR}


def writes_into_mask(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None) -> Any:
    if causal and isinstance(mask, np.ndarray):
        mask &= np.tri(*mask.shape[-2:]).astype(bool)
    return naive.attention(q, k, v, causal=causal, mask=mask)


def test_a_mask_that_is_an_array_is_an_operand_too() -> None:
    found = judge(writes_into_mask, CASE.replace("full", "causal"))
    assert found["operands.eager"].verdict == found["operands.jit"].verdict == PASS
    assert found["operands.eager.mask"].verdict == FAIL
    assert found["operands.eager.mask"].reason == "the call writes into its operands, or deletes them: ['mask']"
    assert found["operands.jit.mask"].verdict == PASS


def test_a_call_without_mask_and_operands_is_asked_too() -> None:
    def writes_if_plain(q: Any, k: Any, v: Any, *, causal: bool = False, sinks: Any = None) -> Any:
        return (naive.attention if causal else writes)(q, k, v)

    found = judge(writes_if_plain, CASE.replace("full", "causal"))
    failed = {name for name, record in found.items() if record.verdict == FAIL}
    assert failed == {"operands.eager.plain"}


STATIC = ("window", "scale", "soft_cap", "save_residuals")
OWN = "prefill/f32/B2.T13.S20.N2.K2.H16.V16/own-l15-20-16/paged16-q13-1/normal/s0"


@pytest.mark.parametrize("donated", ["q", "k_pages"])
def test_who_donates_stored_operands_deletes_them(donated: str) -> None:
    # XLA deletes what it can reuse: q for `out` of the same shape, and pages for the pages that a call returns.
    function = serving_attention.paged if donated == "q" else serving_attention.writing
    program = jax.jit(function, donate_argnames=donated, static_argnames=STATIC)
    kernel = functools.wraps(function)(lambda *arrays, **others: program(*arrays, **others))
    found = {name: record.verdict for name, record in judge(kernel, OWN).items()}
    wrong = {"operands.eager", "operands.eager.plain"} if donated == "q" else {"operands.eager", "operands.eager.pages"}
    assert wrong <= {name for name, verdict in found.items() if verdict == FAIL}
    assert {verdict for name, verdict in found.items() if "jit" in name} == {PASS}


@pytest.mark.parametrize("function", [serving_attention.paged, serving_attention.writing])
def test_who_keeps_stored_operands_passes(function: Callable[..., Any]) -> None:
    assert {record.verdict for record in judge(function, OWN).values()} == {PASS}
