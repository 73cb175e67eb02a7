"""Request processes from the fork server, and signal, wait for and release them. This is the client side.

The fork server is a process that has loaded JAX and this project. The first request starts a server. A forked process
may use the same server, if its specification says so (`ProcessSpec.may_fork`). All processes of one server hash text
alike. A second server, which the first request for it starts, has other hashes.

The server reports how each process ended. It ends a process when the requester releases the process, or itself ends.
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

INT32 = struct.Struct("<i")
"""The format of the server's two messages about a process: first the process id, later the exit code."""
# Prefixes of variables that modules read when they are imported. A server that has imported JAX under other values of
# these variables cannot be used.
_IMPORT_VARIABLE_PREFIXES = ("JAX_", "XLA_", "NPY_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")
# A user's module may also be called `conformance`. So our folder comes first on the path, and the interpreter's option
# `-P` keeps the current folder off it.
_SERVER_CODE = (
    "import sys; sys.path.insert(0, {home!r}); "
    "from conformance.fork_server.server import serve; serve(int(sys.argv[1]), sys.argv[2:])"
)


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """The specification of a requested process, which is pickled and sent to the server."""

    # The function to run, which must be picklable. Its arguments are the passed file descriptors, then `arguments`.
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    environ: Mapping[str, str]
    folder: str
    may_fork: bool  # whether the process itself may request processes from the fork server


class ForkedProcess:
    """A process of the fork server, in a session of its own, so that Ctrl-C in a terminal does not reach it."""

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        pass_fds: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
        output: int | None = None,
        may_fork: bool = False,
        new_hashes: bool = False,
    ) -> None:
        """Request the process, without waiting until it has begun.

        Args:
          function: the function that the process runs. Its arguments are the descriptors of `pass_fds`, renumbered,
            then `arguments`.
          *arguments: further arguments of `function`.
          pass_fds: file descriptors to pass to the process. They also stay open in this process.
          environ: the environment of the process; by default that of this process.
          output: a descriptor for the stdout and stderr of the process; by default those of this process.
          may_fork: whether the process itself may request processes from the fork server.
          new_hashes: whether `hash` of text has other values in the process than in others.
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
            _send_request([server_end.fileno(), written.fileno(), *outputs, *pass_fds], new_hashes)

    @property
    def sentinel(self) -> socket.socket:
        """A socket to select on. It becomes readable when the process begins, and when it ends."""
        return self._connection

    @property
    def pid(self) -> int:
        """The process id; waits until the process has begun. Zero if the process could not be forked."""
        while len(self._received) < INT32.size and self._receive(None):
            pass
        return int(INT32.unpack_from(self._received)[0]) if len(self._received) >= INT32.size else 0

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the process has ended; return its exit code (a signal's is negative), or None after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(self._received) < 2 * INT32.size:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            has_received = self._receive(left)
            if has_received is None:
                return None
            if not has_received:  # the fork server has ended, and with it all processes that it forked
                return -signal.SIGTERM
        return int(INT32.unpack_from(self._received, INT32.size)[0])

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal. SIGKILL is sent to all processes of its session."""
        with contextlib.suppress(OSError):  # the process has ended
            self._connection.send(bytes([number]))

    def release(self) -> None:
        """Release the process. If it still runs, the fork server ends it, and its exit code is lost."""
        self._connection.close()

    def _receive(self, seconds: float | None) -> bool | None:
        """Receive a part of a message: return True, or False at the connection's end, or None after `seconds`."""
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
    """A connection to a fork server: a socket for requests, and the environment that its imports have read."""

    requests: socket.socket
    import_environment: Mapping[str, str]


_server: _ServerConnection | None = None
_server_of_new_hashes: _ServerConnection | None = None
# Each server that was started, with the id of the process that started it. A forked process inherits this list, and
# must not end the servers of other processes.
_started_servers: list[tuple[int, subprocess.Popen[bytes]]] = []


def start_server(preloaded: Sequence[str] = ()) -> None:
    """Start a fork server if there is none for the current environment, without waiting until it has loaded JAX."""
    global _server
    if _server is not None and _server.import_environment != read_import_environment():
        _disconnect()
    if _server is None:
        _server = _launch_server(preloaded, visible_environment.filter_environment(os.environ))


def _launch_server(preloaded: Sequence[str], environ: Mapping[str, str]) -> _ServerConnection:
    ours, theirs = socket.socketpair()
    with theirs:
        code = _SERVER_CODE.format(home=str(packages.HOME))
        process = subprocess.Popen(
            [sys.executable, "-u", "-P", "-c", code, str(theirs.fileno()), *preloaded],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environ,
            start_new_session=True,
        )
    _started_servers.append((os.getpid(), process))
    return _ServerConnection(ours, read_import_environment())


def _find_server(new_hashes: bool) -> _ServerConnection:
    """Return the connection to a server for the current environment, which is started if there is none."""
    global _server_of_new_hashes
    start_server()
    assert _server is not None
    if not new_hashes:
        return _server
    if _server_of_new_hashes is None:
        environ = visible_environment.filter_environment(os.environ) | {"PYTHONHASHSEED": "random"}
        _server_of_new_hashes = _launch_server((), environ)
    return _server_of_new_hashes


def has_server() -> bool:
    """Tell whether this process is connected to a fork server, which may still be loading."""
    return _server is not None


def export_connection() -> tuple[int, Mapping[str, str]]:
    """Return the arguments of `adopt_connection` that connect another process to this process's fork server."""
    start_server()
    assert _server is not None
    return _server.requests.fileno(), _server.import_environment


def read_import_environment() -> dict[str, str]:
    """Return the environment variables that modules read when they are imported."""
    return {name: value for name, value in os.environ.items() if name.startswith(_IMPORT_VARIABLE_PREFIXES)}


def adopt_connection(requests: int, import_environment: Mapping[str, str]) -> None:
    """Use another process's fork server, given its socket's descriptor and the environment that its imports read."""
    global _server
    _server = _ServerConnection(socket.socket(fileno=requests), import_environment)


def leave_server() -> None:
    """Disconnect from the fork server, which then ends by itself: after the processes that it has forked."""
    _disconnect()
    _started_servers.clear()


def _disconnect() -> None:
    """Close the connections to fork servers. Processes that they have forked for this process keep running."""
    global _server, _server_of_new_hashes
    for one in (_server, _server_of_new_hashes):
        if one is not None:
            one.requests.close()
    _server = _server_of_new_hashes = None


@atexit.register
def end_server() -> None:
    """Disconnect, and end the fork servers that this process has started."""
    _disconnect()
    for starter_pid, process in _started_servers:
        if starter_pid == os.getpid():
            process.kill()
            process.wait()


def _send_request(files: Sequence[int], new_hashes: bool) -> None:
    for is_first_try in (True, False):
        server = _find_server(new_hashes)
        try:
            socket.send_fds(server.requests, [b"+"], [server.requests.fileno(), *files])
        except OSError:  # the server has ended unexpectedly: retry once with another server
            _disconnect()
            if not is_first_try:
                raise
        else:
            return


def _create_memory_file() -> IO[bytes]:
    """Create a file without a name. The file is in memory if the system supports that, since a disk may be full."""
    return open(os.memfd_create("process-spec"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _open_or_null(closing: contextlib.ExitStack, number: int) -> int:
    """Return the descriptor if it is open. Else open the null device, which `closing` closes later."""
    try:
        os.fstat(number)
    except OSError:
        number = os.open(os.devnull, os.O_WRONLY)
        closing.callback(os.close, number)
    return number
