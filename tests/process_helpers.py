"""Commands that tests start: waited for with patience that ends, interrupted as a terminal does it, and ended."""

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

COMMAND_TIMEOUT = 400  # seconds for a command, on a machine that does other things too; a test that hangs ends at 900
STOP_TIMEOUT = 60  # seconds to write down what there is, on a machine that does other things too


@dataclasses.dataclass(frozen=True)
class InterruptedCommand:
    """What a command left and said; its processes are those of `group`."""

    returncode: int
    out: str
    err: str
    group: int


@contextlib.contextmanager
def restore_signal_handlers() -> Iterator[None]:
    """Give the block the signal handlers that a terminal's processes have, and no part in the gate that runs the test.

    Tests that run in the background inherit an ignored SIGINT, and so would what they start. The gate, where this
    repository's tests run beside it, listens to signals itself: one that a test raises would stop the whole session.
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
    """The process, which leads a session of its own: what is left of it when the body ends or fails is killed."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(
    so: Callable[[], object], process: subprocess.Popen[str] | None = None, seconds: float = STOP_TIMEOUT
) -> None:
    """Wait until something is so; `process`, if there is one, must live until then."""
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        assert process is None or process.poll() is None or so(), "the command ended before"
        time.sleep(0.02)


def interrupt_command(*command: str, traced: int) -> InterruptedCommand:
    """Python with these arguments, interrupted after `traced` lines of stderr that say so and no more.

    Ctrl-C reaches every process of its group.
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
    """What `python -m pytest` says and returns in the current folder, in a process that begins with JAX loaded.

    That saves the seconds that loading takes, here and in the process of a kernel.
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
    import pytest  # the process that is forked from has not loaded it

    for number, file in ((1, out), (2, err)):
        os.dup2(file, number)
    sys.argv[1:] = arguments
    sys.path.insert(0, str(Path.cwd()))
    sys.exit(pytest.main(list(arguments)))
