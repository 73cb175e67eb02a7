"""`report` prints the verdict of merged files, and `report --gate` gives it as exit code."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from conformance import cli
from reports.records import (
    FAIL,
    PASS,
    UNSUPPORTED,
    Kernel,
    PlannedJob,
    Record,
    Run,
    read_runs,
    serialize_job,
    serialize_run,
)

CASES = [f"train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s{seed}" for seed in range(2)]


def run(*arguments: str) -> int:
    return cli.main(cli.build_parser().parse_args(["report", *arguments]))


def write(name: str, shard: int, verdict: str = PASS, *, done: bool = True) -> str:
    """Write the file of one of two shards, each with one of two cases."""
    jobs = tuple(PlannedJob("it", case, ("forward",)) for case in CASES)
    ran = Run(
        started="2026-01-01T00:00:00+00:00",
        command="run",
        level="quick",
        seeds=(0,),
        shard=f"{shard}/2",
        tolerances=(),
        kernels={"it": Kernel(arrays=())},
        jobs=jobs,
        resumed=(),
    )
    record = Record(
        implementation="it",
        platform="cpu",
        case=CASES[shard - 1],
        check="forward",
        observable="out",
        verdict=verdict,
        ratio=None if verdict == UNSUPPORTED else 0.1 if verdict == PASS else 9.0,
        limit=None if verdict == UNSUPPORTED else 4.0,
        reason="" if verdict == PASS else "a reason",
    )
    text = serialize_run(ran) + "\n" + (serialize_job(shard - 1, [record]) if done else "")
    Path(name).write_text(text)
    return name


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def test_shards_that_pass_conform(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write("1.jsonl", 1), write("2.jsonl", 2), "--gate", "--markdown=m.md") == 0
    assert "passes forward" in capsys.readouterr().out
    assert "passes forward" in Path("m.md").read_text()


def test_one_red_shard_is_red_and_without_the_gate_only_said(capsys: pytest.CaptureFixture[str]) -> None:
    files = write("1.jsonl", 1), write("2.jsonl", 2, FAIL)
    assert run(*files, "--gate") == 1
    assert "does not conform" in capsys.readouterr().out
    assert run(*files) == 0
    assert "does not conform" in capsys.readouterr().out


def test_a_missing_shard_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write("1.jsonl", 1), "--gate") == 2
    assert "shard 2 of 2 is missing" in capsys.readouterr().out
    assert run(write("1.jsonl", 1, FAIL), "--gate") == 1


def test_nothing_judged_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write("1.jsonl", 1, UNSUPPORTED), write("2.jsonl", 2, UNSUPPORTED), "--gate") == 2
    assert "nothing was judged" in capsys.readouterr().out


def test_the_shards_of_two_runs_are_not_those_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    write("1.jsonl", 1), write("2.jsonl", 2)
    (one,) = read_runs(Path("2.jsonl"))
    assert one.run is not None
    other = msgspec.structs.replace(one.run, level="standard")
    Path("2.jsonl").write_text(serialize_run(other) + "\n" + serialize_job(1, one.records))
    assert run("1.jsonl", "2.jsonl", "--gate") == 2
    assert "is missing" in capsys.readouterr().out


def test_verdicts_and_findings_are_written_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    files = write("1.jsonl", 1), write("2.jsonl", 2, FAIL)
    assert run(*files, "--json=findings.json") == 0
    found = json.loads(Path("findings.json").read_text())
    assert [one["verdict"] for one in found["implementations"]] == ["does not conform"]
    (finding,) = found["findings"]
    assert finding["case"] == CASES[1]
    assert finding["failures"] == 1
    assert finding["title"]
    assert run(*files, "--json=findings.json") == 0  # a file of its own kind is replaced
    assert run(*files, "--json=1.jsonl") == 2
    assert "1.jsonl" in capsys.readouterr().err
