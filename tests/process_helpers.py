"""Run commands in tests: wait with a timeout, interrupt them as a terminal does, and kill what is left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from conformance import interrupts
from conformance.fork_server.forked_process import ForkedProcess

COMMAND_TIMEOUT = 400  # seconds for a command on a busy machine; below the timeout of a test, 900
STOP_TIMEOUT = 60  # seconds for an interrupted command to save its results, on a busy machine


@dataclasses.dataclass(frozen=True)
class InterruptedCommand:
    """What an interrupted command returned and printed; `group` is its process group."""

    returncode: int
    out: str
    err: str
    group: int


@contextlib.contextmanager
def restore_signal_handlers() -> Iterator[None]:
    """Give the block the default signal handlers of a terminal, and detach it from a running gate.

    Tests in the background inherit an ignored SIGINT, and so would the processes that they start. The gate may run
    beside this repository's tests and handles signals itself, so a signal raised by a test would stop the whole run.
    """
    state, interrupts._state = interrupts._state, interrupts._HandlerState()
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in interrupts.STOP_SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        interrupts._state = state


@contextlib.contextmanager
def kill_on_exit(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill all that is left of the process when the block ends or fails; it leads its own session."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


OWN_SERVER = {"JAX_CONFORMANCE_TEST": str(os.getpid())}
"""A variable that JAX's imports may read: commands with it use no server but the one that was started with it."""


@contextlib.contextmanager
def run_server(environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m conformance serve` in this environment until the block ends."""
    with restore_signal_handlers():
        process = subprocess.Popen(
            [sys.executable, "-m", "conformance", "serve"],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    with kill_on_exit(process):
        assert process.stderr is not None
        assert process.stderr.readline().startswith("serving")
        yield process


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = STOP_TIMEOUT
) -> None:
    """Wait until a condition holds; `process`, if given, must live until then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        assert process is None or process.poll() is None or condition(), "the command ended before"
        time.sleep(0.02)


def interrupt_command(*command: str, traced: int) -> InterruptedCommand:
    """Run Python with these arguments, and interrupt it once stderr has `traced` lines that say `traced`.

    The interrupt reaches every process of its group, as Ctrl-C does.
    """
    arguments = [sys.executable, *command]
    with restore_signal_handlers():
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    with kill_on_exit(process):
        assert process.stderr is not None
        seen = 0
        while seen < traced:
            line = process.stderr.readline()
            assert line, "the command ended before it was interrupted"
            seen += line == "traced\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=STOP_TIMEOUT)
    return InterruptedCommand(process.returncode, out, err, process.pid)


def run_forked_pytest(arguments: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `python -m pytest` in the current folder, in a forked process that has JAX loaded.

    That saves the seconds of loading JAX, here and in the kernel's process.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = (out.fileno(), err.fileno())
        process = ForkedProcess(_exec_pytest, tuple(arguments), environ=environ, pass_fds=files, may_fork=True)
        returncode = process.wait(COMMAND_TIMEOUT)
        process.release()
        if returncode is None:
            raise subprocess.TimeoutExpired(list(arguments), COMMAND_TIMEOUT)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(arguments), returncode, out.read(), err.read())


def _exec_pytest(out: int, err: int, arguments: Sequence[str]) -> None:
    """Run pytest in the forked process, with its output redirected."""
    import pytest  # not loaded by the fork server

    for number, file in ((1, out), (2, err)):
        os.dup2(file, number)
    sys.argv[1:] = arguments
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(pytest.main(list(arguments)))
