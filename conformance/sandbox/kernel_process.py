"""A kernel's process, seen from the judge: it is started, asked, watched, and ended."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance import environment, records
from conformance.calling import mishaps
from conformance.fork_server import forked_process
from conformance.fork_server.forked_process import ForkedProcess
from conformance.sandbox import (
    compilation_cache,
    handshake,
    kernel_server,
    protocol,
    remote_exceptions,
    scratch_folder,
    supervisor,
)
from conformance.sandbox.handshake import MAX_TEXT, Handshake
from conformance.sandbox.kernel_server import LENGTH, CallRequest, LoadRequest

_LOOK_EVERY = 0.05
_ENDING = 5.0  # seconds that ending a process and all that it started may take, before it is killed
_KEPT_OUTPUT = 4096
_PIPE = 2**20  # bytes that a pipe holds, where the system allows it: operands and results pass at one go
_LEAST_PIPE = 2**16  # what one holds otherwise
_MOST_BEGUN = 4
# After so many calls that did not return, others get a multiple of what the slowest took that did.
_PATIENCE = 2
_LOADING = 120.0  # seconds that loading a kernel may take at least: JAX is imported for it, and no call is made
_LEAST_SECONDS = 10.0
_TIMES_SLOWEST = 5
# What caches of compilers go by: they belong into the scratch folder, the only one that may be written to.
_CACHES = ("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR", "NUMBA_CACHE_DIR")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one call of a kernel may take: seconds, and bytes of memory of its process."""

    seconds: float = 300.0
    memory: int = 0

    @classmethod
    def of(cls, seconds: float | None, gib: float | None) -> Limits:
        """Limits as they are given on a command line; half of the machine's memory if it is not said."""
        memory = int(gib * 2**30) if gib is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return cls(cls.seconds if seconds is None else seconds, memory)


class Lost(BaseException):
    """The kernel's process is gone, or had to be ended; the message says why.

    It is no `Exception`: no check may take it for something that the kernel raised. It ends the job.
    """


class CallTimeout(Lost):
    """A call took longer than it may."""


class LoadFailed(Exception):  # noqa: N818 -- a statement, as the message is
    """The kernel could not be loaded; the message is one line."""


@dataclasses.dataclass(eq=False)
class _Begun:
    """What was begun, the bytes of the request, and its answer once that is heard."""

    order: CallRequest
    size: int
    message: Any = None


_CONFINED = "; a kernel's process writes to a scratch folder alone, and connects to nothing: --in-process is unconfined"


class KernelProcess:
    """The process of one kernel. It is started when it is first asked, and again after it was lost."""

    def __init__(
        self,
        name: str,
        products: str | None,
        limits: Limits,
        problem: str | None = None,
        first: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """For the kernel that goes by `name`; nothing is started yet.

        `first` is what it said when it was first loaded, if it was, by another process. `environ` is what its
        environment has in place of what others have there.
        """
        self.name, self.limits = name, limits
        self._first, self._environ, self._shelf = (
            first,
            dict(environ or {}),
            None if environ else compilation_cache.find_cache_folder(name),
        )
        self._own_flags: KernelProcess | None = None
        self._products, self._problem = products, problem
        self._lives: list[_Running] = []  # the one that there is, if it runs
        self._begun: collections.deque[_Begun] = collections.deque()  # what nobody has asked for yet
        self._said: Handshake | None = None
        self._slowest = 0.0  # of the calls that returned, in seconds
        self._too_slow = 0
        weakref.finalize(self, _end, self._lives)  # when nobody refers to this any more, and when the judge ends
        _ALL.add(self)

    @property
    def said(self) -> Handshake:
        """What the kernel declares, when it was first loaded: it declares it once."""
        if self._said is None:
            self._start()
        assert self._said is not None
        return self._said

    def with_own_flags(self) -> KernelProcess:
        """Another process of the same kernel, whose programs are compiled as JAX compiles by itself."""
        if self._own_flags is None:
            self._own_flags = self.afresh(environment.own_flags())
        return self._own_flags

    def afresh(self, environ: Mapping[str, str] | None = None) -> KernelProcess:
        """Another process of the same kernel that was asked nothing, in the same environment unless it is said."""
        known = (self.name, self._products, self.limits, self._problem, self.said.text)
        return KernelProcess(*known, self._environ if environ is None else environ)

    def begin(self, order: CallRequest) -> None:
        """Have the process start on what it will be asked: the judge finds out meanwhile what to expect."""
        if not self._lives:
            return  # whoever asks will hear why it does not start
        request = protocol.pack_request(order)
        while len(self._begun) >= _MOST_BEGUN and self._begun[0].message is not None:
            self._begun.popleft()
        busy = [one for one in self._begun if one.message is None]
        if busy and sum(one.size for one in busy) + len(request) > self._lives[0].room:
            return  # it may be writing an answer, and both would wait for the other to read
        try:
            self._lives[0].tell(request, self._limits_now, busy=bool(busy))
            self._begun.append(_Begun(order, len(request)))
        except Lost as lost:  # whoever asks will hear of it, from another process
            self._too_slow += isinstance(lost, CallTimeout)
            self.end()

    def ask(self, order: CallRequest) -> Any:
        """What the kernel's process answers.

        Raises:
          Lost: if the process dies, takes too long, takes too much memory, or answers what cannot be read.
          Exception: what the kernel raised, as an exception of the same name.
        """
        if not self._lives:
            self._start()
        (running,) = self._lives
        try:
            start = time.monotonic()
            begun = next((one for one in self._begun if one.order.is_same(order)), None)
            self._hear_begun(begun)
            if begun is None:
                running.tell(protocol.pack_request(order), self._limits_now)
                message = running.hear(self._limits_now)
            else:
                self._begun.remove(begun)
                message = begun.message
            self._slowest = max(self._slowest, time.monotonic() - start)
            return _returned(message, running)
        except Lost as lost:
            self._too_slow += isinstance(lost, CallTimeout)
            self.end()
            raise

    def _hear_begun(self, last: _Begun | None) -> None:
        """Hear the answers to what was begun, in their order: up to `last`, or all of them."""
        for one in self._begun:
            if one.message is None:
                one.message = self._lives[0].hear(self._limits_now)
            if one is last:
                return

    @property
    def _limits_now(self) -> Limits:
        """The limits, less patient with a kernel that has hung before: it may do so in hundreds of cases."""
        if self._too_slow < _PATIENCE:
            return self.limits
        seconds = min(self.limits.seconds, max(_LEAST_SECONDS, _TIMES_SLOWEST * self._slowest))
        return dataclasses.replace(self.limits, seconds=seconds)

    def _start(self) -> None:
        running = _Running(self._environ, self._shelf)
        self._lives.append(running)
        try:
            patient = dataclasses.replace(self.limits, seconds=max(self.limits.seconds, _LOADING))
            found = _returned(running.load(self.name, self._products, self._problem, patient), running)
        except Lost as lost:
            self.end()
            raise LoadFailed(f"{self.name} does not load: {lost}") from lost
        except Exception as error:  # of whatever type the kernel's import raised
            self.end()
            why = _CONFINED if "PermissionError" in str(error) else ""
            message = str(error).strip() or f"{self.name} does not import: {mishaps.told(error)}"
            raise LoadFailed(records.printable(message.split("\n")[0]) + why) from error
        try:
            self._said = handshake.parse_handshake(found, running.confined, self._first)
        except ValueError as error:
            self.end()
            raise LoadFailed(f"{self.name} does not load: {error}") from error
        self._first = self._said.text

    def end(self) -> None:
        """End the process, and whatever it started."""
        self._begun.clear()
        _end(self._lives)
        if self._own_flags is not None:
            self._own_flags.end()


_ALL: weakref.WeakSet[KernelProcess] = weakref.WeakSet()


def end_all_processes() -> None:
    """End the processes of all kernels, at the end of a command; one that is asked once more is started again."""
    for process in list(_ALL):
        process.end()


def _end(lives: list[_Running]) -> None:
    while lives:
        lives.pop().end()


class _Running:
    """One life of a kernel's process."""

    def __init__(self, environ: dict[str, str], programs: Path | None) -> None:
        self._scratch, self._programs = scratch_folder.create_scratch_folder(), programs
        compilation_cache.link_programs(programs, self._scratch)
        theirs, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(AttributeError, OSError):  # only Linux can, and not for every user
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        environ = (
            forked_process.filter_environment()
            | dict.fromkeys(_CACHES, self._scratch)
            | {"PYTHONUNBUFFERED": "1"}
            | environ
        )
        self._process = ForkedProcess(kernel_server.serve, passing=(theirs, answers), environ=environ, output=output)
        for pipe in (theirs, answers, output):
            os.close(pipe)
        self.confined = ""
        self._printed: collections.deque[bytes] = collections.deque(maxlen=4)
        self._taking = threading.Lock()  # what is printed, which two threads take from the pipe
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def load(self, name: str, products: str | None, problem: str | None, limits: Limits) -> Any:
        """What it answers to having loaded the kernel."""
        load = LoadRequest(name, products, problem, (os.getcwd(), *sys.path), self._scratch)
        self._write(protocol.pack_request(load), time.monotonic() + limits.seconds)
        self.confined = str(self.hear(limits))  # said before anything of the kernel's runs
        return self.hear(limits)

    @property
    def room(self) -> int:
        """Bytes of requests that may wait to be read."""
        try:
            return fcntl.fcntl(self._requests, fcntl.F_GETPIPE_SZ) // 2
        except (AttributeError, OSError):
            return _LEAST_PIPE // 2

    def tell(self, request: bytes, limits: Limits, *, busy: bool = False) -> None:
        """Pass an order on; `hear` has the answer. `busy` says whether it is working on another."""
        if not busy:
            self._take_printed()
            self._printed.clear()  # what it printed before belongs to other orders
        self._write(request, time.monotonic() + limits.seconds)

    def hear(self, limits: Limits) -> Any:
        """The next answer."""
        until = time.monotonic() + limits.seconds
        try:
            words, rest = protocol.parse_lengths(self._read(protocol.LENGTHS.size, until, limits))
            return protocol.parse_answer(self._read(words, until, limits), self._read(rest, until, limits))
        except protocol.UnreadableAnswer as error:
            raise Lost(f"the kernel's process gave {error}{self.printed()}") from error

    def printed(self) -> str:
        """The last lines that the process printed, in brackets, or nothing."""
        self._take_printed()
        text = b"".join(self._printed)[-_KEPT_OUTPUT:].decode(errors="replace")
        lines = [records.printable(line.strip()) for line in text.splitlines() if line.strip()]
        return f" (it printed: {' | '.join(lines[-3:])[:300]})" if lines else ""

    def end(self) -> None:
        """Kill the process with all that it started, and remove its folder."""
        self._process.signal(signal.SIGTERM)  # who keeps it ends all that is below it
        if not supervisor.IS_AVAILABLE or self._process.wait(_ENDING) is None:
            self._process.signal(signal.SIGKILL)
            self._process.wait(_ENDING)
        self._process.release()
        self._listener.join(timeout=1.0)  # what it started and let go of may still hold its output
        with self._taking:
            for pipe in (self._requests, self._answers, self._output):
                with contextlib.suppress(OSError):
                    os.close(pipe)
            self._output = -1
        compilation_cache.store_programs(self._programs, self._scratch)
        scratch_folder.remove_scratch_folder(self._scratch)

    def _listen(self) -> None:
        """Keep the pipe from filling up."""
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile
            while self._take_printed():
                select.select((self._output,), (), ())

    def _take_printed(self) -> bool:
        """Keep the last of all that is in the pipe, and say whether there can be more.

        Who has an answer finds here whatever was printed before it.
        """
        with self._taking:
            if self._output < 0:
                return False
            try:
                part = os.read(self._output, _PIPE)
            except BlockingIOError:
                return True
            if part:
                self._printed.append(part[-_KEPT_OUTPUT:])
            return bool(part)

    def _write(self, request: bytes, until: float) -> None:
        rest = memoryview(LENGTH.pack(len(request)) + request)
        os.set_blocking(self._requests, False)
        while rest:
            _, ready, _ = select.select((), (self._requests,), (), _LOOK_EVERY)
            if ready:
                try:
                    rest = rest[os.write(self._requests, rest) :]
                except BrokenPipeError:
                    raise Lost(self._how_it_ended()) from None
            if time.monotonic() > until:
                raise CallTimeout("the kernel's process does not read what it is asked")

    def _read(self, count: int, until: float, limits: Limits) -> bytes:
        read = bytearray()
        while len(read) < count:
            ready, _, _ = select.select((self._answers,), (), (), _LOOK_EVERY)
            if ready:
                part = os.read(self._answers, min(count - len(read), 2**20))
                if not part:
                    raise Lost(self._how_it_ended())
                read += part
            elif self._process.wait(0) is not None:
                raise Lost(self._how_it_ended())
            if time.monotonic() > until:
                raise CallTimeout(f"the call did not return within {limits.seconds:.3g} s (--timeout){self.printed()}")
            # Before it says how it is confined nothing of the kernel's runs, and it may not even have begun.
            if limits.memory and self.confined and (taken := self._memory()) > limits.memory:
                gib = f"{taken / 2**30:.1f} GiB, {limits.memory / 2**30:.1f} GiB are allowed (--memory)"
                raise Lost(f"the kernel's process took {gib}{self.printed()}")
        return bytes(read)

    def _memory(self) -> int:
        """Bytes of memory that the process has, and what it let go of, zero where the system does not say."""
        pages = 0
        # Where there is a keeper, it does nothing, and has in common with the kernel what was loaded before both.
        above = self._process.pid
        for process in supervisor.list_children(above) if supervisor.IS_AVAILABLE else [above]:
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{process}/statm") as file:
                pages += int(file.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _how_it_ended(self) -> str:
        code = self._process.wait(_ENDING)
        if code is None:
            return f"the kernel's process closed the pipe of its answers{self.printed()}"
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return f"the kernel's process died of {name}{self.printed()}"
        return f"the kernel's process ended by itself, with exit code {code}{self.printed()}"


def _returned(message: Any, running: _Running) -> Any:
    """What an answer brings. Raises what the kernel raised, and `Lost` for what is no answer."""
    if isinstance(message, dict) and list(message) == ["returned", "replaced"]:
        if not isinstance(message["replaced"], list):
            raise Lost("the kernel's process answered with what is no answer")
        if message["replaced"]:
            names = records.printable(", ".join(str(name) for name in message["replaced"][:3]))
            raise Lost(f"the kernel has replaced {names} in its process: what comes from there is not what it computes")
        return message["returned"]
    raised = message.get("raised") if isinstance(message, dict) else None
    if not (isinstance(raised, dict) and isinstance(raised.get("kinds"), list)):
        raise Lost("the kernel's process answered with what is no answer")
    error = remote_exceptions.rebuild_exception(
        str(raised.get("type")), raised["kinds"], str(raised.get("message"))[:MAX_TEXT]
    )
    why = _CONFINED if isinstance(error, PermissionError) else ""
    mishaps.tell(error, f"{str(raised.get('told'))[:MAX_TEXT]}{why}{running.printed()}")
    raise error
