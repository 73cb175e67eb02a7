"""Tests of the check `forms`: unusual arguments pass, are refused, or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from cases.case_id import parse_case_id
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import FAIL, PASS, UNSUPPORTED
from tests.kernels import naive

_SHAPE = "B1.T24.S24.N2.K2.H16.V16"
WINDOW = f"train/f32/{_SHAPE}/window-l5-r2/normal/s0"
DENSE = f"train/f32/{_SHAPE}/dense-d60/normal/s0"
SCALED = f"train/f32/{_SHAPE}/full/scale0.3/normal/s0"
BIASED = f"train/f32/{_SHAPE}/full/bias/normal/s0"
CAUSAL = f"train/f32/{_SHAPE}/causal/normal/s0"


def judge_forms(function: Callable[..., Any], case: str) -> dict[str, tuple[str, str]]:
    """Return verdict and reason by form."""
    planned = run_plan.plan_case(
        build_implementation(function, "kernel"), parse_case_id(case), [CHECKS_BY_NAME["forms"]]
    )
    found = Runner(Settings(), confirmed=0).run(planned.jobs)
    return {record.observable.removeprefix("out."): (record.verdict, record.reason) for record in found}


def build_function(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """Build the correct function with some arguments misread."""

    @declare(behind_mask="finite")
    def function(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return naive.attention(
            q, k, v, **{name: changes[name](x) if name in changes else x for name, x in options.items()}
        )

    return function


def keep_first_row(mask: Any) -> Any:
    return jnp.where(jnp.arange(24)[:, None] == 0, mask, True)


@pytest.mark.parametrize("case", [WINDOW, DENSE, SCALED, BIASED, CAUSAL])
def test_what_is_taken_for_what_it_means_passes(case: str) -> None:
    found = judge_forms(build_function(), case)
    assert found
    assert {verdict for verdict, _ in found.values()} == {PASS}


@pytest.mark.parametrize(
    ("case", "change", "caught"),
    [
        (WINDOW, {"window": lambda x: x if isinstance(x, tuple) else None}, {"window_list"}),
        (WINDOW, {"window": lambda x: x if isinstance(x[0], int) else None}, {"window_numpy"}),
        (CAUSAL, {"causal": lambda x: x is True}, {"causal_numpy"}),
        (
            SCALED,
            {"scale": lambda x: x if isinstance(x, float) else None},
            {"scale_int", "scale_numpy", "scale_jax", "scale_traced"},
        ),
        (SCALED, {"scale": lambda x: x or None}, {"scale_zero"}),
        (SCALED, {"scale": lambda x: abs(x)}, {"scale_below_zero"}),
        (DENSE, {"mask": lambda x: x if x.shape[-2] > 1 else keep_first_row(x)}, {"mask_shared_by_rows"}),
        (BIASED, {"bias": lambda x: x if x.dtype == jnp.float32 else 0 * x}, {"bias_narrow"}),
        (BIASED, {"bias": lambda x: x if x.ndim == 4 else x.T}, {"bias_of_rank_two"}),
        (BIASED, {"bias": lambda x: x if x.ndim > 1 else 0 * x}, {"bias_of_rank_one"}),
        (DENSE, {"mask": lambda x: x if x.ndim > 1 else x[:, None]}, {"mask_of_rank_one"}),
        *(
            (case, {name: change}, {f"{name}_of_{form}", f"{name}_of_{form}_beside_groups"})
            for case, name in ((DENSE, "mask"), (BIASED, "bias"))
            for form, change in (
                ("rank_three", lambda x: x[:, None] if x.ndim == 3 else x),
                ("row_of_batch", lambda x: x.swapaxes(0, 1) if x.shape[:2] == (2, 1) else x),
            )
        ),
    ],
)
def test_what_is_taken_for_something_else_fails(
    case: str, change: dict[str, Callable[[Any], Any]], caught: set[str]
) -> None:
    found = judge_forms(build_function(**change), case)
    assert {form for form, (verdict, _) in found.items() if verdict == FAIL} == caught


@pytest.mark.parametrize(("reads_key_head", "verdict"), [(False, PASS), (True, FAIL)])
def test_a_mask_mod_gets_the_query_head(reads_key_head: bool, verdict: str) -> None:
    @declare(behind_mask="finite")
    def function(q: Any, k: Any, v: Any, *, mask_mod: Any = None) -> Any:
        b, n, i, j = jnp.ogrid[: q.shape[0], : q.shape[2], : q.shape[1], : k.shape[1]]
        head = n // (q.shape[2] // k.shape[2]) if reads_key_head else n
        return naive.attention(q, k, v, mask=mask_mod(b, head, i, j))

    assert judge_forms(function, CAUSAL)["mask_mod_by_head"][0] == verdict


def test_a_result_that_is_right_and_wider_is_shown_and_does_not_fail() -> None:
    @declare(behind_mask="finite")
    def function(q: Any, k: Any, v: Any, *, scale: Any = None) -> Any:
        out = naive.attention(q, k, v, scale=scale)
        return out if scale is None else out * jnp.ones_like(scale)

    found = judge_forms(function, SCALED)
    reason = "the argument makes the result float32, where q is bfloat16"
    assert found["scale_numpy"] == found["scale_jax"] == (UNSUPPORTED, reason)


def test_what_is_refused_is_shown_and_does_not_fail() -> None:
    def tuples(window: Any) -> Any:
        if not isinstance(window, tuple):
            raise TypeError("window must be a tuple")
        return window

    found = judge_forms(build_function(window=tuples), WINDOW)
    assert found["window_list"] == (UNSUPPORTED, "TypeError: window must be a tuple")
    assert found["window_numpy"][0] == PASS
