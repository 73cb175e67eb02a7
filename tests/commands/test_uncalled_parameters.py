"""A run of a function whose parameters got nothing: the lines, the verdict and the exit code of each way in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import conformance
from conformance.execution import implementation_registry
from reports.records import read_runs
from tests.commands.kernel_folder import CASE, run_cli
from tests.gate.gate_repository import GateRun, Repository, run_gate

KERNEL = """
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def flash(q, k, v, *, causal=False, window_size=None, softcap=None, block_q=64):
    return naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite", ignores=("window_size", "softcap"))
def ignoring(q, k, v, *, causal=False, window_size=None, softcap=None, block_q=64):
    return naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def seeded(q, k, v, *, causal=False, seed=0, block_q=64):
    return naive.attention(q, k, v, causal=causal)

@declare(behind_mask="finite")
def wrong(q, k, v, *, causal=False, window_size=None):
    return 1.02 * naive.attention(q, k, v, causal=causal)
"""
SUITE = """
from conformance.testing import conformance_tests
from kernel import flash, seeded

few = dict(cases="train/f32/*.T1.*.H64.*", checks="forward")
test_flash = conformance_tests(flash, **few)
test_seeded = conformance_tests(seeded, **few)
"""
NAMED = "`window_size` (is it `window`?), `softcap` (is it `soft_cap`?)"
SENTENCE = f"in what was called as declared, .*; never called: {re.escape(NAMED)}"
PLACES = pytest.mark.parametrize("place", [[], ["--in-process"]], ids=["sandboxed", "in_process"])


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    return Repository(tmp_path)


def judge(name: str, *arguments: str) -> int:
    few = ("--cases=train/f32/*.T1.*.H64.*", "--check=forward", "--jobs=1")
    return run_cli("run", f"--impl=kernel.py:{name}", *few, *arguments)


def read(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return what was printed on stdout and on stderr, each as one line."""
    captured = capsys.readouterr()
    return " ".join(captured.out.split()), " ".join(captured.err.split())


@PLACES
def test_a_parameter_that_is_probably_an_operand_makes_the_run_fail(
    place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge("flash", *place, "--json=r.jsonl", "--report=r.html") == 1
    out, err = read(capsys)
    assert re.search(f"flash \\(cpu\\) passes as far as checked .* {SENTENCE}", out)
    assert f"kernel.py:flash has parameters to which nothing is passed: {NAMED}" in err
    (recorded,) = read_runs(Path("r.jsonl"))
    assert recorded.run is not None
    assert recorded.run.kernels["kernel.py:flash"].unasked == ("window_size", "softcap")
    assert "Never called:</b> <code>window_size</code> (is it <code>window</code>?)" in Path("r.html").read_text()
    assert "block_q" not in out + err
    assert run_cli("report", "r.jsonl", "--gate") == 1
    assert re.search(SENTENCE, read(capsys)[0])


@PLACES
def test_what_is_declared_to_be_ignored_is_only_declared(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert judge("ignoring", *place) == 0
    out, err = read(capsys)
    assert 'ignores=("window_size", "softcap")' in out
    assert "never called" not in out
    assert "nothing is passed" not in err


@PLACES
def test_a_parameter_of_unknown_meaning_is_named_and_changes_nothing(
    place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge("seeded", *place) == 0
    out, err = read(capsys)
    assert "with nothing passed to `seed`" in out
    assert "seeded has parameters to which nothing is passed: `seed`" in err
    assert "block_q" not in out + err


def test_what_is_wrong_is_wrong_whatever_was_never_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge("wrong") == 1
    assert "does not conform" in read(capsys)[0]


def find_failures(result: GateRun) -> list[str]:
    return [line.rpartition("::")[2] for line in result.list_failed()]


def test_the_gate_has_a_failure_of_the_run_as_a_whole(repository: Repository) -> None:
    few = ("--conformance-cases=train/f32/*.T1.*.H64.*", "-k", "forward")
    result = run_gate(repository, *few, name="flash")
    assert result.ret == 1
    assert find_failures(result) == ["never_called[kernel.py:flash (cpu)]"]
    assert re.search(SENTENCE, result.stdout.str())
    result.stdout.fnmatch_lines([f"kernel.py:flash has parameters to which nothing is passed: {NAMED}*adapt*ignores=*"])
    fine = run_gate(repository, *few, name="seeded")
    assert fine.ret == 0
    fine.stdout.fnmatch_lines(["kernel.py:seeded has parameters to which nothing is passed: `seed`. *adapt*"])


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one_process", "workers"])
def test_so_have_the_tests_of_a_test_file(repository: Repository, workers: list[str]) -> None:
    (repository.path / "test_mine.py").write_text(SUITE)
    result = repository.pytest("test_mine.py", "-p", "cacheprovider", *workers)
    assert result.ret == 1
    assert find_failures(result) == ["never_called[kernel:flash (cpu)]"]
    assert re.search(SENTENCE, result.stdout.str())


def test_in_python_it_does_not_conform(capfd: pytest.CaptureFixture[str]) -> None:
    flash = implementation_registry.find_implementation("kernel.py:flash")
    report = conformance.check(flash, case=CASE, checks="forward")
    assert "nothing is passed: `window_size`" in " ".join(capfd.readouterr().err.split())
    assert not report.conforms
    assert report.is_judged
    assert report.verdict == "conforms in what was called"
    assert not report.findings
    with pytest.raises(AssertionError, match=f"flash \\(cpu\\) passes .* {SENTENCE}"):
        conformance.assert_conforms(flash, case=CASE, checks="forward", progress=False)
    namespace: dict[str, object] = {}
    exec(KERNEL, namespace)
    function = namespace["seeded"]
    assert conformance.check(function, case=CASE, checks="forward", progress=False).conforms  # type: ignore[arg-type]
