"""Tests of checks on plain paged and packed functions: correct ones pass, wrong ones fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from cases import operand_values
from cases.case import Case
from cases.storage_forms.server_traces import build_traces
from conformance.check_api.scopes import FEATURE, ImplementationGrids
from conformance.checks import CHECKS_BY_NAME
from conformance.checks.arguments import iter_without_argument
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.implementation import Implementation
from reports.records import PASS, RED, UNSUPPORTED, Record
from tests.checks.test_checks import judge
from tests.kernels import latent_attention, serving_attention
from tests.planted.planting.served import PagedSteps, paged

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    serving_attention.paged,
    serving_attention.scaled,
    serving_attention.scaled_whole,
    serving_attention.packed,
    serving_attention.packed_by_sequence,
    serving_attention.packed_by_vmap,
    latent_attention.in_pages,
    latent_attention.dense,
)
# Functions that are slower to compile.
_LONG = (
    serving_attention.scaled,
    serving_attention.scaled_whole,
    serving_attention.packed_by_sequence,
    serving_attention.packed_by_vmap,
    latent_attention.in_pages,
    latent_attention.dense,
)
# One of this many short jobs is run here. All of them with three seeds take minutes.
_STRIDE = 60


@pytest.mark.parametrize("name", ["paged_latent_update", "block_flash_latent"])
def test_special_values_are_asked_of_latents(name: str) -> None:
    implementation = implementation_registry.find_implementation(name)
    case = ImplementationGrids(implementation, "quick", 0).grid.cases[0]
    found = {one.observable: one.verdict for one in judge(implementation, case.id, "calls")}
    assert not RED & set(found.values())
    assert found["out.special_scale"] == PASS


def judge_jobs(function: Callable[..., Any], seed: int, stride: int) -> list[Record]:
    jobs = run_plan.plan_run([build_implementation(function, "kernel")], level="quick", seeds=(seed,)).jobs
    return Runner(Settings()).run([job for job in jobs if job.short][::stride])


@pytest.mark.parametrize(
    "function",
    [pytest.param(each, id=each.__name__, marks=pytest.mark.long if each in _LONG else ()) for each in FUNCTIONS],
)
def test_a_right_function_is_not_called_wrong(function: Callable[..., Any]) -> None:
    found = judge_jobs(function, seed=3, stride=_STRIDE)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.verdict == PASS for record in found)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 7, 1000])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_right_function_is_called_wrong_by_no_case(function: Callable[..., Any], seed: int) -> None:
    assert [record for record in judge_jobs(function, seed, 1) if record.verdict in RED] == []


@pytest.mark.long
def test_what_a_stored_call_is_not_asked_is_shown() -> None:
    asked = ImplementationGrids(build_implementation(serving_attention.paged, "kernel"), "quick", 0)
    (combined,) = asked.grid.combined
    checks = [CHECKS_BY_NAME[name] for name in ("sharding", "invariance", "transforms")]
    found = Runner(Settings()).run(run_plan.plan_case(asked.implementation, combined, checks).jobs)
    shown = {(record.check, record.observable) for record in found if record.verdict == UNSUPPORTED}
    assert {("sharding", "all"), ("invariance", "permuted"), ("transforms", "out.vmap")} <= shown


def test_dense_kernels_are_asked_nothing_of_storage() -> None:
    def dense(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        return q

    asked = ImplementationGrids(build_implementation(dense, "kernel"), "quick", 0)
    assert {case.storage for case in (*asked.grid.cases, *asked.sizes.cases, *asked.grid.declined)} == {None}
    assert build_traces(0, asked.implementation.supports) == ()


def test_independence_knows_who_shares_a_page() -> None:
    case = next(
        case
        for case in ImplementationGrids(build_implementation(serving_attention.paged, "kernel"), "quick", 0).grid.cases
        if (stored := operand_values.draw_problem(case).storage) is not None and stored.shares and case.batch > 1
    )
    found = Runner(Settings()).run(
        run_plan.plan_case(build_implementation(serving_attention.paged, "kernel"), case).jobs
    )
    assert {record.verdict for record in found if record.check == "independence"} == {PASS}


@pytest.mark.long
def test_a_life_sees_pages_of_another_request() -> None:
    case = build_traces()[0]
    assert set(_judge_decoding(case, paged("kernel"))) == {PASS}
    assert set(_judge_decoding(case, paged("kernel", PagedSteps(tables=_roll_tables)))) & set(RED)


def _roll_tables(call: Any) -> Any:
    """Shift the page table by one sequence, so that sequences read pages of another."""
    table = call.page_indices
    return dataclasses.replace(call, page_indices=table.at[1:].set(table[:-1]))


def _judge_decoding(case: Case, implementation: Implementation) -> list[str]:
    found = Runner(Settings()).run(run_plan.plan_case(implementation, case, [CHECKS_BY_NAME["decoding"]]).jobs)
    return [record.verdict for record in found]


@pytest.mark.parametrize(
    "name", ["block_flash", "quantized_kv", "block_flash_packed", "paged_quantized", "paged_latent"]
)
def test_each_case_asked_for_its_arguments_has_one_to_leave_out(name: str) -> None:
    cases = FEATURE.cases(ImplementationGrids(implementation_registry.find_implementation(name), "quick", 0))
    assert len(cases) > 5
    assert [case.id for case in cases if not any(iter_without_argument(operand_values.draw_problem(case)))] == []
