"""Test which processes may use a shared fork server, and which may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.fork_server import forked_process, shared_server
from conformance.fork_server.forked_process import ForkedProcess
from tests.fork_server.test_forked_process import sleeps
from tests.process_helpers import COMMAND_TIMEOUT

BORROWS = """
import sys
from conformance.fork_server import forked_process, shared_server
from conformance.fork_server.forked_process import ForkedProcess
from tests.fork_server.test_forked_process import sleeps
shared_server.join_server(sys.argv[1])
had = forked_process.has_server()
process = ForkedProcess(sleeps)
print(had, open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[1])
process.release()
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells who asks")


def parent(process: ForkedProcess) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]


def said(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT)
    return done.stdout.split()


def test_a_process_that_this_one_starts_uses_the_same_fork_server() -> None:
    ours = ForkedProcess(sleeps)
    address = shared_server.share_server()
    for _ in range(2):
        assert said(sys.executable, "-c", BORROWS, address) == ["True", parent(ours)]
    ours.release()


def test_nobody_else_is_answered() -> None:
    """Check that a process which the judge has not started itself gets no answer: a kernel's process is one."""
    ours = ForkedProcess(sleeps)
    had, other = said("sh", "-c", '"$0" "$@"; exit $?', sys.executable, "-c", BORROWS, shared_server.share_server())
    assert had == "False"
    assert other != parent(ours)
    ours.release()


def test_nothing_is_shared_without_a_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_process, "_server", None)
    assert shared_server.share_server() == ""


def test_joining_an_unused_address_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_process, "_server", None)
    shared_server.join_server(f"conformance-fork-server-{os.getpid()}")
    assert not forked_process.has_server()
