"""Named problems: kernels with the operands of a benchmark, right ones and wrong ones."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

from cases.case import CaseIdError
from cases.named_problems import PROBLEMS, NamedProblem, index_problems
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.execution.workload_adapters import build_workload_implementation
from conformance.follow_up import shrinker
from conformance.judging import run_plan
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sandbox.kernel_options import KernelOptions
from reports.records import FAIL, PASS, RED, UNSUPPORTED, Record
from tests.kernels import workloads

RIGHT = dict(
    zip(
        (problem.name for problem in PROBLEMS),
        (
            workloads.flash,
            workloads.gqa,
            workloads.mla,
            workloads.sparse,
            workloads.flex,
            workloads.paged,
            workloads.ragged,
        ),
        strict=True,
    )
)


def judged(workload: Any, name: str, which: int = 0) -> list[Record]:
    problem = index_problems()[name]
    implementation = build_workload_implementation(workload, "workload", name)
    planned = run_plan.plan_problem([implementation], problem.cases(full_size=False)[which : which + 1])
    runner = Runner(Settings(), confirmed=0)  # a failure at first sight is enough to know of
    return [record for job in planned.jobs for record in runner.judge(job)]


# The longest by far, which a plain run of the tests leaves out.
_LONG = "ragged_paged_attention"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == _LONG else ()) for name in RIGHT]
)
def test_a_right_kernel_is_called_right(name: str) -> None:
    found = judged(RIGHT[name], name)
    assert not [record.reason for record in found if record.verdict in RED]
    assert any(record.verdict == PASS and record.observable == "out" for record in found)


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("sparse_attention", workloads.zeros),
        pytest.param("sparse_attention", workloads.first_block, marks=pytest.mark.long),
        pytest.param("sparse_attention", workloads.half_the_scale, marks=pytest.mark.long),
        ("mla_attention", workloads.keys_not_turned),
    ],
)
def test_a_wrong_kernel_is_called_wrong(name: str, workload: Any) -> None:
    found = judged(workload, name, which=2 if name == "sparse_attention" else 1)  # in bf16
    assert FAIL in {record.verdict for record in found if record.observable == "out"}


def test_what_the_benchmark_accepts() -> None:
    # One head of its sparse attention, as it draws it, with the tolerance that it has: what is wrong passes there.
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 1, 2048, 128)) * 128**-0.5
    k, v = (rng.normal(size=(1, 1, 2048, 128)) * 0.02 for _ in range(2))
    expected, first, half = (
        np.asarray(wrong(*(x.astype(np.float32) for x in (q, k, v))))
        for wrong in (workloads.sparse, workloads.first_block, workloads.half_the_scale)
    )
    # Tolerance: that of the benchmark, which is what is looked at.
    assert np.isclose(first, expected, atol=1e-2, rtol=1e-2).all()
    # Tolerance: likewise.
    assert np.isclose(half, expected, atol=1e-2, rtol=1e-2).all()


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_cases_are_there(problem: NamedProblem) -> None:
    assert problem.cases(full_size=False)
    assert len({case.id for case in problem.cases(full_size=False)}) == len(problem.small)
    assert all(case.dtype == "bf16" for case in problem.cases(full_size=True))
    implementation = build_workload_implementation(RIGHT[problem.name], "workload", problem.name)
    for case in (*problem.cases(full_size=False), *problem.cases(full_size=True)):
        assert implementation.supports(case) is None


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_of_what_shrinking_draws_a_problem_takes_its_own_cases_alone(problem: NamedProblem) -> None:
    case = problem.cases(full_size=False)[0]
    implementation = build_workload_implementation(RIGHT[problem.name], "workload", problem.name)
    taken = []
    for changes in (changes for plainer in shrinker.iter_alternatives(case) for changes in plainer):
        with contextlib.suppress(CaseIdError):
            smaller = dataclasses.replace(case, **changes)
            if implementation.supports(smaller) is None:
                taken.append(smaller)
    assert taken
    assert all(one.mask == case.mask and one.bias == case.bias and one.scale == case.scale for one in taken)
    assert all(one.phase == case.phase and one.storage == case.storage for one in taken)


@pytest.mark.long
def test_shrinking_asks_a_kernel_of_its_problem_alone() -> None:
    implementation = build_workload_implementation(workloads.half_the_scale, "workload", "sparse_attention")
    case = index_problems()["sparse_attention"].cases(full_size=False)[0]
    runner, forward = Runner(Settings()), (CHECKS_BY_NAME["forward"],)
    (failing,) = (one for one in runner.judge(Job(implementation, case, forward)) if one.verdict in RED)
    heard: list[Record] = []
    shrunk = shrinker.shrink(implementation, runner, case, failing, seconds=60.0, on_case=heard.extend)
    assert heard
    assert UNSUPPORTED not in {one.verdict for one in heard}
    assert (shrunk.case.mask, shrunk.case.scale) == ("causal", 1.0)
    assert shrunk.case.q_length == shrunk.case.kv_length < case.q_length


def test_what_is_no_function_of_a_problem_is_said() -> None:
    with pytest.raises(
        implementation_registry.ImplementationNotFound, match="dot_product is no function of the operands of gqa"
    ):
        KernelOptions(problem="gqa_attention").find("dot_product")
    assert KernelOptions(problem="gqa_attention").options == ("--problem=gqa_attention",)
