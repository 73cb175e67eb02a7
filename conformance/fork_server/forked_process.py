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

NUMBER = struct.Struct("<i")  # what the origin says of a process: its number, then its exit code
# What modules read of the environment as they are loaded; the rest is read when it is needed.
_READ = ("JAX_", "XLA_", "NPY_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")
# A user's module may have our name: ours is looked for first, where it is. `-P`: and never in the current folder.
_MAIN = (
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

    become: Callable[..., None]
    given: tuple[Any, ...]
    environ: Mapping[str, str]
    folder: str
    may_ask: bool


class ForkedProcess:
    """A process of ours. It leads a session of its own, which no Ctrl-C reaches."""

    def __init__(
        self,
        become: Callable[..., None],
        *given: Any,
        passing: Sequence[int] = (),
        environ: Mapping[str, str] | None = None,
        output: int | None = None,
        may_ask: bool = False,
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
        letter = ProcessSpec(become, given, dict(os.environ if environ is None else environ), os.getcwd(), may_ask)
        self._life, life = socket.socketpair()
        self._said = b""
        with contextlib.ExitStack() as closing:
            closing.enter_context(life)
            written = closing.enter_context(_file())
            pickle.dump(letter, written)
            written.flush()
            written.seek(0)
            outputs = [_there(closing, number) if output is None else output for number in (1, 2)]
            _ask([life.fileno(), written.fileno(), *outputs, *passing])

    @property
    def ends(self) -> socket.socket:
        """To wait for: there is something to read here, for `wait`, when it begins and when it ends."""
        return self._life

    @property
    def pid(self) -> int:
        """Its number, once it has begun; zero if it never will."""
        while len(self._said) < NUMBER.size and self._hear(None):
            pass
        return int(NUMBER.unpack_from(self._said)[0]) if len(self._said) >= NUMBER.size else 0

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, negative for a signal, once it has ended; None if it has not within so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(self._said) < 2 * NUMBER.size:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            heard = self._hear(left)
            if heard is None:
                return None
            if not heard:  # the origin has ended, and whatever it forked with it
                return -signal.SIGTERM
        return int(NUMBER.unpack_from(self._said, NUMBER.size)[0])

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; SIGKILL to its whole session."""
        with contextlib.suppress(OSError):  # it has ended
            self._life.send(bytes([number]))

    def release(self) -> None:
        """Have it ended, if it has not; nobody will hear how."""
        self._life.close()

    def _hear(self, seconds: float | None) -> bool | None:
        """Read what is said of it; false if nothing will be said any more, None if nothing was within so long."""
        if not connection.wait([self._life], seconds):
            return None
        try:
            part = self._life.recv(NUMBER.size)
        except OSError:
            return False
        self._said += part
        return bool(part)


@dataclasses.dataclass(frozen=True, eq=False)
class _Origin:
    """The process to ask: our end of what it listens to, and what it has read of the environment."""

    requests: socket.socket
    read: Mapping[str, str]


_origin: _Origin | None = None
_started: list[tuple[int, subprocess.Popen[bytes]]] = []  # by which process; several if the environment has changed


def start_server() -> None:
    """Start loading what is forked later, for who will ask in a second or two."""
    global _origin
    if _origin is not None and _origin.read != read_import_environment():
        _forget()
    if _origin is None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _MAIN.format(home=str(packages.HOME)), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=visible_environment.filter_environment(os.environ),
                start_new_session=True,
            )
        _started.append((os.getpid(), process))
        _origin = _Origin(ours, read_import_environment())


def is_server_started() -> bool:
    """Whether there is an origin, which may still be loading."""
    return _origin is not None


def describe_connection() -> tuple[int, Mapping[str, str]]:
    """What `adopt` takes: the file to ask the origin by, and what that has read of the environment."""
    start_server()
    assert _origin is not None
    return _origin.requests.fileno(), _origin.read


def read_import_environment() -> dict[str, str]:
    """What modules read of this environment as they are loaded."""
    return {name: value for name, value in os.environ.items() if name.startswith(_READ)}


def use_server(requests: int, read_there: Mapping[str, str]) -> None:
    """Ask, from now on, the origin of another process: the one this was forked from, or one that is lent."""
    global _origin
    _origin = _Origin(socket.socket(fileno=requests), read_there)


def _forget() -> None:
    """Have no origin any more. What it has forked for us lives on while we have it."""
    global _origin
    if _origin is not None:
        _origin.requests.close()
        _origin = None


@atexit.register
def end_server() -> None:
    """End the servers that this process has started, and ask none any more."""
    _forget()
    for starter, process in _started:
        if starter == os.getpid():
            process.kill()
            process.wait()


def _ask(files: Sequence[int]) -> None:
    for again in (True, False):
        start_server()
        assert _origin is not None
        try:
            socket.send_fds(_origin.requests, [b"+"], [_origin.requests.fileno(), *files])
        except OSError:  # it has ended, which nobody asked it to
            _forget()
            if not again:
                raise
        else:
            return


def _file() -> IO[bytes]:
    """A file without a name: in memory, which no full disk concerns, where the system has such."""
    return open(os.memfd_create("letter"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _there(closing: contextlib.ExitStack, number: int) -> int:
    """The file of this number, or one that swallows everything where there is none."""
    try:
        os.fstat(number)
    except OSError:
        number = os.open(os.devnull, os.O_WRONLY)
        closing.callback(os.close, number)
    return number
