"""The command line, the Python call and a test file of a stranger find the same faults of a kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import conformance
from conformance import runs
from conformance.session.session import merge_runs
from reports.page_model import build_summary
from tests.api import kernels
from tests.judging.gate_repository import Repository, create_repository

PLENTY = 600.0  # seconds that no machine needs, so that findings do not depend on its speed
TEST_FILE = """
from conformance.testing import conformance_tests
from kernels import faulty_attention

test_faulty = conformance_tests(faulty_attention, level="smoke", checks=["forward", "gradients"])
"""
ASSERTED = """
import conformance
from kernels import attention, faulty_attention

WINDOW = "train/f32/B1.T128.S128.N2.K2.H64.V64/window-l31-r0/normal/s0"


def test_right():
    conformance.assert_conforms(attention, case=WINDOW, checks="forward")


def test_faulty():
    conformance.assert_conforms(faulty_attention, case=WINDOW, checks="forward")
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    shutil.copy(kernels.__file__, tmp_path / "kernels.py")
    return create_repository(tmp_path, monkeypatch)


def read_findings(file: Path) -> list[tuple[str, str, str, str]]:
    """Read the cause, case, result and likeliest bug of each finding in a file of records."""
    records, info = merge_runs(runs.read_runs(file), command="", is_followed_up=True)
    found = []
    for text in build_summary(records, info).findings:
        smallest = text.finding.smallest
        bugs = text.diagnosis.bugs if text.diagnosis is not None else ()
        found.append((text.title, smallest.case, smallest.observable, bugs[0].name if bugs else ""))
    return found


def list_findings(findings: Sequence[conformance.Finding]) -> list[tuple[str, str, str, str]]:
    """List the same of a report."""
    found = []
    for one in findings:
        bugs = one.diagnosis.bugs if one.diagnosis is not None else ()
        found.append((one.cause, one.case, one.observable, bugs[0].name if bugs else ""))
    return found


@pytest.mark.long
def test_three_faults_are_the_same_three_findings_by_every_door(repository: Repository) -> None:
    report = conformance.check(
        kernels.faulty_attention,
        checks=["forward", "gradients"],
        confirm_seconds=PLENTY,
        diagnose_seconds=PLENTY,
        progress=False,
    )
    called = list_findings(report.findings)
    assert len(called) == 3
    for word in ("window", "bias", "group"):
        assert any(word in cause for cause, *_ in called), called
    assert any("window" in bug for *_, bug in called), called
    command = ["run", "--impl=kernels.py:faulty_attention", "--level=smoke", "--check=forward", "--check=gradients"]
    command += [f"--confirm-seconds={PLENTY}", f"--diagnose-seconds={PLENTY}", "--json=run.jsonl"]
    done = subprocess.run([sys.executable, "-m", "conformance", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert read_findings(repository.path / "run.jsonl") == called
    (repository.path / "test_mine.py").write_text(TEST_FILE)
    seconds = [f"--conformance-{what}-seconds={PLENTY}" for what in ("confirm", "diagnose")]
    result = repository.pytest(*seconds, "--conformance-json=test.jsonl")
    assert result.ret == 1
    assert read_findings(repository.path / "test.jsonl") == called


def test_an_assertion_in_a_test_shows_the_findings_alone(repository: Repository) -> None:
    (repository.path / "test_mine.py").write_text(ASSERTED)
    result = repository.pytest("-W", "error", "test_mine.py")
    assert result.ret == 1
    shown = result.stdout.str()
    assert "1 failed, 1 passed" in result.stdout.lines[-1]
    assert "warning" not in result.stdout.lines[-1]
    places = [line for line in result.stdout.lines if line.startswith("test_mine.py:")]
    assert len(places) == 1  # the traceback ends in the test
    assert "check_function.py" not in shown
    error = [line for line in result.stdout.lines if line.startswith("E ")]
    for part in ("does not conform", "window-l31-r0", "max ratio", "conformance.check(faulty_attention"):
        assert any(part in line for line in error), shown
