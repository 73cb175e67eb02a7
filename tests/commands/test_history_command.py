"""`history` from the command line: files, folders, shards, copies, and what cannot be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from conformance import cli, runs
from conformance.record_schema import MEASUREMENT_SCHEMA as MEASURED
from conformance.records import FAIL, PASS, Record, serialize_record
from conformance.runs import COMPLETE, End, Kernel, PlannedJob, Run

CASES = [f"train/f32/B1.T{n}.S{n}.N2.K2.H64.V64/causal/normal/s0" for n in (8, 9, 10)]
JOBS = tuple(PlannedJob("kernel", case, ("forward", "gradients")) for case in CASES)
RUN = Run(
    started="",
    command="run",
    level="quick",
    seeds=(0,),
    environment={"jax": "0.10.2"},
    kernels={"kernel": Kernel(source="abc")},
    jobs=JOBS,
)


def record(case: str, verdict: str = PASS) -> Record:
    return Record(
        implementation="kernel",
        platform="cpu",
        case=case,
        check=("forward", "gradients")[CASES.index(case) % 2],  # one check alone never says that a kernel conforms
        observable="out",
        verdict=verdict,
        ratio=1.0 if verdict == PASS else 40.0,
        limit=4.0,
        dtype="f32",
    )


def written(
    name: str, day: int, *, verdict: str = PASS, jax: str = "0.10.2", shard: str = "", whole: bool = True
) -> None:
    """Write the file of a run, or of one of three shards."""
    began = f"2026-01-{day:02d}T00:00:00+00:00"
    run = dataclasses.replace(RUN, started=began, environment={"jax": jax}, shard=shard)
    mine = [int(shard[0]) - 1] if shard else range(3 if whole else 1)
    lines = [runs.serialize_run(run) + "\n", *(runs.serialize_job(n, [record(CASES[n], verdict)]) for n in mine)]
    if whole:
        lines.append(runs.serialize_end(End(ended=began, how=COMPLETE, jobs=len(mine), seconds=1.0)) + "\n")
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(lines))


def run(*arguments: str) -> int:
    try:
        return cli.main(cli.build_parser().parse_args(["history", *arguments]))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def rows(said: str) -> list[list[str]]:
    """Parse the printed lines of runs: number, day, time, level, share of the plan, and so on."""
    return [line.split() for line in said.splitlines() if line[:2] == "  " and line[2:3].isdigit()]


def test_runs_are_told_from_the_oldest_to_the_newest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("3.jsonl", 3, verdict=FAIL, jax="0.11.0")
    written("1.jsonl", 1)
    written("2.jsonl", 2, whole=False)
    (folder / "old.jsonl").write_text(serialize_record(record(CASES[0])) + "\n")
    assert run("3.jsonl", "1.jsonl", "2.jsonl", "old.jsonl", "--report=h.html", "--markdown=h.md") == 0
    said = capsys.readouterr().out
    found = rows(said)
    assert [row[1] for row in found] == ["unknown", "2026-01-01", "2026-01-02", "2026-01-03"]
    assert [row[4] for row in found[1:]] == ["whole", "interrupted", "whole"]
    assert found[0][1:4] == ["unknown"] * 3
    assert "fails since run 4 (2026-01-03 00:00); run 2 was the last whole run that conformed" in said
    assert "before run 4: jax 0.10.2 → 0.11.0" in said
    assert "run 1: old.jsonl: no run record" in said
    assert (folder / "h.html").read_text().count("<svg") == 1
    assert "| 4 | 2026-01-03 00:00 | quick | whole | ✗ does not conform | 3 |" in (folder / "h.md").read_text()


def test_a_folder_is_all_the_runs_in_it_and_shards_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    for shard in ("1/3", "2/3", "3/3"):
        written(f"runs/1/{shard[0]}.jsonl", 1, shard=shard)
    written("runs/2/1.jsonl", 2, shard="1/3")
    written("runs/copy.jsonl", 2, shard="1/3")
    Path("runs/speed.jsonl").write_text(f'{{"schema": "{MEASURED}"}}\n')
    assert run("runs") == 0
    said = capsys.readouterr().out
    assert [(row[4], row[-1]) for row in rows(said)] == [("whole", "more"), ("partial", "1.jsonl")]
    assert "its run is also in another file" in said
    assert "speed.jsonl: measurements of `bench`" in said
    assert "run 2: shard 2 of 3 is missing" in said


def test_what_commas_join_is_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    written("1.jsonl", 1, shard="1/3")
    written("2.jsonl", 2, shard="2/3", jax="0.11.0")
    written("3.jsonl", 1, shard="2/3")
    assert run("1.jsonl,3.jsonl", "2.jsonl") == 0
    assert len(rows(capsys.readouterr().out)) == 2
    assert run("1.jsonl,2.jsonl") == 2
    assert "1.jsonl,2.jsonl has runs of kernel that differ, such as of jax 0.10.2" in capsys.readouterr().err


def test_what_cannot_be_shown_is_one_clear_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("1.jsonl", 1)
    (folder / "empty").mkdir()
    (folder / "nothing.jsonl").write_text("")
    (folder / "junk.jsonl").write_text("[]\n\n")
    text = runs.serialize_run(dataclasses.replace(RUN, started="today")) + "\n"
    (folder / "when.jsonl").write_text(text)
    for arguments, message in (
        (["absent.jsonl"], "absent.jsonl cannot be read"),
        (["1.jsonl,absent.jsonl"], "absent.jsonl cannot be read"),
        (["empty"], "empty has no file of records"),
        (["nothing.jsonl"], "there is no run in nothing.jsonl"),
        (["junk.jsonl"], "junk.jsonl:1 is not a conformance record"),
        (["when.jsonl"], "when.jsonl does not say when its run began: 'today' is not a time"),
        (["1.jsonl", "--report=1.jsonl"], "1.jsonl is no page"),
        (["1.jsonl", "--report=absent/h.html"], "cannot be written"),
        (["1.jsonl", "--report=h", "--markdown=h"], "two outputs go to h"),
        ([], "the following arguments are required"),
    ):
        capsys.readouterr()
        assert run(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert message in line
    assert runs.read_runs(folder / "1.jsonl")[0].is_complete
