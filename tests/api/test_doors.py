"""The command line, the Python call and a test file of a stranger find the same faults of a kernel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import conformance
from conformance.session.run_result import merge_runs
from reports.page_model import build_summary
from reports.records import read_runs
from tests.api import kernels
from tests.gate.gate_repository import NO_PROBES, Repository, create_repository

TEST_FILE = """
from conformance.testing import conformance_tests
from kernels import thrice_faulty_attention

test_faulty = conformance_tests(thrice_faulty_attention, cases="train", checks="forward")
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


def read_findings(file: Path) -> list[tuple[str, str, str]]:
    """Read the cause, case and result of each finding in a file of records."""
    findings = build_summary(*merge_runs(read_runs(file), command="")).findings
    return [(text.title, text.finding.smallest.case, text.finding.smallest.observable) for text in findings]


@pytest.mark.long
def test_three_faults_are_the_same_three_findings_by_every_door(repository: Repository) -> None:
    # Nothing is confirmed: how much that finds depends on the time that it has.
    report = conformance.check(
        kernels.thrice_faulty_attention,
        level="quick",
        cases="train",
        checks="forward",
        confirm_seconds=0,
        diagnose_seconds=0,
        progress=False,
    )
    called = [(finding.cause, finding.case, finding.observable) for finding in report.findings]
    assert len(called) == 3
    for word in ("a window", "a soft cap"):
        assert any(word in cause for cause, *_ in called), called
    assert any(re.search(r"\.N(4\.K2|6\.K2|10\.K2|32\.K4)\.", case) for _, case, _ in called), called  # heads in groups
    command = ["run", "--impl=kernels.py:thrice_faulty_attention", "--level=quick", "--cases=train"]
    command += ["--check=forward", "--confirm-seconds=0", "--diagnose-seconds=0", "--json=run.jsonl"]
    done = subprocess.run([sys.executable, "-m", "conformance", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert read_findings(repository.path / "run.jsonl") == called
    (repository.path / "test_mine.py").write_text(TEST_FILE)
    result = repository.pytest(*NO_PROBES, "--conformance-json=test.jsonl")
    assert result.ret == 1
    assert read_findings(repository.path / "test.jsonl") == called


def test_an_assertion_in_a_test_shows_the_findings_alone(repository: Repository) -> None:
    (repository.path / "test_mine.py").write_text(ASSERTED)
    result = repository.pytest("-W", "error", "test_mine.py", from_nothing=True)
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
