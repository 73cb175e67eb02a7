"""Test that only judged cases count when runs are merged, and that nothing planned is forgotten."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.execution import source_digests
from conformance.judging import provenance
from conformance.judging.run_aggregation import aggregate_runs
from conformance.truth import tolerances
from reports import conformity
from reports.page_model import build_summary
from reports.records import (
    COMPLETE,
    FAIL,
    INTERRUPTED,
    PASS,
    UNJUDGED,
    CoveringArraySize,
    End,
    Kernel,
    PlannedJob,
    Record,
    RecordedRun,
    Run,
    RunInfo,
)
from tests.reports.report_samples import render_html, render_markdown

SHAPE = "B1.T{0}.S{0}.N2.K2.H64.V64/causal/normal/s0"
CASES = [f"train/f32/{SHAPE.format(length)}" for length in (512, 96, 64, 33)]
ROWS = ("00", "01", "10", "11")


def build_run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "started": "2026-01-01T00:00:00+00:00",
        "command": "run",
        "level": "quick",
        "seeds": (0,),
        "environment": {"jax": "0.10.2", "backend": "cpu"},
        "tolerances": ({"dtype": "f32", "limit": 4.0},),
        "kernels": {"kernel": Kernel(source="abc", arrays=(CoveringArraySize(strength=2, combinations=4),))},
        "jobs": tuple(PlannedJob("kernel", case, ("forward",), (row,)) for case, row in zip(CASES, ROWS, strict=True)),
        "whole": {"kernel": 4},
        "resumed": (),
    }
    return Run(**values | changes)


def build_record(case: str, verdict: str = PASS, **changes: Any) -> Record:
    check = ("forward", "gradients")[CASES.index(case) % 2] if case in CASES else "forward"
    values: dict[str, Any] = {"implementation": "kernel", "platform": "cpu", "check": check, "observable": "out"}
    return Record(case=case, verdict=verdict, features=("causal",), **values | changes)


def build_recorded(
    *jobs: int, source: str = "", how: str | None = COMPLETE, verdict: str = PASS, **changes: Any
) -> RecordedRun:
    done = {number: (build_record(CASES[number], verdict),) for number in jobs}
    end = End(ended="2026-01-01T00:01:00+00:00", how=how, jobs=len(jobs), seconds=9.0) if how is not None else None
    return RecordedRun(source=source, run=build_run(**changes), done=done, end=end)


ALL = (0, 1, 2, 3)


def render_summary(*ones: RecordedRun) -> tuple[str, RunInfo]:
    found, info = aggregate_runs(ones, command="report")
    return build_summary(found, info).headline, info


def test_a_whole_run_conforms_and_covers_what_it_judged() -> None:
    headline, info = render_summary(build_recorded(*ALL))
    assert headline == "kernel (cpu) conforms."
    assert (info.coverage[0]["combinations"], info.coverage[0]["covered"]) == (4, 4)
    assert conformity.format_state(info) == "complete"
    assert "run <b>complete</b>" in render_html([build_record(CASES[0])], info)
    assert info.seconds == 9.0
    assert info.tolerances == [{"dtype": "f32", "limit": 4.0}]


def test_coverage_counts_what_was_judged() -> None:
    found = build_recorded(0, 1)
    unjudged = dataclasses.replace(found, done={**found.done, 2: (build_record(CASES[2], UNJUDGED),)})
    headline, info = render_summary(unjudged)
    assert (info.coverage[0]["cases planned"], info.coverage[0]["cases judged"]) == (4, 2)
    assert info.coverage[0]["covered"] == 2
    assert headline == "kernel (cpu) passes as far as checked (narrowed to 3 of 4 jobs)."


def test_a_job_without_a_record_is_not_done() -> None:
    found = build_recorded(*ALL)
    headline, info = render_summary(dataclasses.replace(found, done={**found.done, 2: ()}))
    assert headline == "kernel (cpu) passes as far as checked (narrowed to 3 of 4 jobs)."
    assert conformity.format_state(info) == "partial"


def test_a_narrowed_run_says_to_what_and_how_little_that_is() -> None:
    headline, info = render_summary(build_recorded(0, jobs=build_run().jobs[:1], narrowed="--cases=train/f32/B1.T512"))
    assert headline == "kernel (cpu) passes as far as checked (narrowed to --cases=train/f32/B1.T512: 1 of 4 jobs)."
    for shown in (
        render_html([build_record(CASES[0])], info),
        render_markdown([build_record(CASES[0])], info),
    ):
        assert "complete, narrowed to --cases=train/f32/B1.T512" in re.sub("<[^>]*>", "", shown)
    headline, _ = render_summary(build_recorded(0, verdict=FAIL, jobs=build_run().jobs[:1], narrowed="one case"))
    assert headline == "kernel (cpu) does not conform (narrowed to one case: 1 of 4 jobs)."


def test_the_state_of_a_run_says_that_it_was_not_all() -> None:
    assert conformity.format_state(render_summary(build_recorded(*ALL, level="smoke"))[1]) == "complete at smoke"
    assert conformity.format_state(
        render_summary(build_recorded(0, jobs=build_run().jobs[:1], level="smoke", narrowed="--check=forward"))[1]
    ) == ("complete at smoke, narrowed to --check=forward")
    other = build_recorded(
        0,
        jobs=(PlannedJob("other", CASES[0], ("forward",)),),
        kernels={"other": Kernel(arrays=())},
        narrowed="one case",
    )
    other = dataclasses.replace(other, done={0: (build_record(CASES[0], implementation="other"),)})
    assert conformity.format_state(render_summary(build_recorded(*ALL), other)[1]) == "complete, narrowed in part"
    assert conformity.format_state(render_summary(build_recorded(0, narrowed="--check=forward"))[1]) == "partial"


@pytest.mark.parametrize("how", [INTERRUPTED, None], ids=["interrupted", "killed"])
def test_a_run_that_was_stopped_or_killed_does_not_conform(how: str | None) -> None:
    headline, info = render_summary(build_recorded(0, 1, how=how))
    assert headline == "kernel (cpu) passes so far (2 of 4 jobs)."
    assert info.interrupted
    assert conformity.format_state(info) == "interrupted"


def test_a_merge_notices_a_shard_that_is_missing() -> None:
    one, two = build_recorded(0, 1, source="1.jsonl", shard="1/2"), build_recorded(2, 3, source="2.jsonl", shard="2/2")
    headline, info = render_summary(one)
    assert headline == "kernel (cpu) passes as far as checked (narrowed to 2 of 4 jobs)."
    assert "shard 2 of 2 is missing" in info.notes
    assert conformity.format_shortfall(info) == "Not all that was planned was judged: 2 of 4 jobs."
    headline, info = render_summary(one, two)
    assert headline == "kernel (cpu) conforms."
    assert info.notes == []
    assert info.coverage[0]["covered"] == 4


def test_a_shard_that_was_killed_before_its_first_record_is_missed_too() -> None:
    headline, info = render_summary(build_recorded(0, 1), build_recorded(how=None))
    assert headline == "kernel (cpu) passes so far (2 of 4 jobs)."
    assert info.interrupted


def test_what_one_file_lacks_another_may_have() -> None:
    headline, info = render_summary(build_recorded(0, 1, how=INTERRUPTED), build_recorded(2, 3, how=INTERRUPTED))
    assert headline == "kernel (cpu) conforms."
    assert not info.interrupted


def test_passes_of_today_do_not_cover_failures_of_yesterday() -> None:
    headline, _ = render_summary(build_recorded(*ALL, verdict=FAIL), build_recorded(*ALL))
    assert headline == "kernel (cpu) does not conform."  # nothing changed in between, so they contradict each other


OTHERS: dict[str, dict[str, Any]] = {
    "jax": {"environment": {"jax": "0.12.0", "backend": "cpu"}},
    "source": {"kernels": {"kernel": Kernel(source="abd", arrays=(CoveringArraySize(strength=2, combinations=4),))}},
    "declared": {
        "kernels": {
            "kernel": Kernel(
                source="abc", declared={"logits": "input"}, arrays=(CoveringArraySize(strength=2, combinations=4),)
            )
        }
    },
    "tolerances": {"tolerances": ({"dtype": "f32", "limit": 40.0},)},
    "place": {
        "kernels": {
            "kernel": Kernel(
                source="abc",
                arrays=(CoveringArraySize(strength=2, combinations=4),),
                place="ran in the judge's own process, which it could alter",
            )
        }
    },
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_runs_of_different_provenance_never_answer_for_each_other(changes: dict[str, Any]) -> None:
    before = build_recorded(*ALL, verdict=FAIL, source="old.jsonl")
    after = build_recorded(*ALL, source="new.jsonl", **changes)
    for ones in ((before, after), (after, before)):
        found, info = aggregate_runs(ones, command="report")
        standings = build_summary(found, info).implementations
        assert {standing.conformity for standing in standings} == {conformity.CONFORMS, conformity.DOES_NOT_CONFORM}
        assert len({standing.implementation.label for standing in standings}) == 2


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("jax", {"kernel (cpu, jax 0.10.2)", "kernel (cpu, jax 0.12.0)"}),
        ("source", {"kernel (cpu, source abc)", "kernel (cpu, source abd)"}),
        ("place", {"kernel (cpu, confined)", "kernel (cpu, in the judge's own process)"}),
        ("declared", {"kernel (cpu, a.jsonl)", "kernel (cpu, b.jsonl)"}),
    ],
)
def test_what_differs_tells_runs_apart(name: str, labels: set[str]) -> None:
    one, other = build_recorded(*ALL, source="a.jsonl"), build_recorded(*ALL, source="b.jsonl", **OTHERS[name])
    found, info = aggregate_runs([one, other], command="report")
    assert {one.implementation.label for one in build_summary(found, info).implementations} == labels == set(info.files)
    assert sorted(info.files.values()) == [["a.jsonl"], ["b.jsonl"]]
    page = unescape(render_html(found, info))
    assert all(label.removeprefix("kernel (").removesuffix(")") in page for label in labels)


def test_other_platforms_need_no_such_words() -> None:
    gpu = build_recorded(*ALL, environment={"jax": "0.10.2", "backend": "gpu"}, source="gpu.jsonl")
    done = {number: (msgspec.structs.replace(found[0], platform="gpu"),) for number, found in gpu.done.items()}
    found, info = aggregate_runs(
        [build_recorded(*ALL, source="cpu.jsonl"), dataclasses.replace(gpu, done=done)], command="report"
    )
    assert [standing.implementation.label for standing in build_summary(found, info).implementations] == [
        "kernel (cpu)",
        "kernel (gpu)",
    ]
    assert info.environment["backend"] == "cpu (cpu.jsonl); gpu (gpu.jsonl)"
    assert info.environment["jax"] == "0.10.2"


def test_what_older_files_lack_is_unknown() -> None:
    found, info = aggregate_runs([RecordedRun(source="old.jsonl", others=(build_record(CASES[0]),))], command="report")
    assert build_summary(found, info).headline == ("kernel (cpu) passes as far as is known (no run record).")
    assert info.environment["environment"] == "unknown"
    assert (info.tolerances, info.coverage) == ([], [])
    for text in (render_html(found, info), render_markdown(found, info)):
        assert "✓ conforms" not in text
        assert "it is unknown whether all that was planned was judged" in text
    assert "unknown" in info.notes[0]


def test_few_blocks_come_from_the_record() -> None:
    one = Kernel(source="abc", block_lengths=(512,), arrays=(CoveringArraySize(strength=2, combinations=4),))
    jobs = build_run().jobs[:1]
    headline, _ = render_summary(build_recorded(0, kernels={"kernel": one}, jobs=jobs))
    assert "checked on one block of 512 queries and one block of 512 keys only" in headline


def test_an_implementation_that_no_job_reached_is_named() -> None:
    jobs = (*build_run().jobs, PlannedJob("other", CASES[0], ("forward",)))
    _, info = render_summary(
        build_recorded(0, how=None, jobs=jobs, kernels={**build_run().kernels, "other": Kernel(arrays=())})
    )
    assert "other: none of its jobs was judged" in info.notes


def test_seeds_that_are_judged_apart_are_each_whole() -> None:
    headline, _ = render_summary(build_recorded(*ALL), build_recorded(0, how=None, seeds=(1,)))
    assert headline == "kernel (cpu) passes so far (1 of 4 jobs)."


def test_limits_that_are_raised_are_told_and_lowered_ones_are_not() -> None:
    rows = tolerances.override_limits(
        tolerances.load_default_tolerances(), {"f32.out": 50.0, "bf16.dk": 1.0}, "pyproject.toml"
    ).rows()
    assert provenance._list_raised_limits(rows) == ("limit of f32.out 50",)
    assert provenance._list_raised_limits(tolerances.load_default_tolerances().rows()) == ()


def test_a_digest_is_of_the_files_that_a_kernel_names(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("TEXT, MODULE = open('kernel.txt').read(), __import__('other')\n")
    found = []
    for file in ("kernel.txt", "other.py", "stranger.py"):
        (tmp_path / file).write_text("1")
        found.append(source_digests.describe_source(f"{tmp_path}/kernel.py:attention")[1])
    assert found[0] != found[1] == found[2]
