"""Tests of the check `first_calls`: each call of a first minute passes, is refused, or fails by its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.check_api.scopes import FIRST, ImplementationGrids
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import ERROR, FAIL, PASS, RED, UNSUPPORTED
from tests.kernels import naive

SUBCHECKS = {
    "vmap",
    "numpy_transposed",
    "numpy_strided",
    "second_scale",
    "one_causal_query",
    "open_window",
    "window",
    "bias_shared_by_heads",
    "bias_shared_by_keys",
    "x64",
}


def judge_first_calls(function: Callable[..., Any]) -> dict[str, set[str]]:
    """Return the verdicts by subcheck."""
    implementation = build_implementation(function, "kernel")
    planned = run_plan.plan_run([implementation], level="smoke", checks=[CHECKS_BY_NAME["first_calls"]])
    verdicts: dict[str, set[str]] = {}
    for record in Runner(Settings(), confirmed=0).run(planned.jobs):
        name = record.observable.rpartition(".")[2]  # an error has the name of the subcheck alone
        verdicts.setdefault(name, set()).add(record.verdict)
    return verdicts


def refuse_tracers(q: Any, k: Any, v: Any) -> Any:
    if isinstance(q, jax.core.Tracer) and type(q).__name__ == "BatchTracer":
        raise TypeError("q must be an array")
    return naive.attention(q, k, v)


def read_buffers(q: Any, k: Any, v: Any) -> Any:
    """Read a NumPy operand in the order in which its numbers lie in memory."""
    if isinstance(v, np.ndarray) and not v.flags.c_contiguous:
        v = v.ravel(order="K").reshape(v.shape)
    return naive.attention(q, k, v)


def build_scale_cache() -> Callable[..., Any]:
    cached: dict[Any, Any] = {}

    def keep_first_scale(q: Any, k: Any, v: Any, *, scale: float | None = None) -> Any:
        used = cached.setdefault("scale", scale or q.shape[-1] ** -0.5)
        return naive.attention(q, k, v, scale=used)

    return keep_first_scale


def see_all_with_one_query(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    return naive.attention(q, k, v, causal=causal and q.shape[1] > 1)


def close_open_sides(q: Any, k: Any, v: Any, *, window: Any = None) -> Any:
    if window is not None:
        window = tuple(side or 0 for side in window)
    return naive.attention(q, k, v, window=window)


def widen_the_window_in_the_backward(q: Any, k: Any, v: Any, *, window: Any = None) -> Any:
    out = naive.attention(q, k, v, window=window)
    if window is None or None in window:
        return out
    wider = naive.attention(q, k, v, window=(window[0] + 1, window[1]))
    return wider - jax.lax.stop_gradient(wider - out)


def take_the_shared_bias_for_one_head(q: Any, k: Any, v: Any, *, bias: Any = None) -> Any:
    if bias is not None and bias.shape[1] == 1:
        bias = jnp.where(jnp.arange(q.shape[2])[:, None, None] == 0, bias, 0)
    return naive.attention(q, k, v, bias=bias)


def promote_under_x64(q: Any, k: Any, v: Any) -> Any:
    return naive.attention(q, k, v) * np.float64(1)


@pytest.mark.parametrize(
    ("build", "caught", "verdict"),
    [
        (lambda: refuse_tracers, {"vmap"}, ERROR),
        (lambda: read_buffers, {"numpy_transposed"}, FAIL),
        (build_scale_cache, {"second_scale"}, FAIL),
        (lambda: see_all_with_one_query, {"one_causal_query"}, FAIL),
        (lambda: close_open_sides, {"open_window"}, FAIL),
        (lambda: widen_the_window_in_the_backward, {"window"}, FAIL),
        (lambda: take_the_shared_bias_for_one_head, {"bias_shared_by_heads"}, FAIL),
        (lambda: promote_under_x64, {"x64"}, FAIL),
    ],
)
def test_a_call_that_goes_wrong_fails_by_its_name(
    build: Callable[[], Callable[..., Any]], caught: set[str], verdict: str
) -> None:
    found = judge_first_calls(build())
    red = {name for name, verdicts in found.items() if verdicts & set(RED)}
    assert red == caught
    assert all(verdict in found[name] for name in caught)


def test_a_right_function_passes_and_what_it_does_not_take_is_not_asked() -> None:
    everything = judge_first_calls(naive.attention)
    assert set(everything) == SUBCHECKS
    assert set.union(*everything.values()) == {PASS}
    few = judge_first_calls(lambda q, k, v: naive.attention(q, k, v))
    assert {name for name, verdicts in few.items() if verdicts == {UNSUPPORTED}} == {
        "second_scale",
        "one_causal_query",
        "open_window",
        "window",
        "bias_shared_by_heads",
        "bias_shared_by_keys",
    }
    assert {name for name, verdicts in few.items() if verdicts == {PASS}} == {
        "vmap",
        "numpy_transposed",
        "numpy_strided",
        "x64",
    }


@pytest.mark.parametrize("name", ["dot_product", "block_flash", "block_flash_packed"])
def test_a_kernel_of_ours_passes(name: str) -> None:
    implementation = implementation_registry.find_implementation(name)
    (case,) = FIRST.cases(ImplementationGrids(implementation, "quick", 0))
    planned = run_plan.plan_run([implementation], level="smoke", checks=[CHECKS_BY_NAME["first_calls"]])
    assert [job.case for job in planned.jobs] == [case]
    found = Runner(Settings(), confirmed=0).run(planned.jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.verdict == PASS for record in found)
