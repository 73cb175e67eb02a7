"""A process that is forked from the one that has loaded everything, seen by who asked for it.

The one that has loaded everything, the *origin*, is started once. It serves this process, and those that it forks for
it. It says how each ended, and ends each that nobody has any more.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import IO, Any

from conformance import packages
from conformance.fork_server import visible_environment

INT32 = struct.Struct("<i")  # what the origin says of a process: its number, then its exit code
# What modules read of the environment as they are loaded; the rest is read when it is needed.
_IMPORT_VARIABLE_PREFIXES = ("JAX_", "XLA_", "NPY_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")
# A user's module may have our name: ours is looked for first, where it is. `-P`: and never in the current folder.
_SERVER_CODE = (
    "import sys; sys.path.insert(0, {home!r}); "
    "from conformance.fork_server.server import serve; serve(int(sys.argv[1]))"
)


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """What a process is to be.

    Attributes:
      become: a function that can be pickled; it is given the numbers of the files that are passed on, then `given`.
      given: its other arguments.
      environ: the environment.
      folder: the current folder.
      may_ask: whether it may have processes forked itself.
    """

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    environ: Mapping[str, str]
    folder: str
    may_fork: bool


class ForkedProcess:
    """A process of ours. It leads a session of its own, which no Ctrl-C reaches."""

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        pass_fds: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
        output: int | None = None,
        may_fork: bool = False,
    ) -> None:
        """Have it forked; this does not wait for it.

        Args:
          become: what it does, with the files that are passed on and with `given`.
          *given: arguments.
          passing: files that it gets; they stay open here.
          environ: its environment; this process's if it is not said.
          output: the file that its stdout and stderr go to; where this process's go to if it is not said.
          may_ask: whether it may have processes forked itself.
        """
        spec = ProcessSpec(function, arguments, dict(os.environ if environ is None else environ), os.getcwd(), may_fork)
        self._connection, server_end = socket.socketpair()
        self._received = b""
        with contextlib.ExitStack() as closing:
            closing.enter_context(server_end)
            written = closing.enter_context(_create_memory_file())
            pickle.dump(spec, written)
            written.flush()
            written.seek(0)
            outputs = [_open_or_null(closing, number) if output is None else output for number in (1, 2)]
            _send_request([server_end.fileno(), written.fileno(), *outputs, *pass_fds])

    @property
    def sentinel(self) -> socket.socket:
        """To wait for: there is something to read here, for `wait`, when it begins and when it ends."""
        return self._connection

    @property
    def pid(self) -> int:
        """Its number, once it has begun; zero if it never will."""
        while len(self._received) < INT32.size and self._receive(None):
            pass
        return int(INT32.unpack_from(self._received)[0]) if len(self._received) >= INT32.size else 0

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, negative for a signal, once it has ended; None if it has not within so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(self._received) < 2 * INT32.size:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            has_received = self._receive(left)
            if has_received is None:
                return None
            if not has_received:  # the origin has ended, and whatever it forked with it
                return -signal.SIGTERM
        return int(INT32.unpack_from(self._received, INT32.size)[0])

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; SIGKILL to its whole session."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.send(bytes([number]))

    def release(self) -> None:
        """Have it ended, if it has not; nobody will hear how."""
        self._connection.close()

    def _receive(self, seconds: float | None) -> bool | None:
        """Read what is said of it; false if nothing will be said any more, None if nothing was within so long."""
        if not connection.wait([self._connection], seconds):
            return None
        try:
            part = self._connection.recv(INT32.size)
        except OSError:
            return False
        self._received += part
        return bool(part)


@dataclasses.dataclass(frozen=True, eq=False)
class _ServerConnection:
    """The process to ask: our end of what it listens to, and what it has read of the environment."""

    requests: socket.socket
    import_environment: Mapping[str, str]


_server: _ServerConnection | None = None
_started_servers: list[
    tuple[int, subprocess.Popen[bytes]]
] = []  # by which process; several if the environment has changed


def start_server() -> None:
    """Start loading what is forked later, for who will ask in a second or two."""
    global _server
    if _server is not None and _server.import_environment != read_import_environment():
        _disconnect()
    if _server is None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _SERVER_CODE.format(home=str(packages.HOME)), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=visible_environment.filter_environment(os.environ),
                start_new_session=True,
            )
        _started_servers.append((os.getpid(), process))
        _server = _ServerConnection(ours, read_import_environment())


def has_server() -> bool:
    """Whether there is an origin, which may still be loading."""
    return _server is not None


def export_connection() -> tuple[int, Mapping[str, str]]:
    """What `adopt` takes: the file to ask the origin by, and what that has read of the environment."""
    start_server()
    assert _server is not None
    return _server.requests.fileno(), _server.import_environment


def read_import_environment() -> dict[str, str]:
    """What modules read of this environment as they are loaded."""
    return {name: value for name, value in os.environ.items() if name.startswith(_IMPORT_VARIABLE_PREFIXES)}


def adopt_connection(requests: int, import_environment: Mapping[str, str]) -> None:
    """Ask, from now on, the origin of another process: the one this was forked from, or one that is lent."""
    global _server
    _server = _ServerConnection(socket.socket(fileno=requests), import_environment)


def _disconnect() -> None:
    """Have no origin any more. What it has forked for us lives on while we have it."""
    global _server
    if _server is not None:
        _server.requests.close()
        _server = None


@atexit.register
def end_server() -> None:
    """End the servers that this process has started, and ask none any more."""
    _disconnect()
    for starter_pid, process in _started_servers:
        if starter_pid == os.getpid():
            process.kill()
            process.wait()


def _send_request(files: Sequence[int]) -> None:
    for is_first_try in (True, False):
        start_server()
        assert _server is not None
        try:
            socket.send_fds(_server.requests, [b"+"], [_server.requests.fileno(), *files])
        except OSError:  # it has ended, which nobody asked it to
            _disconnect()
            if not is_first_try:
                raise
        else:
            return


def _create_memory_file() -> IO[bytes]:
    """A file without a name: in memory, which no full disk concerns, where the system has such."""
    return open(os.memfd_create("process-spec"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _open_or_null(closing: contextlib.ExitStack, number: int) -> int:
    """The file of this number, or one that swallows everything where there is none."""
    try:
        os.fstat(number)
    except OSError:
        number = os.open(os.devnull, os.O_WRONLY)
        closing.callback(os.close, number)
    return number
