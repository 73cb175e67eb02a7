"""A run of a kernel of which no call comes right: it ends early and says so, by each way in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import conformance
from reports.records import COMPLETE, EARLY_END, UNJUDGED, RecordedRun, read_runs
from tests.commands.kernel_folder import run_cli
from tests.gate.gate_repository import Repository, run_gate

KERNEL = """
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def right(q, k, v, *, causal=False):
    return naive.attention(q, k, v, causal=causal)

def pair(q, k, v, *, causal=False):
    out = naive.attention(q, k, v, causal=causal)
    return out, out[..., 0]

def short(q, k, v, *, causal=False):
    if q.shape[1] != k.shape[1]:
        raise ValueError("T must be S")
    return naive.attention(q, k, v, causal=causal)
"""
SUITE = """
from conformance.testing import conformance_tests
from kernel import pair, right

test_pair = conformance_tests(pair, level="smoke")
test_right = conformance_tests(right, level="smoke", checks="forward", cases="train/f32/B1.T128.*")
"""
SMOKE = ("--level=smoke", "--check=forward", "--confirm-seconds=0", "--diagnose-seconds=0")
REASON = (
    r"ended early: .* \d+ end in the same error: the call must return out alone, .* a tuple of 2 .* \d+ of \d+ jobs"
)


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernel.py").write_text(KERNEL)
    return Repository(tmp_path)


def read(path: str) -> tuple[RecordedRun, list[str]]:
    """Return the run in a file, and the reasons of its records that say that jobs ended early."""
    (recorded,) = read_runs(Path(path))
    return recorded, [record.reason for record in recorded.records if record.check == EARLY_END]


def count_jobs(recorded: RecordedRun, name: str) -> tuple[int, int]:
    """Return the numbers of judged and of planned jobs of an implementation."""
    assert recorded.run is not None
    planned = [number for number, job in enumerate(recorded.run.jobs) if job.implementation == name]
    return sum(number in recorded.done for number in planned), len(planned)


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_run_ends_early_and_every_report_says_so(jobs: int, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ("--json=r.jsonl", "--report=r.html", "--markdown=r.md")
    assert run_cli("run", "--impl=kernel.py:pair", *SMOKE, f"--jobs={jobs}", *outputs) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(f"kernel.py:pair \\(cpu\\): {REASON} were not judged \\(--keep-going", said)
    assert "python -m conformance adapt --impl=kernel.py:pair" in said
    assert "kernel.py:pair (cpu) does not conform" in said
    recorded, reasons = read("r.jsonl")
    judged, planned = count_jobs(recorded, "kernel.py:pair")
    # With two processes, results of one may come after many short jobs of the other.
    assert 4 <= judged < (20 if jobs == 1 else planned)
    assert planned > 20
    assert len(reasons) == 1
    assert f"{planned - judged} of {planned} jobs were not judged" in reasons[0]
    assert recorded.end is not None
    assert recorded.end.how == COMPLETE
    for path in ("r.html", "r.md"):
        assert f"{planned - judged} of {planned} jobs were not judged" in Path(path).read_text()
    assert run_cli("report", "r.jsonl", "--gate") == 1
    assert re.search(REASON, " ".join(capsys.readouterr().out.split()))


def test_other_kernels_of_the_run_are_judged_in_all_cases() -> None:
    few = ("--impl=kernel.py:pair", "--impl=kernel.py:right", *SMOKE, "--jobs=1", "--json=r.jsonl")
    assert run_cli("run", *few) == 1
    recorded, reasons = read("r.jsonl")
    assert len(reasons) == 1
    judged, planned = count_jobs(recorded, "kernel.py:right")
    assert judged == planned
    assert count_jobs(recorded, "kernel.py:pair")[0] < planned


def test_a_run_that_ended_early_can_be_resumed_and_goes_on_if_the_user_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_cli("run", "--impl=kernel.py:pair", *SMOKE, "--jobs=1", "--json=r.jsonl") == 1
    before, _ = read("r.jsonl")
    assert run_cli("run", "--resume=r.jsonl", "--jobs=1") == 1
    again, reasons = read("r.jsonl")
    assert (set(again.done), len(reasons)) == (set(before.done), 1)
    assert run_cli("run", "--resume=r.jsonl", "--jobs=1", "--keep-going") == 1
    whole, reasons = read("r.jsonl")
    judged, planned = count_jobs(whole, "kernel.py:pair")
    assert (judged, reasons) == (planned, [])
    assert "ended early" not in capsys.readouterr().out.rpartition("level smoke")[0].rpartition("level smoke")[2]


def test_an_error_in_one_feature_and_selected_cases_do_not_end_it() -> None:
    assert run_cli("run", "--impl=kernel.py:short", *SMOKE, "--jobs=1", "--json=r.jsonl") == 1
    recorded, reasons = read("r.jsonl")
    judged, planned = count_jobs(recorded, "kernel.py:short")
    assert (judged, reasons) == (planned, [])
    few = ("--cases=train/*", "--check=forward", "--level=smoke", "--jobs=1", "--json=r.jsonl")
    assert run_cli("run", "--impl=kernel.py:pair", *few) == 1
    recorded, reasons = read("r.jsonl")
    judged, planned = count_jobs(recorded, "kernel.py:pair")
    assert (judged, reasons) == (planned, [])


def test_fail_fast_still_stops_at_the_first_failure() -> None:
    assert run_cli("run", "--impl=kernel.py:pair", *SMOKE, "--jobs=1", "--json=r.jsonl", "--fail-fast") == 1
    recorded, reasons = read("r.jsonl")
    assert (len(recorded.done), reasons) == (1, [])


def test_in_python_the_report_says_why() -> None:
    namespace: dict[str, Any] = {}
    exec(KERNEL, namespace)
    options: dict[str, Any] = {"level": "smoke", "checks": "forward", "progress": False}
    report = conformance.check(namespace["pair"], **options)
    assert report.verdict == "does not conform"
    assert re.search(f"{REASON} were not judged \\(keep_going=True", report.reason)
    assert "conformance.adapt(function)" in report.reason
    assert str(report).count("ended early") == 1
    with pytest.raises(AssertionError, match=REASON):
        conformance.assert_conforms(namespace["pair"], **options)
    whole = conformance.check(namespace["pair"], keep_going=True, **options)
    assert not whole.reason
    assert len(whole.records) > len(report.records)
    assert not any(record.verdict == UNJUDGED and record.check == EARLY_END for record in whole.records)


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one_process", "workers"])
def test_in_the_gate_the_other_tests_are_skipped_with_the_reason(repository: Repository, workers: list[str]) -> None:
    result = run_gate(repository, "--conformance-level=smoke", "-rs", *workers, name="pair")
    assert result.ret == 1
    said = result.stdout.str()
    assert re.search(f"{REASON} were not judged \\(--conformance-keep-going", said)
    counts = re.search(r"(\d+) failed, (\d+) skipped", said)
    assert counts is not None
    failed, skipped = map(int, counts.groups())
    assert 4 <= failed < 20 < skipped
    assert "not judged, since no call came right" in said
    assert "jobs have no records" not in said


def test_so_are_those_of_a_test_file(repository: Repository) -> None:
    (repository.path / "test_mine.py").write_text(SUITE)
    result = repository.pytest("test_mine.py", "-p", "cacheprovider", "-rs")
    assert result.ret == 1
    said = result.stdout.str()
    assert re.search(f"kernel:pair \\(cpu\\): {REASON}", said)
    assert re.search(r"SKIPPED \[\d+\] test_mine.py:5: not judged, since no call came right", said)
    assert "kernel:right (cpu) passes as far as checked" in said
