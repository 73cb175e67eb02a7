"""Run the fork server: load JAX and this project once, then fork a process for each request.

The server computes nothing and starts no threads, so forking it is safe. It forwards signals to its processes, reports
how each process ended, and ends a process whose requester has released it.

A request is one byte with file descriptors, in this order: a socket for requests by the process itself, the process's
connection to its requester, its pickled specification, its stdout, its stderr, and the descriptors passed to its
function. The connection carries the process id and the exit code to the requester, and signals to the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from types import FrameType

from conformance import environment, packages
from conformance.fork_server import forked_process

_PRELOADED_MODULES = ("conformance.judging.parallel_judging", "conformance.sandbox.kernel_server")
_MAX_FILES = 16  # file descriptors in one request
_PR_SET_PDEATHSIG = 1
_TERMINATION_SECONDS = 10.0  # time from SIGTERM to SIGKILL for a released process


def serve(requests: int, preloaded: Sequence[str] = ()) -> None:
    """Serve requests until all clients have disconnected and all processes have ended.

    A forked process returns here too, after it has run the function of its specification. `requests` is the file
    descriptor of a socket, and `preloaded` names modules to load besides those of a worker.
    """
    preloaded = tuple(preloaded)
    del sys.argv[1:]
    # The process that starts the server may ignore or block signals. The server inherits that, and needs the signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_environment = forked_process.read_import_environment()
    packages.claim_names()
    environment.prepare_environment()
    for name in (*_PRELOADED_MODULES, *preloaded):
        importlib.import_module(name)
    environment.collect_garbage_rarely()
    child_task = _ForkServer(socket.socket(fileno=requests), import_environment).serve()
    if child_task is not None:
        child_task()


class _ForkServer:
    """The loop of the fork server, with its clients and the processes that it has forked."""

    def __init__(self, requests: socket.socket, import_environment: Mapping[str, str]) -> None:
        self._requests, self._import_environment = requests, import_environment
        self._pid = os.getpid()
        self._has_clients = True
        self._connections: dict[int, socket.socket] = {}  # connections to requesters, by process id
        self._kill_deadlines: dict[int, float] = {}  # times of SIGKILL for released processes, by process id
        self._wakeup_read, self._wakeup_write = socket.socketpair()

    def serve(self) -> Callable[[], None] | None:
        """Serve requests. Return None at the end of the server, but in a forked process the function to run."""
        for end in (self._wakeup_read, self._wakeup_write):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _wake_up)
        signal.set_wakeup_fd(self._wakeup_write.fileno(), warn_on_full_buffer=False)
        while self._has_clients or self._connections:
            for ready in self._wait_for_ready():
                if ready is self._requests:
                    if (child_task := self._fork()) is not None:
                        return child_task
                elif ready is self._wakeup_read:
                    with contextlib.suppress(BlockingIOError):
                        self._wakeup_read.recv(2**12)
                else:
                    self._forward_signal(ready)
            self._report_exits()
            for pid, deadline in self._kill_deadlines.items():
                if time.monotonic() > deadline:
                    _send_signal(pid, signal.SIGKILL)
        return None

    def _wait_for_ready(self) -> list[socket.socket]:
        waited_for = [
            child_connection for pid, child_connection in self._connections.items() if pid not in self._kill_deadlines
        ]
        if self._has_clients:
            waited_for.append(self._requests)
        found = connection.wait([self._wakeup_read, *waited_for], 1.0 if self._kill_deadlines else None)
        return [one for one in found if isinstance(one, socket.socket)]

    def _fork(self) -> Callable[[], None] | None:
        message, fds, _, _ = socket.recv_fds(self._requests, 1, _MAX_FILES)
        if not message:
            self._has_clients = False  # clients may still wait for processes that were forked before
            return None
        try:
            requests_fd, connection_fd, spec_fd, *other_fds = fds
            pid = os.fork()
        except (ValueError, OSError):  # wrong number of files, or no memory: the client sees a closed connection
            for fd in fds:
                os.close(fd)
            return None
        child_connection = socket.socket(fileno=connection_fd)
        if pid == 0:
            return self._set_up_child(child_connection, requests_fd, spec_fd, other_fds)
        self._connections[pid] = child_connection
        _send_integer(child_connection, pid)
        for fd in (requests_fd, spec_fd, *other_fds):
            os.close(fd)
        return None

    def _forward_signal(self, child_connection: socket.socket) -> None:
        """Forward a signal to a process, or end the process if its requester has closed the connection."""
        (pid,) = (pid for pid, one in self._connections.items() if one is child_connection)
        try:
            message = child_connection.recv(1)
        except OSError:
            message = b""
        if message:
            _send_signal(pid, message[0])
        else:
            self._terminate(pid)

    def _terminate(self, pid: int) -> None:
        self._kill_deadlines.setdefault(pid, time.monotonic() + _TERMINATION_SECONDS)
        _send_signal(pid, signal.SIGTERM)

    def _report_exits(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                self._kill_deadlines.pop(pid, None)
                with self._connections.pop(pid) as child_connection:
                    _send_integer(child_connection, os.waitstatus_to_exitcode(status))

    def _set_up_child(
        self, child_connection: socket.socket, requests_fd: int, spec_fd: int, fds: Sequence[int]
    ) -> Callable[[], None]:
        """Prepare a forked process without descriptors of the server or other processes; return the function to run."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for one in (
            child_connection,
            self._requests,
            self._wakeup_read,
            self._wakeup_write,
            *self._connections.values(),
        ):
            one.close()
        os.setsid()
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != self._pid:  # the server was killed before PR_SET_PDEATHSIG took effect
            sys.exit(1)
        with open(spec_fd, "rb") as file:
            spec: forked_process.ProcessSpec = pickle.load(file)
        if spec.may_fork:
            forked_process.adopt_connection(requests_fd, self._import_environment)
        else:
            os.close(requests_fd)
        for standard_fd, output in enumerate(fds[:2], start=1):
            os.dup2(output, standard_fd)
            os.close(output)
        passed = [_renumber(fd) for fd in fds[2:]]
        os.environ.clear()
        os.environ.update(spec.environ)
        tempfile.tempdir = None  # makes `tempfile` find the folder again, from the new environment
        environment.set_flags()
        os.chdir(spec.folder)
        for generator in (random, sys.modules.get("numpy.random")):  # forked processes inherit the same state
            if generator is not None:
                generator.seed()
        return lambda: spec.function(*passed, *spec.arguments)


def _renumber(fd: int) -> int:
    """Move a descriptor to the lowest free number, which hides from kernels how many processes the server has."""
    lowest = os.dup(fd)
    os.close(fd)
    return lowest


def _wake_up(number: int, frame: FrameType | None) -> None:
    """Do nothing. Python writes to the wakeup descriptor for a signal with a handler, and that ends the wait."""


def _send_integer(child_connection: socket.socket, value: int) -> None:
    with contextlib.suppress(OSError):  # the requester has ended
        child_connection.send(forked_process.INT32.pack(value))


def _send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if number == signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
