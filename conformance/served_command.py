"""Run a command in a process of a server that has JAX loaded, if this user runs one (`python -m conformance serve`).

This process then passes on stop signals, waits, and ends with the exit code of the command. It loads nothing else.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import TextIO

from conformance import environment, interrupts, packages, served_run
from conformance.fork_server import command_server, forked_process
from conformance.fork_server.command_server import FoundServer
from conformance.fork_server.forked_process import ForkedProcess

_SERVED_COMMANDS = ("run", "explore")
_POLL_SECONDS = 0.05
_ENDED_NOTE = b"note: the server of `python -m conformance serve` has ended; this command goes on by itself\n"


def run_in_server(arguments: Sequence[str]) -> int | None:
    """Run the command in a server, and return its exit code; None if there is no server for this command."""
    if not (command_server.is_supported() and arguments[1:2] and arguments[1] in _SERVED_COMMANDS):
        return None
    if "--help" in arguments or "-h" in arguments:
        return None
    try:
        packages.exit_if_customized()
    except OSError:  # the current folder is gone, which the command says better
        return None
    environment.set_flags()  # the server's imports have read these variables too
    found = command_server.join_server()
    if found.has_stale:
        line = "the server of `python -m conformance serve` has loaded older sources or packages, and is not used"
        os.write(2, f"note: {line}: start it again\n".encode())
    if not found.folder:
        return None
    kept = {served_run.FOLDER_VARIABLE: found.folder, served_run.START_VARIABLE: repr(time.time())}
    process = ForkedProcess(
        _run_command, tuple(arguments), tuple(sys.path), environ={**os.environ, **kept}, may_fork=True
    )
    return _wait(process, found)


def _wait(process: ForkedProcess, found: FoundServer) -> int | None:
    """Wait for the process, pass on stop signals, and return its exit code; None if it has never begun.

    The server may end before. A command that has begun goes on in its process.
    """
    passed_on = has_ended = False
    while (code := process.wait(_POLL_SECONDS)) is None:
        if not passed_on and (received := interrupts.get_received_signal()) is not None:
            process.signal(received)
            passed_on = True
        if not has_ended and connection.wait([found.end], 0):
            has_ended = True
            os.write(2, _ENDED_NOTE)
    if passed_on or code != -signal.SIGTERM:
        return code if code >= 0 else 128 - code
    if not process.pid:
        forked_process.leave_server()
        if not has_ended:
            os.write(2, _ENDED_NOTE)
        return None
    os.write(2, b"error: the process of the command was terminated, or its fork server was\n")
    return 2


def _run_command(arguments: Sequence[str], path: Sequence[str]) -> None:
    """Run a command in this process, which the server has forked, and end it with the command's exit code."""
    sys.argv[:], sys.path[:] = arguments, path
    # The server's own streams were opened on the null device, and have its properties.
    sys.stdout, sys.stderr = _open_stream(1), _open_stream(2)
    with interrupts.record_signals():
        from conformance.cli import run_main  # imported late: only the server has loaded it

        run_main(list(arguments))


def _open_stream(number: int) -> TextIO:
    """Open a text stream on a descriptor; what it cannot encode is escaped."""
    raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)
