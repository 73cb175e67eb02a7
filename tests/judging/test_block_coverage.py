"""Test that the verdict names a number of blocks that is too small."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.block_coverage import describe_block_counts, find_block_lengths
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.implementation import Implementation
from reports.page_model import build_summary
from reports.records import PASS, Record, RunInfo
from tests.kernels import naive


def build_taking(lengths: Callable[[int, int], bool]) -> Implementation:
    """Build an implementation that accepts some lengths only."""
    found = implementation_registry.find_implementation("dot_product")

    def supports(case: Case) -> str | None:
        return None if lengths(case.q_length, case.kv_length) else "not this length"

    return dataclasses.replace(found, name="it", supports_case=supports)


def build_pass(case: Case) -> Record:
    """Build a record that passes."""
    return Record(implementation="it", platform="cpu", case=case.id, check="forward", observable="out", verdict=PASS)


def describe_few_blocks(implementation: Implementation, records: list[Record]) -> str:
    """Describe the blocks that were too few, given records."""
    cases = [parse_case_id(record.case) for record in records]
    return describe_block_counts(find_block_lengths(implementation, cases), records)


def describe_few(lengths: Callable[[int, int], bool], level: str = "quick") -> str:
    """Describe the blocks that were too few, given judged cases."""
    implementation = build_taking(lengths)
    jobs = run_plan.plan_run([implementation], level=level).jobs
    return describe_few_blocks(implementation, [build_pass(job.case) for job in jobs if job.is_on_grid])


@pytest.mark.parametrize("level", ["smoke", "quick"])
def test_one_length_is_one_block(level: str) -> None:
    found = describe_few(lambda q, kv: (q, kv) == (128, 128), level)
    assert found == "one block of 128 queries and one block of 128 keys"


def test_keys_and_queries_are_counted_apart() -> None:
    assert describe_few(lambda q, kv: kv == 1152) == "one block of 1152 keys"
    assert describe_few(lambda q, kv: q in (1, 128)) == "one block of 128 queries"
    assert describe_few(lambda q, kv: q == 1) == ""


@pytest.mark.parametrize("block", [1, 64, 128, 256, 512])
def test_whole_blocks_are_enough(block: int) -> None:
    assert describe_few(lambda q, kv: (q == 1 or q % block == 0) and kv % block == 0) == ""


def test_what_a_function_refuses_when_it_is_called_was_not_asked_about() -> None:
    def short(q: Any, k: Any, v: Any) -> Any:
        if q.shape[1] != 128 or k.shape[1] != 128:
            raise NotImplementedError("128 only")
        return naive.attention(q, k, v)

    implementation = build_implementation(short, "it")
    jobs = [job for job in run_plan.plan_run([implementation], level="smoke").jobs if job.is_on_grid]
    taken = [job for job in jobs if (job.case.q_length, job.case.kv_length) == (128, 128)]
    refused = [job for job in jobs if job.case.q_length > 128 and job.case.mask == "full"]
    found = Runner(Settings()).run([*taken[:2], *refused[:2]])
    assert {parse_case_id(record.case).q_length for record in found} > {128}
    assert describe_few_blocks(implementation, found) == "one block of 128 queries and one block of 128 keys"


@pytest.mark.parametrize(
    ("judged", "declined", "says"),
    [
        (9, 0, "it (cpu) conforms."),
        (9, 1, "it (cpu) conforms, judged in 9 cases and declining 1."),
        (9, 10, "it (cpu) conforms in the 47% of cases that it takes, judged in 9 cases and declining 10."),
        (1, 1200, "it (cpu) conforms in the 0.08% of cases that it takes, judged in 1 case and declining 1,200."),
    ],
)
def test_how_many_cases_are_declined_is_in_the_verdict(judged: int, declined: int, says: str) -> None:
    right = build_pass(Case())
    rows = [{"implementation": "it (cpu)", "cases judged": judged, "declined": declined}]
    run = RunInfo(command="", level="quick", environment={}, tolerances=[], coverage=rows)
    found = [right, msgspec.structs.replace(right, check="gradients")]
    assert build_summary(found, run).headline == says


def test_the_share_of_cases_is_not_that_of_a_narrowed_run() -> None:
    rows = [{"implementation": "it (cpu)", "cases judged": 1, "declined": 1200}]
    run = RunInfo(command="", level="quick", narrowed="--cases=train", environment={}, tolerances=[], coverage=rows)
    assert "%" not in build_summary([build_pass(Case())], run).headline


def test_the_verdict_says_so() -> None:
    right = build_pass(Case())
    others = msgspec.structs.replace(right, check="gradients")
    blocks = {"it": "one block of 128 queries"}
    run = RunInfo(command="", level="quick", environment={}, tolerances=[], few_blocks=blocks)
    said = build_summary([right, others], run).headline
    assert said == "it (cpu) conforms, checked on one block of 128 queries only."
