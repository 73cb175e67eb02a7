"""Test what the pytest gate says about a failing kernel, and about expected failures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from conformance import cli
from reports import records
from reports.records import FAIL, read_runs
from tests.gate.gate_repository import FEW_CASES, KERNEL, Repository, create_repository, run_gate


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return create_repository(tmp_path, monkeypatch)


def test_a_kernel_that_hangs_costs_as_long_as_is_said(repository: Repository) -> None:
    hangs = "import time\ndef hangs(q, k, v, *, causal=False):\n    time.sleep(1000)\n"
    (repository.path / "kernel.py").write_text(KERNEL + hangs)
    limits = ("--conformance-timeout=1.5", "--conformance-memory=8")
    result = run_gate(repository, FEW_CASES, "-k=T1 and forward", "--maxfail=1", *limits, name="hangs")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "  why        the call did not return within 1.5 s (--timeout)*",
            "  reproduce  python -m conformance run * --timeout=1.5 --memory=8",
        ]
    )


def test_a_failure_says_what_where_and_how_to_repeat_it(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_gate(repository, FEW_CASES, "--maxfail=1", "--conformance-report=r.html", name="wrong")
    assert result.ret == 1
    assert FAIL in {record.verdict for record in records.read_jsonl(repository.path / "r.jsonl")}
    result.stdout.fnmatch_lines(
        [
            "kernel.py:wrong (cpu): forward out fail",
            "  case       train/f32/*",
            "  why        ratio * exceeds *",
            "  worst      at [[]*, *[]]: got *, expected *, bound *, ratio * (limit 4)",
            "  pattern    1.02 times the right value",
            "  reproduce  python -m conformance run --impl=kernel.py:wrong --case=train/f32/* --check=forward",
            "FAILED *::test_conforms[[]kernel.py:wrong-cpu-train/f32/*",
        ]
    )
    said = result.stdout.str()
    assert not re.search(r"test_gate\.py:\d", said)  # no frames of the harness
    assert "Traceback" not in said
    assert "full-trace" not in said
    command = next(line for line in said.splitlines() if line.startswith("  reproduce"))
    words = shlex.split(command)[1:]
    assert words[:3] == ["python", "-m", "conformance"]
    capsys.readouterr()
    assert cli.main(cli.build_parser().parse_args(words[3:])) == 1
    assert "does not conform" in capsys.readouterr().out


EXPECTED = """
[tool.attention_conformance]
implementations = ["kernel.py:{name}"]
[[tool.attention_conformance.expected_failures]]
implementation = "kernel.py:{name}"
reason = "known"
some = {some}
"""


@pytest.mark.long
def test_expected_failures_do_not_fail_and_unexpected_passes_do(repository: Repository) -> None:
    repository.settings(EXPECTED.format(name="wrong", some="true"))
    assert repository.pytest("--pyargs", "conformance", FEW_CASES).ret == 0
    repository.settings(EXPECTED.format(name="attention", some="false"))
    result = repository.pytest("--pyargs", "conformance", FEW_CASES)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*passes, but is listed in pyproject.toml as an expected failure: known"])


def test_part_of_the_grid_says_nothing_about_stale_entries(repository: Repository) -> None:
    repository.settings(EXPECTED.format(name="attention", some="true"))
    result = repository.pytest("--pyargs", "conformance", FEW_CASES)
    assert result.ret == 0
    assert "expectations" not in result.stdout.str()


# It supports few cases, so that the whole grid is judged soon.
FEW_SUPPORTED = """
from conformance.execution.plain_functions import build_implementation

def one_query(case):
    plain = (case.q_length, case.dtype, case.distribution, case.head_dim) == (1, "f32", "normal", 64)
    return None if plain else "one query in f32 is all"

@declare(behind_mask="finite")
def attend_one(q, k, v, *, causal=False, soft_cap=None):
    if (q.shape[1], q.dtype, q.shape[3]) != (1, "float32", 64):
        raise ValueError("one query in f32 is all")
    return attention(q, k, v, causal=causal, soft_cap=soft_cap)

narrow = dataclasses.replace(build_implementation(attend_one, "narrow"), supports_case=one_query)
"""


@pytest.mark.long
def test_an_expected_failure_that_a_whole_run_does_not_see_is_a_failure_of_the_run(repository: Repository) -> None:
    kernel = repository.path / "kernel.py"
    kernel.write_text(f"import dataclasses\n{KERNEL}{FEW_SUPPORTED}")
    repository.settings(EXPECTED.format(name="narrow", some="true"))
    result = repository.pytest("--pyargs", "conformance", "--impl=kernel.py:narrow", "-n", "2", "--junitxml=j.xml")
    assert result.ret == 1
    sentence = "nothing failed that pyproject.toml expects to fail: known"
    result.stdout.fnmatch_lines([sentence, "FAILED *::expectations[[]kernel.py:narrow-[*]] - nothing *"])
    assert re.search(r"1 failed, \d+ passed", result.stdout.lines[-1])
    assert sentence in (repository.path / "j.xml").read_text()


@pytest.mark.long
@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_failures_are_findings_that_are_confirmed_compared_and_annotated(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, processes: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    beside = ("--conformance-confirm-seconds=3", "--conformance-diagnose-seconds=8", "--conformance-json=r.jsonl")
    result = run_gate(repository, FEW_CASES, "-k", "forward", *beside, *processes, name="wrong")
    said = [line for line in result.stdout.lines if line.startswith("::")]
    assert 1 <= len(said) < sum(line.startswith("FAILED") for line in result.stdout.lines)
    assert any(line.startswith("::error title=kernel.py%3Awrong (cpu)%3A out is wrong") for line in said)
    result.stdout.fnmatch_lines(["kernel.py:wrong compared with planted bugs on * case* in * s*"])
    result.stdout.fnmatch_lines(["* 1 kernel.py:wrong (cpu): out is wrong *", "  *planted bug*"])
    (recorded,) = read_runs(repository.path / "r.jsonl")
    assert {record.check for record in recorded.probes} >= {"forward", "gradients"}
    assert {record.check for record in recorded.records} == {"forward"}
