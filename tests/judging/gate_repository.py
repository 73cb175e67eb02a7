"""A repository with a kernel in it, and a run of the gate there.

Every run is a process of its own, without pytester: its fixture unloads the modules that a test loads, and JAX and
multiprocessing do not stand being loaded twice. Runs in several processes are started as everybody starts them, and so
are those that load no JAX; the others begin with it.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process_helpers import COMMAND_TIMEOUT, run_forked_pytest

KERNEL = """
from tests.kernels import naive
from conformance import declare

@declare(behind_mask="finite")
def attention(q, k, v, *, causal=False, soft_cap=None):
    return naive.attention(q, k, v, causal=causal, soft_cap=soft_cap)

@declare(behind_mask="finite")
def wrong(q, k, v, *, causal=False, soft_cap=None):
    return 1.01 * naive.attention(q, k, v, causal=causal, soft_cap=soft_cap)
"""


NO_PROBES = ("--conformance-confirm-seconds=0", "--conformance-diagnose-seconds=0")


FEW_CASES = "--conformance-cases=train/f32/*.T1.*"


@dataclasses.dataclass(frozen=True)
class GateRun:
    """What a run of pytest said."""

    ret: int
    stdout: pytest.LineMatcher
    errlines: list[str]


@dataclasses.dataclass(frozen=True)
class Repository:
    """A kernel author's repository."""

    path: Path

    def pytest(self, *arguments: str, from_nothing: bool = False) -> GateRun:
        words = ("-p", "no:cacheprovider", *arguments)
        plain = {**os.environ, "PYTEST_ADDOPTS": ""}  # what the run of the tests was given is not for this one
        if from_nothing or "-n" in arguments:
            command = [sys.executable, "-m", "pytest", *words]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=plain, timeout=COMMAND_TIMEOUT
            )
        else:
            done = run_forked_pytest(words, plain)
        return GateRun(done.returncode, pytest.LineMatcher(done.stdout.splitlines()), done.stderr.splitlines())

    def settings(self, text: str) -> None:
        (self.path / "pyproject.toml").write_text(text)


def create_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A repository in `folder`, which the test then stands in."""
    monkeypatch.chdir(folder)
    (folder / "kernel.py").write_text(KERNEL)
    return Repository(folder)


def run_gate(repository: Repository, *arguments: str, name: str = "attention", from_nothing: bool = False) -> GateRun:
    """A run of the gate on a kernel; nothing is asked beside it unless that is said."""
    words = ("--pyargs", "conformance", f"--impl=kernel.py:{name}", *NO_PROBES, *arguments)
    return repository.pytest(*words, from_nothing=from_nothing)
