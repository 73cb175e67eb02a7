"""Test when the jobs of a kernel end early: if no call can come right, and never for an error in one feature."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from cases.case import Case
from cases.case_space.coarse_levels import find_coarse_levels
from cases.case_space.novelty import find_marks
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.early_end import EarlyEnds, FirstCases
from conformance.judging.job import Job
from conformance.judging.rejudgement import UNSTEADY
from conformance.sandbox.kernel_process import TIMED_OUT
from reports.records import ERROR, EXPECTED_FAIL, FAIL, FLAGS_DIFFER, PASS, UNJUDGED, UNSUPPORTED, Record, Worst
from tests.reports.report_samples import make_record

PAIR = "the call must return out alone, an array [B, T, N, V], and returned a tuple of 2 (an array {}[{}], None)"
NAMES = ("plain", "windowed", "dot_product", "ragged")
LEVELS = ("smoke", "quick")
Judge = Callable[[Case], Record]


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, scale: Any = None) -> Any:
    return q


def windowed(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, sinks: Any = None) -> Any:
    return q


@functools.cache
def plan_jobs(name: str, level: str) -> tuple[Job, ...]:
    functions: dict[str, Callable[..., Any]] = {"plain": attention, "windowed": windowed}
    if name in functions:
        implementation = build_implementation(functions[name], name)
    else:
        implementation = implementation_registry.find_implementation(name)
    return run_plan.plan_run([implementation], level=level).jobs


def right(case: Case) -> Record:
    return make_record(case=case.id, verdict=PASS)


def wrong(case: Case, bounds: float = 1e4) -> Record:
    return make_record(case=case.id, verdict=FAIL, ratio=bounds, worst=Worst((0,), 1.0, 2.0, 1.0), reason="ratio")


def pair(case: Case) -> Record:
    """A wrong form, in whose reason the dtype and the shape differ from case to case."""
    reason = PAIR.format({"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[case.dtype], case.q_length)
    return make_record(case=case.id, verdict=ERROR, observable="all", ratio=None, limit=None, reason=reason)


def shape(case: Case) -> Record:
    sizes = f"({case.batch}, {case.num_q_heads}, {case.q_length}), must be ({case.batch}, {case.q_length}, 1)"
    return make_record(case=case.id, verdict=FAIL, ratio=float("inf"), reason=f"shape is {sizes}")


def late(case: Case) -> Record:
    seconds = 300 if case.phase == "train" else 10
    return make_record(case=case.id, verdict=ERROR, ratio=None, limit=None, reason=f"{TIMED_OUT} {seconds} s")


def count_judged(name: str, level: str, judge: Judge) -> int | None:
    """Return the number of jobs after which those of a kernel end; None if all are judged."""
    jobs = plan_jobs(name, level)
    first = FirstCases(jobs)
    for number, job in enumerate(jobs, 1):
        first.add(job, [judge(job.case)])
        if first.end is not None:
            return number
    return None


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("judge", [pair, shape, late])
def test_the_same_error_in_the_first_cases_ends_all(judge: Judge, name: str, level: str) -> None:
    judged = count_judged(name, level, judge)
    assert judged is not None
    assert judged <= 12


def test_errors_in_several_places_end_it_if_no_result_is_near() -> None:
    def transposed(case: Case) -> Record:
        """Judge a kernel that takes `[B, N, T, H]`: it raises unless T is S, and is wrong where it does not."""
        return wrong(case) if case.q_length == case.kv_length else pair(case)

    judged = count_judged("plain", "quick", transposed)
    assert judged is not None
    assert judged <= 12


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [pair, late])
def test_an_error_in_one_feature_never_ends_it(error: Judge, name: str, level: str) -> None:
    on_grid = [job.case for job in plan_jobs(name, level) if job.is_on_grid]
    marks = {case: find_marks(case) | find_coarse_levels(case) for case in on_grid}
    coarse = frozenset().union(*map(find_coarse_levels, on_grid))
    of_all = frozenset.intersection(*marks.values())
    found = frozenset().union(*marks.values()) - of_all
    with_or_without = [*((mark, True) for mark in found), *((mark, False) for mark in found & coarse)]
    for mark, has in sorted(with_or_without):

        def judge(case: Case, mark: str = mark, has: bool = has) -> Record:
            return error(case) if (mark in marks.get(case, ())) == has else right(case)

        assert count_judged(name, level, judge) is None, (mark, has)


@pytest.mark.parametrize(
    "takes",
    [
        lambda case: not any(size % 128 for size in (case.q_length, case.kv_length, case.head_dim)),
        lambda case: not case.q_length % 128,
        lambda case: not case.kv_length % 128,
        lambda case: case.head_dim in (64, 128),
        lambda case: case.q_length == case.kv_length and case.num_q_heads == case.num_kv_heads,
    ],
    ids=["all in blocks", "T in blocks", "S in blocks", "usual depth", "T=S and N=K"],
)
def test_a_kernel_that_takes_few_sizes_is_judged_in_all_cases(takes: Callable[[Case], bool]) -> None:
    assert count_judged("plain", "quick", lambda case: right(case) if takes(case) else pair(case)) is None


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("a declaration makes it right", {"remedy": 'behind_mask="finite"'}),
        ("it is right when called again", {"reason": f"ValueError: bad; {UNSTEADY}"}),
        ("it is right under other flags", {"figures": {FLAGS_DIFFER: 1.0}}),
        ("it is known to fail", {"verdict": EXPECTED_FAIL}),
        ("nothing says that it is wrong", {"verdict": UNJUDGED}),
        ("it is refused", {"verdict": UNSUPPORTED}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_come_right_ends_nothing(what: str, changes: dict[str, Any]) -> None:
    def judge(case: Case) -> Record:
        return Record(**{**{name: getattr(pair(case), name) for name in Record.__struct_fields__}, **changes})

    assert count_judged("plain", "smoke", judge) is None, what


def test_wrong_numbers_end_nothing_and_small_errors_show_that_calls_may_come_right() -> None:
    assert count_judged("plain", "smoke", wrong) is None

    def nearly(case: Case) -> Record:
        return wrong(case, 6.0) if case.q_length == case.kv_length else pair(case)

    assert count_judged("plain", "smoke", nearly) is None


def test_each_kernel_ends_by_itself_and_none_if_the_user_wants_all() -> None:
    other = [
        dataclasses.replace(job, implementation=dataclasses.replace(job.implementation, name="other"))
        for job in plan_jobs("plain", "smoke")
    ]
    jobs = [*plan_jobs("plain", "smoke"), *other]
    ends, disabled = EarlyEnds(jobs, is_enabled=True), EarlyEnds(jobs, is_enabled=False)
    for job in jobs:
        found = [pair(job.case) if job.implementation.name == "plain" else right(job.case)]
        ends.add(job, found)
        assert not disabled.add(job, found)
    assert set(ends.ends) == {"plain"}
    assert ends.has_ended(jobs[0])
    assert not ends.has_ended(jobs[-1])
