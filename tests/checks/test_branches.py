"""Tests of the check `branches`: cases that reach branches behind conditions, and branches that none reaches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest

import conformance
from cases.case import Case
from cases.case_id import parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import build_implementation
from conformance.executor_tasks.branch_search import search_branches
from conformance.judging.run_plan import plan_run
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import FAIL, UNJUDGED
from tests.kernels import behind_branches

_CONDITIONS: Mapping[str, Any] = {
    "one query, large groups": lambda c: c.q_length == 1 and c.num_q_heads // c.num_kv_heads > 16,
    "deep, few queries": lambda c: c.head_dim == 512 and c.q_length <= 8 and c.kv_length < 1024,
    "one key after whole blocks": lambda c: c.kv_length % 48 == 1,
    "tuned sizes": lambda c: (c.q_length, c.kv_length, c.head_dim) in behind_branches.TUNED,
    "listed blocks": lambda c: (c.kv_length, c.head_dim) in behind_branches.BLOCKS,
    "f16 and causal": lambda c: c.dtype == "f16" and c.mask == "causal",
    "sum of lengths": lambda c: c.q_length + c.kv_length > 5000,
    "no scale, large cap": lambda c: c.scale is None and c.soft_cap is not None and c.soft_cap > 70,
    "seven keys after whole blocks": lambda c: c.kv_length % 320 == 7,
    "many programs": lambda c: c.batch * c.num_q_heads >= 300,
    "deep values": lambda c: c.v_head_dim > 2 * c.head_dim,
    "many more queries than keys": lambda c: c.q_length > c.kv_length + 100,
}


@functools.cache
def _search() -> tuple[list[Case], dict[str, Any]]:
    """Return the cases of `smoke`, and the result of the search for further ones."""
    implementation = build_implementation(behind_branches.attention, "behind_branches")
    plan = plan_run([implementation], level="smoke")
    planned = list(dict.fromkeys(job.case for job in plan.jobs if job.is_on_grid))
    ids = [case.id for case in planned]
    return planned, search_branches(Executor(implementation), ids, (), 2 * len(ids) + 60, 600.0)


@pytest.mark.parametrize("path", _CONDITIONS)
def test_a_case_reaches_each_path(path: str) -> None:
    planned, found = _search()
    cases = [*planned, *(parse_case_id(text) for text, _ in found["found"])]
    assert any(map(_CONDITIONS[path], cases)), found


def test_further_cases_are_few_and_reach_what_planned_ones_do_not() -> None:
    planned, found = _search()
    further = [parse_case_id(text) for text, _ in found["found"]]
    assert not {*further} & {*planned}
    new = [path for path, holds in _CONDITIONS.items() if not any(map(holds, planned))]
    assert 0 < len(further) <= 2 * len(new)
    assert {found["conditions"][str(index)][2] for index, _, _ in found["unreached"]} == {"WRONG in paths"}


def test_the_same_search_finds_the_same() -> None:
    _, found = _search()
    _search.cache_clear()
    assert _search()[1] == found


@pytest.mark.parametrize(
    ("path", "condition"),
    [
        ("seven keys after whole blocks", "`rest == 7` is true"),
        pytest.param("one query, large groups", "`group > 16` is true", marks=pytest.mark.long),
    ],
)
def test_a_wrong_path_fails_at_smoke_and_the_finding_names_it(
    path: str, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind_branches, "WRONG", path)
    report = conformance.check(behind_branches.attention, level="smoke", checks=["branches"], confirm_seconds=0)
    wrong = [record for record in report.records if record.verdict == FAIL]
    assert wrong
    assert all(_CONDITIONS[path](parse_case_id(record.case)) for record in wrong)
    assert condition in report.findings[0].cause


def _attend(q: Any, k: Any, v: Any, most: int) -> Any:
    """Attend to the first keys."""
    k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k, precision="highest") * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(k.shape[1]) < most, x, -1e30))
    return jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest").astype(q.dtype)


def _attend_here(q: Any, k: Any, v: Any) -> Any:
    if jax.default_backend() == "no such platform":
        q = q * 2
    return _attend(q, k, v, k.shape[1])


_LIMIT = 40_000


def _attend_below_the_limit(q: Any, k: Any, v: Any) -> Any:
    return _attend(q, k, v, _LIMIT)


def _judge(function: Any, settings: Settings) -> list[Any]:
    implementation = build_implementation(function, "kernel")
    jobs = plan_run([implementation], level="smoke", checks=[CHECKS_BY_NAME["branches"]]).jobs
    return [record for record in Runner(settings).run(jobs) if record.check == "branches"]


def test_a_branch_that_no_case_reaches_is_shown_and_fails_if_asked() -> None:
    for settings, verdict in ((Settings(), UNJUDGED), (Settings(unreached_branches="fail"), FAIL)):
        (named,) = [record for record in _judge(_attend_here, settings) if "no such platform" in record.reason]
        assert named.verdict == verdict
        assert named.observable.startswith("test_branches.py:")
        assert "nearest: cpu ==" in named.reason


def test_report_lists_unreached_branches() -> None:
    report = conformance.check(_attend_here, level="smoke", checks=["branches"], confirm_seconds=0)
    ((place, words),) = report.unreached_branches
    assert place.startswith("test_branches.py:")
    assert "no such platform" in words
    assert "1 branch of test_branches.py that no case reaches" in str(report)
    assert report.conforms


def test_refusals_that_nothing_declares_are_shown() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        if q.shape[1] == 73:
            q = q + 0
            raise ValueError("73 queries are not supported")
        return _attend(q, k, v, k.shape[1])

    found = [record for record in _judge(attention, Settings()) if "73 queries" in record.reason]
    assert len(found) == 1
    assert found[0].verdict == UNJUDGED
    assert ".T73." in found[0].reason


def test_result_of_a_search_is_not_trusted() -> None:
    from conformance.checks.branches import FoundBranches

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"conditions": {}, "found": [["x", [["y"]]]]}, FoundBranches)


def test_a_number_that_is_compared_with_values_is_exceeded_at_quick() -> None:
    report = conformance.check(_attend_below_the_limit, checks=["branches"], confirm_seconds=0)
    wrong = [record for record in report.records if record.verdict == FAIL]
    assert wrong
    assert all("longer than 40000, a number in the kernel's source" in record.reason for record in wrong)


def test_a_package_that_the_kernel_does_not_import_is_named() -> None:
    implementation = build_implementation(_attend_here, "kernel")
    plan = plan_run([implementation], level="smoke", checks=[CHECKS_BY_NAME["branches"]], packages=["no_such_package"])
    found = [record for record in Runner(Settings()).run(plan.jobs) if "no_such_package" in record.observable]
    assert [record.verdict for record in found] == [UNJUDGED]
