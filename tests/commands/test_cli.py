"""The command line: exit codes, one clear line for what cannot be done, and results that survive."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import msgspec
import pytest

from conformance import cli
from conformance.cost.commands import bench
from conformance.session import planned_run
from reports import records
from reports.records import ERROR, EXPECTED_FAIL, FAIL, UNEXPECTED_PASS, UNJUDGED, UNSUPPORTED, read_measurements
from reports.records.measurement import FORWARD
from tests.commands.kernel_folder import CASE, KERNELS, fill, judge_kernel, run_cli
from tests.process_helpers import interrupt_command

FEW = "train/f32/*.T1.*.H64.*"


def list_commands() -> list[str]:
    """List the names of all sub-commands."""
    (found,) = (action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return list(found.choices)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["", *list_commands()])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*filter(None, [command, "--help"])) == 0
    said = capsys.readouterr().out
    assert "examples:" in said
    assert "exit codes: 0" in said
    program = "attention-conformance" if command == "completion" else "python -m conformance"
    assert said.count(f"  {program} {command or 'run'}") >= 2
    groups = [line for line in said.splitlines() if re.fullmatch(r"[^ ].*:", line)]
    assert command in ("", "completion", "serve") or len(groups) >= 3, groups  # two of its own, and that of --help


@pytest.mark.parametrize("command", list_commands())
def test_no_path_and_no_name_is_empty(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = (action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    actions = [action for action in found.choices[command]._actions if action.nargs != 0]
    needed = [f"{name}=x" for action in actions if action.required for name in action.option_strings[:1]]
    places = [action.choices or ["x"] for action in actions if not action.option_strings]
    for action in actions:
        if action.type is None and not action.choices:
            given = [f"{action.option_strings[0]}="] if action.option_strings else []
            words = [next(iter(place)) for place in places] if given else [""] * len(places)
            with pytest.raises(SystemExit, match="2"):
                cli.build_parser().parse_args([command, *needed, *given, *words])
            said = capsys.readouterr().err
            assert "must not be empty" in said
            assert not given or action.option_strings[0] in said


def test_help_does_not_load_jax() -> None:
    code = "import sys; from conformance import cli; cli.build_parser(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge_kernel("right") == 0
    assert "passes as far as checked (narrowed to one case)" in " ".join(capsys.readouterr().out.split())
    assert judge_kernel("wrong") == 1
    said = capsys.readouterr().out
    assert "does not conform" in said
    assert f"python -m conformance run --impl=kernels.py:wrong --case={CASE} --check=forward" in said
    assert judge_kernel("never") == 2
    assert "could not be judged" in capsys.readouterr().out


def test_a_case_that_is_not_supported_is_shown_with_its_reason(folder: Path) -> None:
    capped = CASE.replace("/causal", "/causal/softcap30")
    assert judge_kernel("right", "--check=forward", "--json=r.jsonl", case=capped) == 2
    (found,) = records.read_jsonl(folder / "r.jsonl")
    assert found.verdict == UNSUPPORTED
    assert found.reason == "soft_cap: the function has no parameter 'soft_cap'"


def test_what_cannot_run_here_is_shown_and_fails_nothing_else(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    case = CASE.replace("f32", "bf16")
    assert run_cli("run", "--impl=jax_nn_cudnn", f"--case={case}") == 2
    assert run_cli("run", "--impl=dot_product", "--impl=jax_nn_cudnn", f"--case={case}", "--json=r.jsonl") == 0
    assert "jax_nn_cudnn (gpu)" in capsys.readouterr().out
    absent = [record for record in records.read_jsonl(folder / "r.jsonl") if record.implementation == "jax_nn_cudnn"]
    assert [(record.verdict, record.check) for record in absent] == [(UNJUDGED, "hardware")]
    assert "needs an NVIDIA GPU" in absent[0].reason
    assert run_cli("list") == 0
    assert "not on this machine: cuDNN attention needs an NVIDIA GPU" in " ".join(capsys.readouterr().out.split())


def test_a_required_platform_that_judged_nothing_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge_kernel("right", "--check=forward", "--require-platform=tpu") == 2
    said = capsys.readouterr().err
    for part in ("--require-platform=tpu", "JAX computes on cpu here", "kernels.py:right"):
        assert part in said
    assert judge_kernel("right", "--check=forward", "--require-platform=cpu") == 0


def test_what_is_written_for_another_platform_is_left_out_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = ("--impl=kernels.py:right", "--impl=splash_tpu", "--impl=jax_nn_cudnn")
    assert run_cli("run", *kernels, f"--case={CASE}", "--check=forward", "--require-platform=cpu") == 0
    said = " ".join(capsys.readouterr().err.split())
    for part in ("left out 2 of 3", "written for tpu: splash_tpu", "written for gpu: jax_nn_cudnn"):
        assert part in said


def test_outputs_are_written_and_can_be_merged(folder: Path) -> None:
    assert judge_kernel("right", "--check=forward", "--report=a.html", "--json=copy.jsonl", "--markdown=a.md") == 0
    assert (folder / "a.jsonl").read_text() == (folder / "copy.jsonl").read_text()
    assert (folder / "a.md").read_text()
    assert judge_kernel("wrong", "--check=forward", "--json=b.jsonl") == 1
    assert run_cli("report", "a.jsonl", "b.jsonl", "--report=both.html") == 0
    page = (folder / "both.html").read_text()
    assert "kernels.py:right" in page
    assert "kernels.py:wrong" in page


def expect_failure(folder: Path, name: str, **fields: object) -> None:
    values = {"implementation": f"kernels.py:{name}", "reason": "known", **fields}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    table = "[[tool.attention_conformance.expected_failures]]\n"
    (folder / "pyproject.toml").write_text(table + "\n".join(lines) + "\n")


def test_expected_failures(folder: Path) -> None:
    expect_failure(folder, "wrong", link="https://example.org/1")
    assert judge_kernel("wrong", "--check=forward", "--json=r.jsonl") == 0
    (found,) = records.read_jsonl(folder / "r.jsonl")
    assert found.verdict == EXPECTED_FAIL
    assert "expected: known (https://example.org/1)" in found.reason


def test_an_expected_failure_that_passes_turns_red(folder: Path) -> None:
    expect_failure(folder, "right")
    assert judge_kernel("right", "--check=forward", "--json=r.jsonl") == 1
    (found,) = records.read_jsonl(folder / "r.jsonl")
    assert found.verdict == UNEXPECTED_PASS


def without_seconds(path: Path) -> list[records.Record]:
    return records.merge_records(msgspec.structs.replace(record, seconds=0.0) for record in records.read_jsonl(path))


@pytest.mark.long
def test_records_do_not_depend_on_the_number_of_processes(folder: Path) -> None:
    for jobs in ("1", "2"):
        assert (
            run_cli("run", "--impl=kernels.py:right", f"--cases={FEW}", f"--jobs={jobs}", f"--json={jobs}.jsonl") == 0
        )
    assert without_seconds(folder / "1.jsonl") == without_seconds(folder / "2.jsonl")


@pytest.mark.long
def test_a_kernel_that_kills_its_process_costs_only_its_own_case(folder: Path) -> None:
    some = "train/f32/*.T48.*"  # with a soft cap and without
    assert run_cli("run", "--impl=kernels.py:dies", f"--cases={some}", "--jobs=2", "--json=r.jsonl") == 1
    found = records.read_jsonl(folder / "r.jsonl")
    lost = [r for r in found if r.verdict == ERROR]
    assert lost
    assert all("softcap" in r.case and "process" in r.reason for r in lost)
    assert {r.case for r in found} - {r.case for r in lost}
    assert not any(r.verdict == FAIL for r in found)


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_first_failure_ends_a_run_that_is_to_fail_fast(
    jobs: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("run", "--impl=kernels.py:wrong", f"--jobs={jobs}", "--fail-fast", "--json=r.jsonl")
    assert run_cli(*command) == 1
    found = records.read_jsonl(folder / "r.jsonl")
    assert len({r.case for r in found if r.verdict == FAIL}) == 1
    assert len({r.case for r in found}) <= 3 * jobs
    said = capsys.readouterr()
    assert "stopped at the first failure" in said.err
    assert "does not conform" in said.out


@pytest.mark.long
def test_without_a_failure_a_run_that_is_to_fail_fast_is_like_any_other(folder: Path) -> None:
    for name, more in (("plain", ()), ("fast", ("--fail-fast",))):
        assert (
            run_cli("run", "--impl=kernels.py:right", f"--cases={FEW}", "--jobs=1", f"--json={name}.jsonl", *more) == 0
        )
    plain, fast = (records.read_jsonl(folder / f"{name}.jsonl") for name in ("plain", "fast"))
    assert sorted((r.case, r.check, r.observable) for r in plain) == sorted(
        (r.case, r.check, r.observable) for r in fast
    )


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.long)])
def test_an_interrupted_run_keeps_what_it_has(jobs: int, folder: Path) -> None:
    command = ["-m", "conformance", "run", "--impl=kernels.py:slow", "--in-process"]
    command += [f"--jobs={jobs}", "--report=r.html"]
    found = interrupt_command(*command, traced=20 * jobs)  # the first results have come, some cases from each worker
    assert found.returncode == 130
    assert "Traceback" not in found.out + found.err
    assert "Interrupted" in found.out
    assert records.read_jsonl(folder / "r.jsonl")
    assert (folder / "r.html").exists()
    deadline = time.monotonic() + 5
    while _running(found.group):
        assert time.monotonic() < deadline, "workers are left behind"
        time.sleep(0.1)


def _running(group: int) -> bool:
    listed = subprocess.run(["ps", "-e", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(int(line.split()[0]) == group and "Z" not in line.split()[1] for line in listed.splitlines())


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("implementations", "block_flash"),
        ("checks", "gradients_lse"),
        ("checks", "every case of the"),
        ("features", "soft_cap"),
        ("cases", "train/f32"),
    ],
)
def test_lists(what: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("list", what) == 0
    assert expected in capsys.readouterr().out


def test_cases_of_an_implementation_are_those_it_supports(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("list", "cases", "--impl=kernels.py:right", "--cases=train/f32") == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed
    assert all(line.startswith("train/f32/") and "softcap" not in line for line in listed)


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "cases", "--impl=writes.py:attention", "--cases=train/f32"],
        ["run", "--impl=writes.py:attention", f"--case={CASE}", "--check=forward"],
        ["bench", "--impl=writes.py:exits", f"--case={CASE}"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_kernel_of_yours_is_not_imported_where_it_is_judged(arguments: list[str], folder: Path) -> None:
    text = f"{KERNELS}\nattention = right\nexits = lambda q, k, v, *, causal=False: os._exit(0)\n"
    there = "import sys\nif 'pytest' in sys.modules:\n    open('written', 'w').close()\n"
    (folder / "writes.py").write_text(text + there)
    assert run_cli(*arguments) == (2 if arguments[0] == "bench" else 0)
    assert not (folder / "written").exists()


def test_a_killed_bench_keeps_what_it_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "write_outputs", lambda *_, **__: None)  # a killed command does not get there
    words = ("--impl=kernels.py:right", f"--case={CASE}", "--phase=forward", "--runs=1", "--json=b.jsonl")
    run_cli("bench", *words)
    (found,) = read_measurements(folder / "b.jsonl")
    assert (found.implementation, found.phase) == ("kernels.py:right", FORWARD)


def test_explain_says_what_a_case_is_and_what_judges_it(capsys: pytest.CaptureFixture[str]) -> None:
    case = "train/bf16/B2.T16.S16.N4.K2.H16.V16/causal/seg/softcap30/sinks/normal/s7"
    assert run_cli("explain", case) == 0
    said = capsys.readouterr().out
    for part in ("causal mask", "2 query head(s) to each", "packed sequences", "30 * tanh", "one logit a query head"):
        assert part in said
    assert "bfloat16" in said or "bf16" in said
    assert "mask_ignored" in said
    assert f"--case={case}" in said


@pytest.mark.parametrize(
    ("backend", "cores", "jobs", "workers"),
    [("cpu", 32, 300, 32), ("gpu", 32, 300, 8), ("gpu", 4, 300, 4), ("tpu", 32, 300, 1), ("cpu", 32, 8, 1)],
)
def test_processes_share_what_can_be_shared(
    backend: str, cores: int, jobs: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert planned_run.choose_worker_count(jobs) == workers
