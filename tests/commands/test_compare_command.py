"""`compare`, `--baseline`, `expect`, shards and merges, from the command line."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from conformance import cli
from reports import records
from reports.records import FAIL, PASS, read_runs, serialize_job, serialize_run

CASE = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"
KERNEL = """
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def attention(q, k, v, *, causal=False):
    return {factor} * naive.attention(q, k, v, causal=causal)
"""


def run(*arguments: str) -> int:
    try:
        return cli.main(cli.build_parser().parse_args(arguments))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


def judge(name: str, *options: str) -> int:
    return run("run", f"--impl={name}.py:attention", f"--case={CASE}", "--check=forward", *options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder with a kernel before and after it broke, and records of both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    for name, factor in (("before", "1"), ("after", "1.01")):
        (tmp_path / f"{name}.py").write_text(KERNEL.format(factor=factor))
        judge(name, f"--json={name}.jsonl")
    return tmp_path


def test_a_kernel_that_became_wrong_is_a_regression_and_one_that_became_right_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run("compare", "before.jsonl", "after.jsonl", "--report=c.html", "--markdown=c.md") == 1
    assert "Regression: 1 new failure." in capsys.readouterr().out
    assert "1 new failure" in (folder / "c.html").read_text()
    assert "1 new failure" in (folder / "c.md").read_text()
    assert run("compare", "after.jsonl", "before.jsonl") == 0
    assert "No regression: 1 fixed" in capsys.readouterr().out
    assert run("compare", "before.jsonl", "before.jsonl") == 0


@pytest.mark.parametrize("command", ["report after.jsonl", "compare before.jsonl after.jsonl"])
def test_what_reads_files_of_records_loads_no_jax(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    arguments = ["-X", "importtime", "-m", "conformance", *command.split(), "--report=page.html"]
    loaded = subprocess.run([sys.executable, *arguments], check=False, capture_output=True, text=True).stderr
    assert (folder / "page.html").exists()
    assert re.search(r"\| +numpy$", loaded, re.MULTILINE)
    assert not re.search(r"\| +jax$", loaded, re.MULTILINE)


@pytest.mark.long
def test_a_baseline_is_compared_in_one_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge("after", "--baseline=before.jsonl", "--json=now.jsonl") == 1
    assert "Regression: 1 new failure." in capsys.readouterr().out
    assert judge("before", "--baseline=before.jsonl") == 0
    assert judge("before", "--baseline=before.jsonl", "--json=before.jsonl") == 2
    assert "is written by this run too" in capsys.readouterr().err
    assert read_runs(folder / "before.jsonl")[0].is_complete


def test_a_baseline_that_conformed_where_nothing_fails_now_but_something_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = read_runs(folder / "before.jsonl")
    assert one.run is not None
    more = msgspec.structs.replace(one.records[0], observable="logsumexp")
    (folder / "more.jsonl").write_text(serialize_run(one.run) + "\n" + serialize_job(0, [*one.records, more]))
    assert judge("before", "--baseline=more.jsonl") == 1
    assert "Regression: 1 gone." in capsys.readouterr().out


def test_what_cannot_be_compared_is_one_clear_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = read_runs(folder / "before.jsonl")
    assert one.run is not None
    other = msgspec.structs.replace(one.run, environment={**one.run.environment, "jax": "0.0.1"})
    text = serialize_run(other) + "\n" + serialize_job(0, one.records)
    (folder / "other.jsonl").write_text(text)
    for arguments, message in (
        (["before.jsonl", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["before.jsonl,other.jsonl", "after.jsonl"], "has runs of before.py:attention that differ, such as of jax"),
        (["before.jsonl", "after.jsonl", "--report=after.jsonl"], "after.jsonl is no page"),
        (["before.jsonl", "after.jsonl", "--report=absent/c.html"], "cannot be written"),
    ):
        capsys.readouterr()
        assert run("compare", *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert message in line


@pytest.mark.long
def test_entries_of_what_fails_make_it_an_expected_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run("expect", "after.jsonl", "before.jsonl", "--impl=after.py:attention") == 0
    text = capsys.readouterr().out
    assert len(tomllib.loads(text)["tool"]["attention_conformance"]["expected_failures"]) == 1
    (folder / "pyproject.toml").write_text(text.replace('reason = ""', 'reason = "a factor"'))
    assert judge("after") == 0
    assert run("expect", "before.jsonl") == 0


@pytest.mark.long
def test_shards_are_the_whole_run_and_one_that_is_missing_is_missed(folder: Path) -> None:
    few = ("run", "--impl=before.py:attention", "--cases=train/f32/*.T1.*", "--check=forward", "--jobs=1")
    assert run(*few, "--json=whole.jsonl") == 0
    for shard in ("1", "2"):
        assert run(*few, f"--shard={shard}/2", f"--json={shard}.jsonl") == 0
    one, two, whole = (
        records.merge_records(
            msgspec.structs.replace(r, seconds=0.0) for r in records.read_jsonl(folder / f"{name}.jsonl")
        )
        for name in ("1", "2", "whole")
    )
    assert one
    assert two
    assert records.merge_records(one, two) == whole
    assert run("report", "1.jsonl", "--report=p.html") == 0
    assert "shard 2 of 2 is missing" in (folder / "p.html").read_text()
    assert run("report", "1.jsonl", "2.jsonl", "--report=p.html") == 0
    page = (folder / "p.html").read_text()
    assert "is missing" not in page
    assert "run <b>complete, narrowed to --cases=" in page
    assert run(*few, "--shard=3/2") == 2


@pytest.mark.long
def test_passes_and_failures_of_two_kernels_of_one_name_stand_beside_each_other(folder: Path) -> None:
    (folder / "before.py").write_text(KERNEL.format(factor="1.01"))
    assert judge("before", "--json=broken.jsonl") == 1
    for names in (("before.jsonl", "broken.jsonl"), ("broken.jsonl", "before.jsonl")):
        assert run("report", *names, "--report=p.html") == 0
        page = (folder / "p.html").read_text()
        assert "1 does not conform (narrowed to one case --check=forward), 1 passes as far as checked" in page
        assert page.count("cpu, source ") > 1
    assert {PASS, FAIL} == {r.verdict for name in names for r in records.read_jsonl(folder / name)}


@pytest.mark.long
def test_a_step_of_github_gets_its_summary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "step.md"))
    assert judge("before") == 0
    assert judge("after", f"--markdown={folder / 'step.md'}") == 1
    assert (folder / "step.md").read_text().count("## Attention conformance") == 2


def test_failures_of_one_cause_are_one_group_and_one_entry(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("run", "--impl=before.py:attention", "--cases=train/f32/*/causal", "--check=forward", "--json=all.jsonl")
    (one,) = read_runs(folder / "all.jsonl")
    assert one.run is not None
    wrong = {
        number: [msgspec.structs.replace(record, verdict=FAIL, ratio=9.0, reason="wrong") for record in found]
        for number, found in one.done.items()
        if all(record.verdict == PASS for record in found)
    }
    jobs = "".join(serialize_job(number, found) for number, found in wrong.items())
    (folder / "wrong.jsonl").write_text(serialize_run(one.run) + "\n" + jobs)
    assert (failures := sum(map(len, wrong.values()))) > 2
    capsys.readouterr()
    assert run("compare", "all.jsonl", "wrong.jsonl") == 1
    out = capsys.readouterr().out
    assert out.count("new failures in ") == 1
    assert out.count("pass → fail") == 1
    assert run("compare", "all.jsonl", "wrong.jsonl", "--all") == 1
    assert capsys.readouterr().out.count("pass → fail") == failures
    assert run("expect", "wrong.jsonl") == 0
    entries = tomllib.loads(capsys.readouterr().out)["tool"]["attention_conformance"]["expected_failures"]
    assert len(entries) == 1
