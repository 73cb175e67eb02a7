"""Run records, finished jobs and ends are read back unchanged, and a cut-off line is noted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from reports import records
from reports.records import (
    COMPLETE,
    FAIL,
    PASS,
    CoveringArraySize,
    End,
    Kernel,
    PlannedJob,
    Query,
    Record,
    RecordedRun,
    Run,
    list_differences,
    read_runs,
    serialize_end,
    serialize_job,
    serialize_probe,
    serialize_run,
)

CASES = ("train/f32/a", "train/f32/b", "train/f32/c")
KERNEL = Kernel(
    package="kernels 1.2",
    source="abc",
    declared={"behind_mask": "finite", "arithmetic": {"products": "exact"}},
    asks_less=('behind_mask="finite"',),
    block_lengths=(128,),
    arrays=(CoveringArraySize(strength=2, combinations=6), CoveringArraySize(strength=2, combinations=0)),
    declined=1,
)
RUN = Run(
    started="2026-01-01T00:00:00+00:00",
    command="run",
    level="quick",
    seeds=(0,),
    query=Query(impl=["kernel"]),
    environment={"jax": "0.10.2"},
    tolerances=({"dtype": "f32", "limit": 4.0},),
    kernels={"kernel": KERNEL},
    jobs=tuple(PlannedJob("kernel", case, ("forward",), (row, "")) for case, row in zip(CASES, "012", strict=True)),
    whole={"kernel": 3},
    resumed=(),
)
END = End(ended="2026-01-01T00:01:00+00:00", how=COMPLETE, jobs=3, seconds=60.0)


def passed(case: str) -> Record:
    return Record(
        implementation="kernel", platform="cpu", case=case, check="forward", observable="out", verdict=PASS, ratio=0.5
    )


def text(*, jobs: int = 3, run: Run = RUN, end: End | None = END) -> str:
    lines = serialize_run(run) + "\n"
    lines += "".join(serialize_job(number, [passed(case)]) for number, case in enumerate(CASES[:jobs]))
    return lines + (serialize_end(end) + "\n" if end is not None else "")


def read(tmp_path: Path, content: str, name: str = "r.jsonl") -> list[RecordedRun]:
    (tmp_path / name).write_text(content)
    return read_runs(tmp_path / name)


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    (found,) = read(tmp_path, text())
    assert found.run == RUN
    assert found.end == END
    assert found.is_complete
    assert found.done == {number: (passed(case),) for number, case in enumerate(CASES)}
    assert records.read_jsonl(tmp_path / "r.jsonl") == [passed(case) for case in CASES]


@pytest.mark.parametrize("kept", range(3))
def test_wherever_a_file_is_cut_off_finished_jobs_are_there(kept: int, tmp_path: Path) -> None:
    whole, less = text(end=None), text(jobs=kept, end=None)
    for cut in range(len(less), len(text(jobs=kept + 1, end=None)), 7):
        (found,) = read(tmp_path, whole[:cut])
        assert set(found.done) == set(range(kept))
        assert not found.is_complete
        assert bool(found.note) == (whole[cut - 1] != "\n")


def test_files_that_were_joined_are_runs_beside_each_other(tmp_path: Path) -> None:
    other = msgspec.structs.replace(RUN, environment={"jax": "0.12.0"})
    first, second = read(tmp_path, text() + text(run=other, jobs=1, end=None))
    assert (first.run, second.run) == (RUN, other)
    assert (len(first.done), len(second.done)) == (3, 1)


def test_older_files_are_records_without_a_run(tmp_path: Path) -> None:
    (found,) = read(tmp_path, records.serialize_record(passed("train/f32/a")) + "\n")
    assert found.run is None
    assert found.records == [passed("train/f32/a")]
    assert read(tmp_path, "") == []


@pytest.mark.parametrize(
    "line",
    [
        '{"schema": "attention-conformance/job/1", "job": 7, "records": 0}',
        '{"schema": "attention-conformance/job/1", "job": 0, "records": 2}',
        '{"schema": "attention-conformance/job/1"}',
        '{"schema": "attention-conformance/end/1", "how": "complete"}',
        '{"schema": "attention-conformance/run/2"}',
        '{"schema": "attention-conformance/run/3"}',
    ],
)
def test_what_is_no_word_of_a_run_is_named_by_file_and_line(line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"r\.jsonl:2 is no"):
        read(tmp_path, serialize_run(RUN) + "\n" + line + "\n")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"implementation": "other"}, "a job of kernel has a record of other"),
        ({"case": "train/f32/b"}, "a job of the case train/f32/a has a record of train/f32/b"),
        ({"check": "gradients"}, "a job of forward has a record of gradients"),
    ],
)
def test_a_record_that_answers_another_question_than_its_job_is_refused(
    changed: dict[str, str], why: str, tmp_path: Path
) -> None:
    record = msgspec.structs.replace(passed(CASES[0]), **changed)
    with pytest.raises(ValueError, match=rf"r\.jsonl:3 is not a line of a conformance run: {why}"):
        read(tmp_path, serialize_run(RUN) + "\n" + serialize_job(0, [record]))


def test_a_job_that_searches_branches_may_have_records_of_other_cases(tmp_path: Path) -> None:
    job = PlannedJob("kernel", CASES[0], (records.BRANCHES,), ("0", ""))
    found = [msgspec.structs.replace(passed(CASES[0]), check=records.BRANCHES), passed("train/f32/found")]
    run = msgspec.structs.replace(RUN, jobs=(job,))
    (back,) = read(tmp_path, serialize_run(run) + "\n" + serialize_job(0, found))
    assert back.done == {0: tuple(found)}


def test_a_record_of_a_kernel_that_the_run_does_not_judge_is_refused(tmp_path: Path) -> None:
    stranger = msgspec.structs.replace(passed("*"), implementation="other")
    for line in (records.serialize_record(stranger) + "\n", serialize_probe(stranger)):
        with pytest.raises(ValueError, match="the run judges kernel, but has a record of other"):
            read(tmp_path, text(end=None) + line)


def test_a_job_that_is_there_twice_has_both_answers(tmp_path: Path) -> None:
    failed = msgspec.structs.replace(passed(CASES[0]), verdict=FAIL)
    again = serialize_job(0, [failed]) + serialize_job(0, [passed(CASES[0])])
    (found,) = read(tmp_path, serialize_run(RUN) + "\n" + again)
    assert records.merge_records(found.records) == [failed]


def test_what_tells_most_comes_first_of_what_differs() -> None:
    one = RUN.provenance("kernel")
    changed = msgspec.structs.replace(
        RUN, environment={"jax": "0.12.0"}, kernels={"kernel": Kernel(source="abd", arrays=())}
    )
    found = list_differences(one, changed.provenance("kernel"))
    assert found == ["declared", "package", "source", "jax"]
    assert list_differences(one, one) == []
