"""The quick grid kills every bug planted in the blockwise kernel, by what the bug says it shows."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import plan, runner, settings
from conformance.records import ERROR, RED, Record
from conformance.sensitivity import PlantedBug
from tests.planted import backward, blocks, cotangents, epilogue, online, operands, sums, tails
from tests.planted.blockwise import implementation
from tests.planted.steps import BlockSteps

BUGS = tuple(
    bug for module in (online, epilogue, blocks, tails, backward, cotangents, sums, operands) for bug in module.BUGS
)

# Bugs that the quick grid does not see, and what would. They are not run: to survive takes the whole grid.
SURVIVORS = {
    "acc-in-input-dtype": "less than a rounding of the output: needs many seeds together",
    "out-truncated": "less than a rounding of the output: needs many seeds together",
    "bwd-dq-in-input-dtype": "less than a rounding of the output: needs many seeds together",
    "bwd-delta-in-input-dtype": "less than a rounding of the output: needs many seeds together",
    "pivot-starts-at-finite-sentinel": "no case has all logits of a row below -5e4",
    "block-map-of-first-head": "no case has a mask whose blocks differ by head",
    "block-count-misses-tail-of-one-key": "no case has a length that is one more than whole blocks",
    "bwd-skips-rows-by-cotangent-of-out": "no check has a cotangent of logsumexp alone",
}

# Part of the grid, spread over it, on which the correct kernel must not fail.
_CORRECT_STRIDE = 10


def first_kill(bug: PlantedBug, level: str) -> list[Record]:
    """The red records of the first job of the grid that has any, cases with the bug's trigger first."""
    jobs = plan.plan([bug.build()], level=level).jobs
    judge = runner.Runner(settings.Settings()).judge
    for job in sorted(jobs, key=lambda job: not bug.trigger(job.case)):
        if red := [record for record in judge(job) if record.verdict in RED]:
            return red
    return []


def _is_shown(record: Record, bug: PlantedBug) -> bool:
    if record.verdict == ERROR:
        return "error" in bug.shows
    return record.observable in bug.shows or record.observable.split(".")[0] in bug.shows


def _parameter(bug: PlantedBug) -> Any:
    reason = SURVIVORS.get(bug.name)
    marks = () if reason is None else pytest.mark.xfail(reason=reason, run=False)
    return pytest.param(bug, id=bug.name, marks=marks)


@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS])
def test_a_planted_bug_fails_at_quick(bug: PlantedBug) -> None:
    red = first_kill(bug, "quick")
    assert red, f"{bug.name} survives the quick grid"
    found = sorted({record.observable for record in red})
    assert any(_is_shown(record, bug) for record in red), f"{bug.name} shows in {found}, must show in {bug.shows}"


def test_names_are_unique() -> None:
    names = [bug.name for bug in BUGS]
    assert len(set(names)) == len(names)
    assert set(SURVIVORS) <= set(names)


def test_the_kernel_without_a_bug_passes() -> None:
    jobs = plan.plan([implementation(BlockSteps(), "correct")], level="quick").jobs[::_CORRECT_STRIDE]
    found = runner.Runner(settings.Settings()).run(jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert any(record.ratio is not None for record in found)
