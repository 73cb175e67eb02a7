"""Create a repository with a kernel in it, and run the gate there.

Each run has its own process. The pytester fixture is not used: it unloads modules that a test loads, and JAX and
multiprocessing break if they are loaded twice. Runs with several processes, and runs that load no JAX, are started as
users start them. All others are forked from a process that has loaded JAX.
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
    return 1.02 * naive.attention(q, k, v, causal=causal, soft_cap=soft_cap)
"""


NO_PROBES = ("--conformance-confirm-seconds=0", "--conformance-diagnose-seconds=0")


FEW_CASES = "--conformance-cases=train/f32/*.T1.*.H64.*"


@dataclasses.dataclass(frozen=True)
class GateRun:
    """The exit code and output of a run of pytest."""

    ret: int
    stdout: pytest.LineMatcher
    errlines: list[str]

    def list_failed(self) -> list[str]:
        """Return the ids of the failed tests, without the messages that pytest adds where `CI` is set."""
        lines = (line for line in self.stdout.lines if line.startswith("FAILED "))
        return [line.removeprefix("FAILED ").split(" - ", 1)[0] for line in lines]


@dataclasses.dataclass(frozen=True)
class Repository:
    """The repository of a kernel's author."""

    path: Path

    def pytest(self, *arguments: str, from_nothing: bool = False) -> GateRun:
        """Run pytest in the repository; with `from_nothing`, in a new interpreter."""
        words = ("-p", "no:cacheprovider", *arguments)
        plain = {**os.environ, "PYTEST_ADDOPTS": ""}  # options of the outer test run are not for this one
        if from_nothing or "-n" in arguments:
            command = [sys.executable, "-m", "pytest", *words]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=plain, timeout=COMMAND_TIMEOUT
            )
        else:
            done = run_forked_pytest(words, plain)
        return GateRun(done.returncode, pytest.LineMatcher(done.stdout.splitlines()), done.stderr.splitlines())

    def settings(self, text: str) -> None:
        """Write `pyproject.toml`."""
        (self.path / "pyproject.toml").write_text(text)


def create_repository(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Create a repository in `folder`, and change to it."""
    monkeypatch.chdir(folder)
    (folder / "kernel.py").write_text(KERNEL)
    return Repository(folder)


def run_gate(repository: Repository, *arguments: str, name: str = "attention", from_nothing: bool = False) -> GateRun:
    """Run the gate on a kernel, by default without probes at the end."""
    words = ("--pyargs", "conformance", f"--impl=kernel.py:{name}", *NO_PROBES, *arguments)
    return repository.pytest(*words, from_nothing=from_nothing)
