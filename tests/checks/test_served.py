"""Plain functions over pages and packs: what is right is not called wrong, and what the checks see alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from cases import inputs
from cases.case import Case
from cases.serving.life import lives
from conformance.asking.scopes import FEATURE, Asked
from conformance.calling import registry
from conformance.calling.plain import from_function
from conformance.checks import BY_NAME
from conformance.checks.operands import dropped
from conformance.contract import Implementation
from conformance.judging import plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.records import PASS, RED, UNSUPPORTED, Record
from tests.kernels import latents, served
from tests.planted.planting.served import PagedSteps, paged

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    served.paged,
    served.scaled,
    served.scaled_whole,
    served.packed,
    served.packed_by_sequence,
    served.packed_by_vmap,
    latents.in_pages,
    latents.dense,
)
# Two forms of `served.packed`, which are slower to compile, and of `served.paged` those with another operand.
_LONG = (
    served.scaled,
    served.scaled_whole,
    served.packed_by_sequence,
    served.packed_by_vmap,
    latents.in_pages,
    latents.dense,
)
# One short job in so many is run here; all of them, with three seeds, take minutes.
_STRIDE = 60


def judged(function: Callable[..., Any], seed: int, stride: int) -> list[Record]:
    jobs = plan.plan([from_function(function, "kernel")], level="quick", seeds=(seed,)).jobs
    return Runner(Settings()).run([job for job in jobs if job.short][::stride])


@pytest.mark.parametrize(
    "function",
    [pytest.param(each, id=each.__name__, marks=pytest.mark.long if each in _LONG else ()) for each in FUNCTIONS],
)
def test_a_right_function_is_not_called_wrong(function: Callable[..., Any]) -> None:
    found = judged(function, seed=3, stride=_STRIDE)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.verdict == PASS for record in found)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 7, 1000])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_right_function_is_called_wrong_by_no_case(function: Callable[..., Any], seed: int) -> None:
    assert [record for record in judged(function, seed, 1) if record.verdict in RED] == []


@pytest.mark.long
def test_what_a_stored_call_is_not_asked_is_shown() -> None:
    asked = Asked(from_function(served.paged, "kernel"), "quick", 0)
    (rich,) = asked.grid.rich
    checks = [BY_NAME[name] for name in ("sharding", "invariance", "transforms")]
    found = Runner(Settings()).run(plan.single(asked.implementation, rich, checks).jobs)
    shown = {(record.check, record.observable) for record in found if record.verdict == UNSUPPORTED}
    assert {("sharding", "all"), ("invariance", "permuted"), ("transforms", "out.vmap")} <= shown


def test_dense_kernels_are_asked_nothing_of_storage() -> None:
    def dense(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        return q

    asked = Asked(from_function(dense, "kernel"), "quick", 0)
    assert {case.storage for case in (*asked.grid.cases, *asked.sizes.cases, *asked.grid.declined)} == {None}
    assert lives(0, asked.implementation.supports) == ()


def test_independence_knows_who_shares_a_page() -> None:
    case = next(
        case
        for case in Asked(from_function(served.paged, "kernel"), "quick", 0).grid.cases
        if (stored := inputs.draw(case).storage) is not None and stored.shares and case.batch > 1
    )
    found = Runner(Settings()).run(plan.single(from_function(served.paged, "kernel"), case).jobs)
    assert {record.verdict for record in found if record.check == "independence"} == {PASS}


@pytest.mark.long
def test_a_life_sees_pages_of_another_request() -> None:
    case = lives()[0]
    assert set(_decoded(case, paged("kernel"))) == {PASS}
    assert set(_decoded(case, paged("kernel", PagedSteps(tables=_rolled)))) & set(RED)


def _rolled(call: Any) -> Any:
    """Pages of sequences that came later are those of the one before."""
    table = call.page_indices
    return dataclasses.replace(call, page_indices=table.at[1:].set(table[:-1]))


def _decoded(case: Case, implementation: Implementation) -> list[str]:
    found = Runner(Settings()).run(plan.single(implementation, case, [BY_NAME["decoding"]]).jobs)
    return [record.verdict for record in found]


@pytest.mark.parametrize(
    "name", ["block_flash", "quantized_kv", "block_flash_packed", "paged_quantized", "paged_latent"]
)
def test_each_case_asked_for_its_arguments_has_one_to_leave_out(name: str) -> None:
    cases = FEATURE.cases(Asked(registry.find(name), "quick", 0))
    assert len(cases) > 5
    assert [case.id for case in cases if not any(dropped(inputs.draw(case)))] == []
