"""The check `tangents`: declared tangents are judged, those that JAX refuses are an error, and nothing else runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

from cases.case_id import parse_case_id
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging.run_plan import plan_case, plan_run
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import ERROR, FAIL, PASS, RED, UNJUDGED, Record
from tests.bank import PlantedBug
from tests.bank.examination import shows_as_declared
from tests.kernels import naive
from tests.planted.features import tangents

SMALL = "train/f32/B2.T16.S16.N4.K2.H16.V8/causal/softcap2/sinks/biaskey/normal/s0"
ALL = ("out", "logsumexp", "gradients")
DIRECTIONS = {"q", "k", "v", "sinks", "bias", "all", "one"}


def judge(function: Callable[..., Any], case: str = SMALL, **declared: Any) -> list[Record]:
    kernel = build_implementation(declare(behind_mask="finite", **declared)(function), "kernel")
    jobs = plan_case(kernel, parse_case_id(case), [CHECKS_BY_NAME["tangents"]]).jobs
    return Runner(Settings()).run(jobs)


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    save_residuals: bool = False,
) -> Any:
    options = {"soft_cap": soft_cap, "sinks": sinks, "bias": bias, "save_residuals": save_residuals}
    return naive.attention(q, k, v, causal=causal, **options)


@jax.custom_vjp
def differentiate_backward_only(x: Any) -> Any:
    return x


differentiate_backward_only.defvjp(lambda x: (x, None), lambda _, dx: (dx,))


def attend_by_custom_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    save_residuals: bool = False,
) -> Any:
    options = {"soft_cap": soft_cap, "sinks": sinks, "bias": bias, "save_residuals": save_residuals}
    return attend(differentiate_backward_only(q), k, v, causal=causal, **options)


def test_a_correct_function_has_the_tangents_that_it_declares() -> None:
    found = judge(attend, tangents=ALL)
    assert {record.verdict for record in found} == {PASS}
    names = {record.observable for record in found}
    assert {f"{name}.{along}.jvp" for name in ("out", "logsumexp", "out_saved") for along in DIRECTIONS} <= names


@pytest.mark.parametrize("how", ["linearize", "jacfwd", "alone", "jvp_of_grad", "grad_of_jvp"])
def test_the_case_with_every_operand_is_judged_in_further_ways(how: str) -> None:
    kernel = build_implementation(declare(tangents=ALL)(naive.attention), "kernel")
    jobs = plan_run([kernel], level="smoke", checks=[CHECKS_BY_NAME["tangents"]]).jobs
    assert len(jobs) == 1
    found = [record for record in judge_everything(jobs[0]) if record.observable.endswith(f".{how}")]
    assert {record.verdict for record in found} == {PASS}


_JUDGED: dict[str, list[Record]] = {}


def judge_everything(job: Any) -> list[Record]:
    """Judge the job once, for all tests."""
    if job.case.id not in _JUDGED:
        _JUDGED[job.case.id] = Runner(Settings()).run([job])
    return _JUDGED[job.case.id]


def test_tangents_that_jax_refuses_are_an_error_in_its_own_words() -> None:
    (found,) = judge(attend_by_custom_vjp, tangents=("out",))
    assert found.verdict == ERROR
    assert re.search(r"can't apply forward-mode .* \(jvp\) to a custom_vjp function", found.reason)


def test_gradients_may_have_tangents_where_results_have_none() -> None:
    case = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0"
    found = judge(attend_by_custom_vjp, case, tangents=("gradients",))
    assert {record.observable for record in found} == {f"{name}.jvp_of_grad" for name in ("dq", "dk", "dv")}
    assert {record.verdict for record in found} == {PASS}
    with_results = judge(attend_by_custom_vjp, case, tangents=("out", "gradients"))
    assert {record.observable for record in with_results if record.verdict == ERROR} >= {"jvp", "grad_of_jvp"}


def test_the_softmax_of_the_operands_dtype_is_left_unjudged() -> None:
    found = judge(attend, SMALL.replace("f32", "bf16"), tangents=("out",), softmax="input")
    assert [record.verdict for record in found] == [UNJUDGED]


def test_nothing_runs_without_the_declaration() -> None:
    def undeclared(q: Any, k: Any, v: Any) -> Any:
        return naive.attention(q, k, v)

    for level in ("smoke", "quick"):
        jobs = plan_run([build_implementation(undeclared, "kernel")], level=level).jobs
        assert not any(check.name == "tangents" for job in jobs for check in job.checks)


def test_a_tangent_of_another_function_fails() -> None:
    def attend_to_twice_the_values(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        @jax.custom_jvp
        def call(q: Any, k: Any, v: Any) -> Any:
            return naive.attention(q, k, v, causal=causal)

        @call.defjvp
        def differentiate(primals: Any, tangents: Any) -> Any:
            moved = (*tangents[:2], 1.01 * tangents[2])
            return jax.jvp(lambda *operands: naive.attention(*operands, causal=causal), primals, moved)

        return call(q, k, v)

    case = "train/f32/B2.T16.S16.N4.K2.H16.V8/causal/normal/s0"
    found = {record.observable: record.verdict for record in judge(attend_to_twice_the_values, case, tangents=("out",))}
    assert {name for name, verdict in found.items() if verdict == FAIL} == {"out.v.jvp", "out.all.jvp"}


@pytest.mark.bank
@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name) for bug in tangents.BUGS])
def test_a_planted_bug_of_tangents_is_seen(bug: PlantedBug) -> None:
    jobs = plan_run([bug.build()], level="quick", checks=[CHECKS_BY_NAME["tangents"]]).jobs
    nearest = next(job for job in jobs if bug.trigger(job.case))
    red = [record for record in Runner(Settings()).run([nearest]) if record.verdict in RED]
    assert red
    assert all(shows_as_declared(bug, record) for record in red if record.verdict == FAIL)


def test_only_known_results_have_tangents() -> None:
    with pytest.raises(ValueError, match="tangents names results: 'lse' is none of 'out', 'logsumexp', 'gradients'"):
        declare(tangents=("out", "lse"))
    assert build_implementation(declare(tangents=["logsumexp", "out"])(attend), "kernel").tangents == ALL[:2]
