"""Test the pytest gate as a kernel author runs it, from a repository of their own."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

from reports import records
from reports.records import PASS, UNSUPPORTED, read_runs, serialize_job, serialize_run
from tests.gate.gate_repository import FEW_CASES, KERNEL, Repository, create_repository, run_gate


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return create_repository(tmp_path, monkeypatch)


def strip_seconds(path: Path) -> list[records.Record]:
    return records.merge_records(msgspec.structs.replace(record, seconds=0.0) for record in records.read_jsonl(path))


@pytest.mark.long
def test_a_right_kernel_passes_and_what_it_lacks_is_skipped_with_the_reason(repository: Repository) -> None:
    result = run_gate(repository, "--conformance-cases=train/f32/B1*", "-rs", "-k", "T1 or sinks", from_nothing=True)
    assert result.ret == 0
    assert re.search(r"\d+ passed, \d+ skipped", result.stdout.lines[-1])
    result.stdout.fnmatch_lines(["SKIPPED * sinks: the function has no parameter 'sinks'*"])
    result.stdout.fnmatch_lines(["kernel.py:attention (cpu)  * pass, * unsupported"])


def test_the_kernel_is_not_imported_where_it_is_judged(repository: Repository) -> None:
    there = "import sys\nif 'pytest' in sys.modules:\n    open('written', 'w').close()\n"
    (repository.path / "kernel.py").write_text(KERNEL + there)
    assert run_gate(repository, FEW_CASES, "-k=T1 and forward").ret == 0
    assert not (repository.path / "written").exists()


def test_a_kernel_may_run_in_the_judges_process_and_the_command_says_so(repository: Repository) -> None:
    result = run_gate(
        repository, FEW_CASES, "-k=T1 and forward", "--conformance-in-process", "--conformance-json=r", name="wrong"
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(["  reproduce  python -m conformance run * --check=forward --in-process"])
    result.stdout.fnmatch_lines(["kernel.py:wrong ran in the judge's own process, which it could alter"])
    found = records.read_jsonl(repository.path / "r")
    assert all(records.IN_PROCESS in record.figures for record in found)


BY_FLAGS = """
import importlib
from tests.kernels import naive

def attention(q, k, v, *, causal=False, soft_cap=None):
    options = importlib.import_module("jax._src.lib").xla_client.CompileOptions().executable_build_options
    right = naive.attention(q, k, v, causal=causal, soft_cap=soft_cap)
    return right * bool(options.debug_options.xla_backend_optimization_level)
"""


@pytest.mark.long
def test_a_kernel_that_goes_by_the_compilers_flags_is_red(repository: Repository) -> None:
    (repository.path / "kernel.py").write_text(BY_FLAGS)
    result = run_gate(repository, FEW_CASES, "-k=T1 and forward", "--conformance-json=r.jsonl")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*kernel.py:attention (cpu) does not conform*"])
    found = records.read_jsonl(repository.path / "r.jsonl")
    (red,) = [record for record in found if record.verdict == records.FAIL]
    assert red.check == "flags"
    assert len([record for record in found if records.FLAGS_DIFFER in record.figures]) > 0


def collect_tests(repository: Repository, *arguments: str) -> list[str]:
    result = run_gate(repository, "--collect-only", "-q", *arguments)
    return [line for line in result.stdout.lines if "::" in line]


def test_settings_by_which_no_test_is_run_are_red(repository: Repository) -> None:
    (repository.path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    result = run_gate(repository, FEW_CASES)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*nothing was judged: no test was run*"])


def test_a_gate_that_selects_nothing_has_an_exit_code_of_its_own(repository: Repository) -> None:
    assert run_gate(repository, FEW_CASES, "-k=nothing_like_it").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_cases_are_chosen_by_their_ids(repository: Repository) -> None:
    capped = collect_tests(repository, "-k", "softcap")
    assert capped
    assert all("softcap" in name for name in capped)
    both = collect_tests(repository, "-k", "kernel and bf16 and not softcap")
    assert both
    assert all("bf16" in name and "softcap" not in name for name in both)
    assert all("-cpu-" in name for name in both)


@pytest.mark.long
def test_a_check_is_chosen_by_its_name_and_asked_alone(repository: Repository) -> None:
    result = run_gate(
        repository, FEW_CASES, "-k", "forward and kernel", "--conformance-json=r.jsonl", "--junitxml=j.xml"
    )
    assert result.ret == 0
    found = records.read_jsonl(repository.path / "r.jsonl")
    assert {record.check for record in found} == {"forward"}
    said = "narrowed to --conformance-cases='train/f32/*.T1.*.H64.*' -k 'forward and kernel'"
    (recorded,) = read_runs(repository.path / "r.jsonl")
    assert recorded.run is not None
    assert f"narrowed to {recorded.run.narrowed}" == said
    assert '<property name="checks" value="forward" />' in (repository.path / "j.xml").read_text()
    others = collect_tests(repository, "-k", "not forward")
    assert len(others) == len(collect_tests(repository))
    assert collect_tests(repository, "-k", "forms") != collect_tests(repository)


@pytest.mark.long
def test_a_gate_goes_on_with_a_file(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(repository.path / "step.md"))
    assert run_gate(repository, FEW_CASES, "--conformance-json=whole.jsonl").ret == 0
    assert "## Attention conformance" in (repository.path / "step.md").read_text()
    stopped = run_gate(repository, FEW_CASES, "--conformance-json=r.jsonl", "-k", "normal")
    assert stopped.ret == 0
    (before,) = read_runs(repository.path / "r.jsonl")
    assert before.run is not None
    kept = dict(list(before.done.items())[:2])
    lines = [
        serialize_run(before.run) + "\n",
        *(serialize_job(number, found) for number, found in kept.items()),
    ]
    (repository.path / "r.jsonl").write_text("".join(lines))
    resumed = run_gate(repository, FEW_CASES, "--conformance-resume=r.jsonl", "-n", "2")
    assert resumed.ret == 0
    resumed.stdout.fnmatch_lines(["* jobs were taken from the resumed file*"])
    assert strip_seconds(repository.path / "r.jsonl") == strip_seconds(repository.path / "whole.jsonl")
    (after,) = read_runs(repository.path / "r.jsonl")
    assert after.is_complete
    assert after.run is not None
    assert len(after.run.resumed) == 1
    refused = run_gate(repository, "--conformance-resume=r.jsonl")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "r.jsonl is from another run: narrowed was" in "".join(refused.errlines)


def test_a_plain_run_that_does_not_judge_says_what_does(repository: Repository) -> None:
    repository.settings('[tool.attention_conformance]\nimplementations = ["kernel.py:attention"]\n')
    (repository.path / "test_other.py").write_text("def test_it():\n    pass\n")
    plain = repository.pytest("-q", from_nothing=True)
    assert plain.ret == 0
    said = (
        "attention conformance: kernel.py:attention of pyproject.toml not judged; `pytest --pyargs conformance` judges"
    )
    plain.stdout.fnmatch_lines([said])
    assert "not judged" not in repository.pytest("-q", "test_other.py").stdout.str()


@pytest.mark.long
def test_the_report_and_its_records_are_the_same_from_two_processes(repository: Repository) -> None:
    assert run_gate(repository, FEW_CASES, "--conformance-report=one.html", "--require-platform=cpu").ret == 0
    two = repository.pytest(
        "--pyargs", "conformance", "--impl=kernel.py:attention", FEW_CASES, "--conformance-report=two.html", "-n", "2"
    )
    assert two.ret == 0
    assert strip_seconds(repository.path / "one.jsonl") == strip_seconds(repository.path / "two.jsonl")
    found = records.read_jsonl(repository.path / "one.jsonl")
    assert {record.verdict for record in found} <= {PASS, UNSUPPORTED}
    page = (repository.path / "two.html").read_text()
    assert "kernel.py:attention (cpu) passes as far as checked (narrowed to --conformance-cases=" in page


def test_a_required_platform_that_this_machine_lacks_fails_the_run(repository: Repository) -> None:
    result = run_gate(repository, FEW_CASES, "--require-platform=tpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (said,) = (line for line in result.errlines if line)
    for part in ("--require-platform=tpu", "JAX computes on cpu here", "kernel.py:attention"):
        assert part in said


def test_a_required_platform_counts_the_kernels_of_test_files(repository: Repository) -> None:
    text = """
from conformance.testing import conformance_tests
from tests.kernels import naive

test_it = conformance_tests(naive.attention, cases="train/f32/*.T1.*", checks="forward", sandbox=False)
"""
    (repository.path / "test_mine.py").write_text(text)
    assert repository.pytest("test_mine.py", "--require-platform=cpu").ret == 0
    refused = repository.pytest("test_mine.py", "--require-platform=gpu")
    assert refused.ret == 1
    refused.stdout.fnmatch_lines(["--require-platform=gpu: nothing was judged there"])


FAKE_GPU = """
import jax

jax.devices()
jax.default_backend = lambda: "gpu"
"""


@pytest.mark.parametrize("processes", [(), pytest.param(("-n", "2"), marks=pytest.mark.long)], ids=["alone", "xdist"])
def test_only_what_runs_on_the_required_gpu_is_collected(
    repository: Repository, processes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository.path / "fake_gpu.py").write_text(FAKE_GPU)
    monkeypatch.syspath_prepend(repository.path)
    monkeypatch.setenv("PYTHONPATH", str(repository.path), prepend=os.pathsep)
    names = ("dot_product", "splash_tpu", "flash_gpu", "ragged_tpu")
    words = ("-p", "fake_gpu", "--pyargs", "conformance", *(f"--impl={name}" for name in names))
    few = ("-k", "gpu and forward", "--conformance-cases=train/f32/*.T1.*")
    ending = processes or ("--collect-only", "-q")
    result = repository.pytest(*words, *few, "--require-platform=gpu", *ending, from_nothing=True)
    shown = result.stdout.str()
    for part in ("left out 2 of 4", "splash_tpu", "ragged_tpu"):
        assert part in shown
    assert "test_conforms[splash_tpu" not in shown
    if not processes:  # the exit status is that of a judge whose parts were replaced
        assert "test_conforms[dot_product-gpu-" in shown
        assert "test_conforms[flash_gpu-gpu-" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to judge: give --conformance-impl=NAME"),
        (["--impl=nope"], "unknown implementation 'nope'"),
        (["--impl=kernel.py:attention", "--conformance-cases=train/f99"], "no case of the grid matches"),
        (
            ["--impl=kernel.py:attention", "--conformance-report=absent/r.html"],
            "r.html cannot be written: No such file",
        ),
        (["--impl=kernel.py:attention", "--conformance-report=r.jsonl"], "give the page another suffix"),
        (["--impl=kernel.py:attention", "--conformance-report=kernel.py"], "--conformance-report=kernel.py is no page"),
        (["--impl=kernel.py:attention", "--conformance-json=kernel.py"], "--conformance-json=kernel.py is no file of"),
        (["--impl=kernel.py:attention", "--conformance-seed=random"], "give a number"),
        (["--impl=kernel.py:attention", f"--conformance-seed={2**64}"], "--conformance-seed must be less than 2**64"),
        (
            ["--impl=kernel.py:attention", "--conformance-timeout=0"],
            "--conformance-timeout must be more than zero, got",
        ),
        (
            ["--impl=kernel.py:attention", "--conformance-timeout=5", "--conformance-in-process"],
            "--conformance-timeout=5 limits only",
        ),
        (["--impl=kernel.py:attention", "--conformance-memory=-1"], "--conformance-memory must be more than zero, got"),
        (["--impl=kernel.py:attention", "--conformance-sandbox-read="], "--conformance-sandbox-read must not be empty"),
        (["--impl=kernel.py:attention", "--conformance-diagnose-seconds=-1"], "must not be negative, got -1"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: list[str], message: str, repository: Repository) -> None:
    result = repository.pytest("--pyargs", "conformance", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = [line for line in result.errlines if line]
    assert len(said) == 1
    assert said[0].startswith("ERROR: ")
    assert message in said[0]


def test_bad_settings_are_one_line(repository: Repository) -> None:
    repository.settings('[tool.attention_conformance]\nimplementatons = ["x"]\n')
    result = repository.pytest("--pyargs", "conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "unknown keys ['implementatons']" in "".join(result.errlines)


def test_other_test_runs_do_not_load_jax(repository: Repository) -> None:
    (repository.path / "test_other.py").write_text(
        "import sys\ndef test_nothing_heavy():\n    assert 'jax' not in sys.modules\n"
    )
    assert repository.pytest("test_other.py", from_nothing=True).ret == 0


@pytest.mark.long
def test_a_gate_is_compared_with_a_baseline(repository: Repository) -> None:
    assert run_gate(repository, FEW_CASES, "-k", "forward", "--conformance-json=before.jsonl").ret == 0
    again = run_gate(repository, FEW_CASES, "-k", "forward", "--conformance-baseline=before.jsonl")
    assert again.ret == 0
    (repository.path / "kernel.py").write_text(KERNEL.replace("return naive", "return 1.02 * naive"))
    worse = run_gate(repository, FEW_CASES, "-k", "forward", "--conformance-baseline=before.jsonl")
    assert worse.ret == 1
    worse.stdout.fnmatch_lines(["Regression: * new failures.", "FAILED *::baseline - Regression: *"])
    refused = run_gate(repository, FEW_CASES, "--conformance-baseline=absent.jsonl")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "--conformance-baseline: absent.jsonl cannot be read" in "".join(refused.errlines)


@pytest.mark.parametrize("processes", [(), pytest.param(("-n", "1"), marks=pytest.mark.long)], ids=["alone", "xdist"])
def test_the_suite_of_a_junit_file_says_what_holds_for_the_run(
    repository: Repository, processes: tuple[str, ...]
) -> None:
    options = (FEW_CASES, "-k", "forward", "--junitxml=j.xml", "--conformance-json=r.jsonl", "--conformance-seed=3")
    assert run_gate(repository, *options, *processes).ret == 0
    (recorded,) = read_runs(repository.path / "r.jsonl")
    assert recorded.run is not None
    (found,) = ElementTree.parse(repository.path / "j.xml").getroot().findall("testsuite/properties")
    said = {each.attrib["name"]: each.attrib["value"] for each in found}
    assert len(said) == len(found)  # each once
    assert (said["level"], said["seeds"], said["shard"]) == ("quick", "3", "")
    assert said["narrowed"] == recorded.run.narrowed != ""
    environment = {f"environment.{name}": value for name, value in recorded.run.environment.items()}
    assert {"environment.jax", "environment.commit", "environment.XLA_FLAGS", "environment.devices"} <= set(environment)
    assert environment.items() <= said.items()
    assert said["verdict[kernel.py:attention (cpu)]"].startswith("passes as far as checked (narrowed to --conformance-")
    assert said["declared[kernel.py:attention]"] == 'behind_mask="finite"'
    assert said["source[kernel.py:attention]"] == recorded.run.kernels["kernel.py:attention"].source != ""
    assert said["place[kernel.py:attention]"].startswith("ran in a ")


def test_the_suite_of_other_tests_has_no_properties_of_ours(repository: Repository) -> None:
    (repository.path / "test_other.py").write_text("def test_it():\n    pass\n")
    assert repository.pytest("test_other.py", "--junitxml=j.xml").ret == 0
    assert ElementTree.parse(repository.path / "j.xml").getroot().findall("testsuite/properties") == []
