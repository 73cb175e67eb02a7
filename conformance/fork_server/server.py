"""The process that others are forked from: it loads what they need, JAX above all, once.

It computes nothing and starts no threads, so that forking it is safe. It understands nothing of what they do: it forks
where it is asked to, passes signals on, says how each process ended, and ends those that nobody has any more.
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

_LOADED = ("conformance.judging.parallel", "conformance.sandbox.kernel_server")
_MOST_FILES = 16
_DIE_WITH_PARENT = 1
_ENDING = 10.0  # seconds that a process may take to end which nobody has any more, before it is killed


def serve(requests: int) -> None:
    """Fork what is asked for, until nobody can ask any more and all of them have ended; in each of them, be it."""
    del sys.argv[1:]
    # Who starts this may ignore or block signals, which is inherited; and all of this goes by them.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read = forked_process.read_import_environment()
    packages.claim()
    environment.prepare()
    for name in _LOADED:
        importlib.import_module(name)
    environment.collect_rarely()
    asked = socket.socket(fileno=requests)
    born = _Origin(asked, read).serve()
    if born is not None:
        born()


class _Origin:
    """What it listens to, and who lives."""

    def __init__(self, requests: socket.socket, read: Mapping[str, str]) -> None:
        self._requests, self._read = requests, read
        self._number = os.getpid()
        self._asked = True  # whether anybody can ask
        self._lives: dict[int, socket.socket] = {}  # by number: what its asker holds the other end of
        self._ending: dict[int, float] = {}  # those that nobody has any more, and when they are killed
        self._woken, self._wakes = socket.socketpair()

    def serve(self) -> Callable[[], None] | None:
        """Returns in each process that is forked, with what that is to do; in this one at the end, with nothing."""
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, _hear)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        while self._asked or self._lives:
            for ready in self._ready():
                if ready is self._requests:
                    if (born := self._fork()) is not None:
                        return born
                elif ready is self._woken:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(2**12)
                else:
                    self._pass_on(ready)
            self._say_who_ended()
            self._kill_the_late()
        return None

    def _ready(self) -> list[socket.socket]:
        watched = [life for number, life in self._lives.items() if number not in self._ending]
        if self._asked:
            watched.append(self._requests)
        found = connection.wait([self._woken, *watched], 1.0 if self._ending else None)
        return [one for one in found if isinstance(one, socket.socket)]

    def _fork(self) -> Callable[[], None] | None:
        message, files, _, _ = socket.recv_fds(self._requests, 1, _MOST_FILES)
        if not message:
            self._asked = False  # who asked may have those that live all the same
            return None
        try:
            asking, life_file, letter, *others = files
            number = os.fork()
        except (ValueError, OSError):  # too many files, or too little memory: who asked sees that it never began
            for file in files:
                os.close(file)
            return None
        life = socket.socket(fileno=life_file)
        if number == 0:
            return self._born(life, asking, letter, others)
        self._lives[number] = life
        _say(life, number)
        for file in (asking, letter, *others):
            os.close(file)
        return None

    def _pass_on(self, life: socket.socket) -> None:
        """Pass a signal on to a process, or end it where its asker has let go of it."""
        (number,) = (number for number, one in self._lives.items() if one is life)
        try:
            asked = life.recv(1)
        except OSError:
            asked = b""
        if asked:
            _send(number, asked[0])
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        self._ending.setdefault(number, time.monotonic() + _ENDING)
        _send(number, signal.SIGTERM)

    def _kill_the_late(self) -> None:
        for number, deadline in self._ending.items():
            if time.monotonic() > deadline:
                _send(number, signal.SIGKILL)

    def _say_who_ended(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                number, status = ended
                self._ending.pop(number, None)
                with self._lives.pop(number) as life:
                    _say(life, os.waitstatus_to_exitcode(status))

    def _born(self, life: socket.socket, asking: int, letter_file: int, files: Sequence[int]) -> Callable[[], None]:
        """In a process that was forked: have nothing that is another's, and then be what the letter says."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for one in (life, self._requests, self._woken, self._wakes, *self._lives.values()):
            one.close()
        os.setsid()
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != self._number:  # the origin was killed before
            sys.exit(1)
        with open(letter_file, "rb") as file:
            letter: forked_process.ProcessSpec = pickle.load(file)
        if letter.may_ask:
            forked_process.use_server(asking, self._read)
        else:
            os.close(asking)
        for number, output in enumerate(files[:2], start=1):
            os.dup2(output, number)
            os.close(output)
        passed = [_renumber(file) for file in files[2:]]
        os.environ.clear()
        os.environ.update(letter.environ)
        tempfile.tempdir = None  # it goes by the environment
        environment.set_flags()
        os.chdir(letter.folder)
        for generator in (random, sys.modules.get("numpy.random")):  # or all would draw the same
            if generator is not None:
                generator.seed()
        return lambda: letter.become(*passed, *letter.given)


def _renumber(file: int) -> int:
    """Give a file the lowest free number. The one it was received by tells how many processes there were."""
    lowest = os.dup(file)
    os.close(file)
    return lowest


def _hear(number: int, frame: FrameType | None) -> None:
    """Have the signal wake who waits, and no more."""


def _say(life: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked has ended
        life.send(forked_process.NUMBER.pack(number))


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
    if number == signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process, number)
