"""Test processes of the fork server: what they are given, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conformance.fork_server import forked_process
from conformance.fork_server.forked_process import ForkedProcess
from tests.process_helpers import kill_on_exit, wait_until

ASKS = """
from conformance.fork_server.forked_process import ForkedProcess
from tests.fork_server.test_forked_process import sleeps
process = ForkedProcess(sleeps)
print(process.pid, flush=True)
sleeps()
"""


def exits(code: int) -> None:
    sys.exit(code)


def sleeps() -> None:
    time.sleep(1000)


def does_not_listen(pipe: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(pipe, b"!")
    time.sleep(1000)


def report_state(pipe: int, word: str) -> None:
    told = {
        "word": word,
        "loaded": "jax" in sys.modules,
        "environ": dict(os.environ),
        "began_with": Path("/proc/self/environ").read_bytes().decode(),
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "open": [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")],
        "leads": os.getsid(0) == os.getpid(),
    }
    os.write(pipe, json.dumps(told).encode())


def report_random_numbers(pipe: int) -> None:
    os.write(pipe, json.dumps([vars(shared)["random"]() for shared in (random, np.random)]).encode())


def forks_another(pipe: int) -> None:
    inner = ForkedProcess(exits, 5)
    os.write(pipe, str(inner.wait()).encode())


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


@pytest.fixture
def sleeping() -> Iterator[ForkedProcess]:
    process = ForkedProcess(sleeps)
    assert process.pid
    yield process
    process.release()


def is_running(number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, 0)
        return True
    return False


@pytest.mark.parametrize("code", [0, 3])
def test_it_says_how_it_ended(code: int) -> None:
    process = ForkedProcess(exits, code)
    assert process.wait() == code
    assert process.wait(0) == code
    process.release()


def test_a_signal_reaches_it_and_is_how_it_ended(sleeping: ForkedProcess) -> None:
    assert sleeping.wait(0) is None
    sleeping.signal(signal.SIGTERM)
    assert sleeping.wait() == -signal.SIGTERM


def test_it_ends_once_nobody_has_it_any_more() -> None:
    process = ForkedProcess(sleeps)
    number = process.pid
    process.release()
    wait_until(lambda: not is_running(number))


def test_what_does_not_listen_is_killed() -> None:
    with pipe() as (reads, writes):
        process = ForkedProcess(does_not_listen, pass_fds=[writes])
        assert os.read(reads, 1) == b"!"
    process.signal(signal.SIGTERM)
    assert process.wait(0.2) is None
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.release()


def test_it_has_what_it_is_given_and_nothing_of_others(
    sleeping: ForkedProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONFORMANCE_CACHE", "where the judge keeps what it found")
    with pipe() as (reads, writes):
        process = ForkedProcess(report_state, "given", pass_fds=[writes], environ={"NAME": "value"})
        told = json.loads(os.read(reads, 2**16))
        assert process.wait() == 0
    process.release()
    assert (told["word"], told["loaded"], told["leads"], told["arguments"]) == ("given", True, True, [])
    assert told["folder"] == str(tmp_path)
    assert told["environ"]["NAME"] == "value"
    hidden = ("PYTEST_", "CONFORMANCE_", "GITHUB_TOKEN")
    assert not any(name.startswith(hidden) for name in told["environ"])
    assert not any(line.startswith(hidden) for line in told["began_with"].split("\0"))
    assert len(told["open"]) == 4  # standard input, output and error, and the pipe


def test_a_process_that_may_fork_uses_the_same_fork_server() -> None:
    with pipe() as (reads, writes):
        process = ForkedProcess(forks_another, pass_fds=[writes], may_fork=True)
        assert os.read(reads, 16) == b"5"
        assert process.wait() == 0
    process.release()


def test_what_is_loaded_under_another_environment_is_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    forked_process.start_server()
    before = forked_process._server
    monkeypatch.setenv("HOME", "/elsewhere")
    forked_process.start_server()
    assert forked_process._server is before
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    forked_process.start_server()
    assert forked_process._server is not before
    forked_process._disconnect()


@pytest.mark.long
def test_what_was_forked_before_the_environment_changed_lives_on(
    sleeping: ForkedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    following = ForkedProcess(exits, 4)
    assert following.wait() == 4
    assert sleeping.wait(0.5) is None
    sleeping.release()
    wait_until(lambda: not is_running(sleeping.pid))
    following.release()
    forked_process._disconnect()


def test_no_two_draw_the_same_random_numbers() -> None:
    drawn: list[float] = []
    for _ in range(2):
        with pipe() as (reads, writes):
            process = ForkedProcess(report_random_numbers, pass_fds=[writes])
            drawn += json.loads(os.read(reads, 2**10))
            process.release()
    assert len(set(drawn)) == 4


def test_signals_that_who_asks_ignores_or_blocks_reach_it_all_the_same() -> None:
    forked_process._disconnect()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
    try:
        process = ForkedProcess(sleeps)
        assert process.pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGTERM, before)
    process.signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process.release()
    forked_process._disconnect()


@pytest.mark.long
def test_a_killed_fork_server_ends_its_processes_and_is_replaced() -> None:
    forked_process._disconnect()
    process = ForkedProcess(sleeps)
    number = process.pid
    _, server = forked_process._started_servers[-1]
    server.kill()
    assert process.wait() == -signal.SIGTERM
    wait_until(lambda: not is_running(number))
    following = ForkedProcess(exits, 4)
    assert following.wait() == 4
    for one in (process, following):
        one.release()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_they_end_with_who_asked_for_them(number: signal.Signals) -> None:
    asking = subprocess.Popen([sys.executable, "-c", ASKS], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with kill_on_exit(asking):
        assert asking.stdout is not None
        forked_number = int(asking.stdout.readline())
        assert is_running(forked_number)
        asking.send_signal(number)
    wait_until(lambda: not is_running(forked_number))
