"""Start, call, watch and end a kernel's process, from the judge."""

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
from pathlib import Path
from typing import Any

from conformance import environment, interrupts, records
from conformance.calling import mishaps
from conformance.fork_server import visible_environment
from conformance.fork_server.forked_process import ForkedProcess
from conformance.sandbox import (
    compilation_cache,
    denials,
    kernel_server,
    loaded_files,
    protocol,
    remote_exceptions,
    supervisor,
)
from conformance.sandbox.handshake import MAX_TEXT, Handshake, parse_first_files, parse_handshake
from conformance.sandbox.kernel_server import REQUEST_LENGTH, CallRequest, LoadRequest
from conformance.sandbox.policy import SandboxPolicy
from conformance.sandbox.scratch_folder import ScratchFolder

_POLL_INTERVAL = 0.05
_END_SECONDS = 5.0  # seconds that ending a process and all that it started may take, before it is killed
_MAX_STATUS = 4096
_MAX_KEPT_OUTPUT = 4096  # bytes
_PIPE_BYTES = 2**20  # bytes that a pipe holds, where the system allows it: operands and results pass at one go
_DEFAULT_PIPE_BYTES = 2**16  # what one holds otherwise
_MAX_PENDING = 4
# After so many calls that did not return, others get a multiple of what the slowest took that did.
_TIMEOUTS_BEFORE_CUT = 2
_MIN_LOAD_SECONDS = (
    120.0  # seconds that loading a kernel may take at least: JAX is imported for it, and no call is made
)
_MIN_CALL_SECONDS = 10.0
_SLOWEST_MULTIPLE = 5
# What caches of compilers go by: they belong into the scratch folder, the only one that may be written to.
_CACHE_VARIABLES = (
    "TMPDIR",
    "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "MPLCONFIGDIR",
    "NUMBA_CACHE_DIR",
)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The seconds that one call of a kernel may take, and the bytes of memory and files that its processes may hold."""

    seconds: float = 300.0
    memory: int = 0

    @classmethod
    def from_options(cls, seconds: float | None, gib: float | None) -> Limits:
        """Return the limits of a command line; by default half of the machine's memory."""
        memory = int(gib * 2**30) if gib is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        return cls(cls.seconds if seconds is None else seconds, memory)


class ProcessLost(BaseException):
    """The kernel's process is gone, or had to be ended; the message says why.

    It is no `Exception`: no check may take it for something that the kernel raised. It ends the job.
    """


class CallTimeout(ProcessLost):
    """A call took longer than it may."""


class LoadFailed(Exception):  # noqa: N818 -- a statement, as the message is
    """The kernel could not be loaded; the message is one line."""


@dataclasses.dataclass(eq=False)
class _PendingCall:
    """A call that was begun: its request, the bytes of that, and the answer once it is received."""

    request: CallRequest
    size: int
    message: Any = None


class KernelProcess:
    """The process of one kernel. It is started by the first call, and by the next one after it was lost."""

    def __init__(
        self,
        name: str,
        products: str | None,
        limits: Limits,
        problem: str | None = None,
        first_handshake: str = "",
        xla_flags: str | None = None,
        sandbox: SandboxPolicy | None = None,
        *,
        reads_cache: bool = True,
    ) -> None:
        """Prepare the process of a kernel; nothing is started yet.

        Args:
          name: of the kernel, as `--impl` has it.
          products: what `--products` says.
          limits: of one call.
          problem: what `--problem` says.
          first: the text of the first handshake of this kernel in another process, if there was one.
          xla_flags: the flags of XLA, if they are not those of the environment.
          sandbox: what the command says of the sandbox.
          reads_cache: whether it finds what earlier runs compiled.
        """
        self._sandbox = SandboxPolicy() if sandbox is None else sandbox
        self.name, self.limits = name, limits
        self._first_handshake, self._xla_flags, self._reads_cache = first_handshake, xla_flags, reads_cache
        self._cache_folder = compilation_cache.find_cache_folder(name)
        self.files = loaded_files.LoadedFiles(name, parse_first_files(first_handshake))
        self._with_default_flags: KernelProcess | None = None
        self._products, self._problem = products, problem
        self._running: list[_RunningProcess] = []  # at most one
        self._pending: collections.deque[_PendingCall] = collections.deque()  # results that nobody has asked for yet
        self._handshake: Handshake | None = None
        self._slowest_seconds = 0.0  # of the calls that returned, in seconds
        self._timeouts = 0
        self._lost: ProcessLost | None = None  # a death that `begin` has noticed
        # Ends the process when nobody refers to this any more, and when the judge ends.
        weakref.finalize(self, _end, self._running)
        _ALL.add(self)

    @property
    def handshake(self) -> Handshake:
        """Return the first handshake, in which the kernel declares what it does."""
        if self._handshake is None:
            self._start()
        assert self._handshake is not None
        return self._handshake

    def with_default_flags(self) -> KernelProcess:
        """Return another process of the same kernel, whose programs are compiled as JAX does by default."""
        if self._with_default_flags is None:
            self._with_default_flags = self.create_fresh(environment.default_flags())
        return self._with_default_flags

    def create_fresh(self, xla_flags: str | None = None) -> KernelProcess:
        """Return another process of the same kernel, under the same XLA flags unless others are given.

        It finds no program of an earlier run. All that are made in this way are alike, but for what XLA reads.
        """
        arguments = (self.name, self._products, self.limits, self._problem, self.handshake.text)
        flags = self._xla_flags if xla_flags is None else xla_flags
        other = KernelProcess(*arguments, flags, self._sandbox, reads_cache=False)
        other.files = self.files
        return other

    def begin(self, request: CallRequest) -> None:
        """Start a call whose result will be asked for; meanwhile the judge computes what to expect."""
        if not self._running:
            return  # `ask` will raise why it does not start
        packed = protocol.pack_request(request)
        while len(self._pending) >= _MAX_PENDING and self._pending[0].message is not None:
            self._pending.popleft()
        unanswered = [one for one in self._pending if one.message is None]
        if unanswered and sum(one.size for one in unanswered) + len(packed) > self._running[0].room:
            return  # it may be writing an answer, and both would wait for the other to read
        try:
            self._running[0].send(packed, self._current_limits, is_busy=bool(unanswered))
            self._pending.append(_PendingCall(request, len(packed)))
        except ProcessLost as lost:  # the next `ask` raises it, or `settle`
            self._timeouts += isinstance(lost, CallTimeout)
            self.end()
            self._lost = lost

    def call(self, request: CallRequest) -> Any:
        """Call a function in the kernel's process and return its result.

        Raises:
          ProcessLost: if the process dies, takes too long, takes too much memory, or answers what cannot be read.
          Exception: what the kernel raised, as an exception of the same name.
        """
        self._raise_lost()
        if not self._running:
            self._start()
        (running,) = self._running
        try:
            start = time.monotonic()
            pending_call = next((one for one in self._pending if one.request.is_same(request)), None)
            self._receive_pending(pending_call)
            if pending_call is None:
                running.send(protocol.pack_request(request), self._current_limits)
                message = self._receive(request)
            else:
                self._pending.remove(pending_call)
                message = pending_call.message
            self._slowest_seconds = max(self._slowest_seconds, time.monotonic() - start)
            return _unpack_result(message, running)
        except ProcessLost as lost:
            self._timeouts += isinstance(lost, CallTimeout)
            self.end()
            raise
        except KeyboardInterrupt:  # the answer may be half read
            self.end()
            raise

    def settle(self) -> None:
        """Wait for pending calls whose results nobody has asked for, and forget them.

        Raises:
          ProcessLost: if the process died of it.
        """
        self._raise_lost()
        try:
            if self._running:
                self._receive_pending(None)
        except ProcessLost as lost:
            self._timeouts += isinstance(lost, CallTimeout)
            self.end()
            raise
        self._pending.clear()

    def _raise_lost(self) -> None:
        """Raise the death that `begin` has noticed, once."""
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost

    def _receive_pending(self, last: _PendingCall | None) -> None:
        """Receive the answers to pending calls in their order: up to `last`, or all of them."""
        for one in self._pending:
            if one.message is None:
                one.message = self._receive(one.request)
            if one is last:
                return

    def _receive(self, request: CallRequest) -> Any:
        """Receive the answer to a call, and read the files that it names. Raises `ProcessLost`."""
        message = self._running[0].receive(self._current_limits, _max_bytes(request))
        self._record_files(message)
        return message

    def _record_files(self, message: Any) -> None:
        try:
            self.files.record_reported(message)
        except loaded_files.FileChanged as error:
            raise ProcessLost(str(error)) from error
        except ValueError as error:
            raise ProcessLost("the kernel's process answered with what is no answer") from error

    @property
    def _current_limits(self) -> Limits:
        """Return the limits of the next call, with less time for a kernel that has hung before.

        It may hang in hundreds of cases.
        """
        if self._timeouts < _TIMEOUTS_BEFORE_CUT:
            return self.limits
        seconds = min(self.limits.seconds, max(_MIN_CALL_SECONDS, _SLOWEST_MULTIPLE * self._slowest_seconds))
        return dataclasses.replace(self.limits, seconds=seconds)

    def _start(self) -> None:
        with interrupts.held():  # or nobody would end it, and remove its folder
            running = _RunningProcess(self._cache_folder, self.limits, self._sandbox, reads_cache=self._reads_cache)
            self._running.append(running)
        try:
            load_limits = dataclasses.replace(self.limits, seconds=max(self.limits.seconds, _MIN_LOAD_SECONDS))
            message = running.load(self.name, self._products, self._problem, self._xla_flags, load_limits)
            self._record_files(message)
            result = _unpack_result(message, running)
        except ProcessLost as lost:
            self.end()
            raise LoadFailed(f"{self.name} does not load: {lost}") from lost
        except Exception as error:  # of whatever type the kernel's import raised
            self.end()
            message = str(error).strip() or f"{self.name} does not import: {mishaps.told(error)}"
            raise LoadFailed(records.printable(message.split("\n")[0]) + running.denial) from error
        try:
            self._handshake = parse_handshake(result, running.confined, self._first_handshake, self.files.files_at_load)
        except ValueError as error:
            self.end()
            raise LoadFailed(f"{self.name} does not load: {error}") from error
        self._first_handshake = self._handshake.text

    def end(self) -> None:
        """End the process, and all that it started."""
        self._pending.clear()
        _end(self._running)
        if self._with_default_flags is not None:
            self._with_default_flags.end()


_ALL: weakref.WeakSet[KernelProcess] = weakref.WeakSet()


def end_all_processes() -> None:
    """End the processes of all kernels, at the end of a command. A later call starts one again."""
    for process in list(_ALL):
        process.end()


def _end(running: list[_RunningProcess]) -> None:
    with interrupts.held():
        while running:
            running.pop().end()


def _max_bytes(request: CallRequest) -> int:
    """Return the most bytes of arrays that an answer may have."""
    return protocol.max_array_bytes(request.arguments, request.keywords)


class _RunningProcess:
    """A kernel's process that was started, from its start to its end."""

    def __init__(self, cache_folder: Path | None, limits: Limits, sandbox: SandboxPolicy, *, reads_cache: bool) -> None:
        self._sandbox = sandbox
        self._scratch, self._cache_folder = ScratchFolder(), cache_folder if reads_cache else None
        if cache_folder is not None:
            compilation_cache.link_programs(self._cache_folder, self._scratch.path)
        self._status, status = os.pipe()
        requests_end, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(AttributeError, OSError):  # only Linux can, and not for every user
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._output, output = os.pipe()
        for pipe in (self._output, self._status):
            os.set_blocking(pipe, False)
        environ = (
            visible_environment.filter_environment(os.environ, sandbox.variables)
            | dict.fromkeys(_CACHE_VARIABLES, self._scratch.path)
            | {"PYTHONUNBUFFERED": "1"}
        )
        child_pipes = (requests_end, answers, status)
        arguments = (self._scratch.path, limits.memory)
        self._process = ForkedProcess(
            kernel_server.serve, *arguments, pass_fds=child_pipes, environ=environ, output=output
        )
        for pipe in (*child_pipes, output):
            os.close(pipe)
        self.confined = ""
        self.denial = ""  # what of the last error the sandbox caused
        self._output_parts: collections.deque[bytes] = collections.deque(maxlen=4)
        self._output_lock = threading.Lock()  # two threads read from the pipe of what is printed
        self._output_reader = threading.Thread(target=self._drain_output, daemon=True)
        self._output_reader.start()

    def load(self, name: str, products: str | None, problem: str | None, xla_flags: str | None, limits: Limits) -> Any:
        """Load the kernel and return its handshake."""
        load = LoadRequest(name, products, problem, (os.getcwd(), *sys.path), self._scratch.path, self._sandbox)
        for request in (xla_flags, load):  # the flags by themselves: the kernel finds what is loaded in frames above it
            self._write(protocol.pack_request(request), time.monotonic() + limits.seconds)
        self.confined = str(self.receive(limits, 0))  # sent before anything of the kernel's runs
        return self.receive(limits, 0)

    @property
    def room(self) -> int:
        """Return how many bytes of requests may wait in the pipe."""
        try:
            return fcntl.fcntl(self._requests, fcntl.F_GETPIPE_SZ) // 2
        except (AttributeError, OSError):
            return _DEFAULT_PIPE_BYTES // 2

    def send(self, packed: bytes, limits: Limits, *, is_busy: bool = False) -> None:
        """Send a request; `receive` returns its answer. `is_busy` says whether the process works on another."""
        if not is_busy:
            self._read_output()
            self._output_parts.clear()  # what it printed before belongs to other requests
        self._write(packed, time.monotonic() + limits.seconds)

    def receive(self, limits: Limits, max_bytes: int) -> Any:
        """Return the next answer, which may have so many bytes of arrays."""
        deadline = time.monotonic() + limits.seconds
        try:
            text, rest = protocol.parse_lengths(self._read(protocol.LENGTHS.size, deadline, limits), max_bytes)
            return protocol.parse_answer(self._read(text, deadline, limits), self._read(rest, deadline, limits))
        except protocol.UnreadableAnswer as error:
            raise ProcessLost(f"the kernel's process gave {error}{self.format_output()}") from error

    def format_output(self) -> str:
        """Return the last lines that the process printed, in brackets, or nothing."""
        self._read_output()
        text = b"".join(self._output_parts)[-_MAX_KEPT_OUTPUT:].decode(errors="replace")
        lines = [records.printable(line.strip()) for line in text.splitlines() if line.strip()]
        return f" (it printed: {' | '.join(lines[-3:])[:300]})" if lines else ""

    def end(self) -> None:
        """Kill the process with all that it started, and remove its folder."""
        self._process.signal(supervisor.END_SIGNAL)  # the supervisor ends all that is below it
        if not supervisor.IS_AVAILABLE or self._process.wait(_END_SECONDS) is None:
            self._process.signal(signal.SIGKILL)
            self._process.wait(_END_SECONDS)
        self._process.release()
        self._output_reader.join(timeout=1.0)  # what it started and let go of may still hold its output
        with self._output_lock:
            for pipe in (self._requests, self._answers, self._output, self._status):
                with contextlib.suppress(OSError):
                    os.close(pipe)
            self._output = -1
        compilation_cache.store_programs(self._cache_folder, self._scratch.path)
        self._scratch.remove()

    def _drain_output(self) -> None:
        """Read what is printed all the time, so that the pipe does not fill up."""
        with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile
            while self._read_output():
                select.select((self._output,), (), ())

    def _read_output(self) -> bool:
        """Read all that is in the pipe, store the last of it, and return whether more can come.

        After an answer was received, this finds all that was printed before it.
        """
        with self._output_lock:
            if self._output < 0:
                return False
            try:
                part = os.read(self._output, _PIPE_BYTES)
            except BlockingIOError:
                return True
            if part:
                self._output_parts.append(part[-_MAX_KEPT_OUTPUT:])
            return bool(part)

    def _write(self, packed: bytes, deadline: float) -> None:
        rest = memoryview(REQUEST_LENGTH.pack(len(packed)) + packed)
        os.set_blocking(self._requests, False)
        while rest:
            _, ready, _ = select.select((), (self._requests,), (), _POLL_INTERVAL)
            if ready:
                try:
                    rest = rest[os.write(self._requests, rest) :]
                except BrokenPipeError:
                    raise ProcessLost(self._describe_end()) from None
            if time.monotonic() > deadline:
                raise CallTimeout("the kernel's process does not read what it is asked")

    def _read(self, count: int, deadline: float, limits: Limits) -> bytes:
        received = bytearray()
        while len(received) < count:
            ready, _, _ = select.select((self._answers,), (), (), _POLL_INTERVAL)
            if ready:
                part = os.read(self._answers, min(count - len(received), 2**20))
                if not part:
                    raise ProcessLost(self._describe_end())
                received += part
            elif self._process.wait(0) is not None:
                raise ProcessLost(self._describe_end())
            if time.monotonic() > deadline:
                raise CallTimeout(
                    f"the call did not return within {limits.seconds:.3g} s (--timeout){self.format_output()}"
                )
        return bytes(received)

    def _describe_end(self) -> str:
        """Say how the process ended: by the supervisor's words, its signal or its exit code."""
        code = self._process.wait(_END_SECONDS)
        with contextlib.suppress(BlockingIOError):
            if reason := os.read(self._status, _MAX_STATUS):
                return f"{reason.decode(errors='replace')}{self.format_output()}"
        if code is None:
            return f"the kernel's process closed the pipe of its answers{self.format_output()}"
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return f"the kernel's process died of {name}{self.format_output()}"
        return f"the kernel's process ended by itself, with exit code {code}{self.format_output()}"


def _unpack_result(message: Any, running: _RunningProcess) -> Any:
    """Return the result in an answer. Raises what the kernel raised, and `ProcessLost` for what is no answer."""
    if isinstance(message, dict) and list(message) == ["returned", "replaced", "files"]:
        if not isinstance(message["replaced"], list):
            raise ProcessLost("the kernel's process answered with what is no answer")
        if message["replaced"]:
            names = records.printable(", ".join(str(name) for name in message["replaced"][:3]))
            raise ProcessLost(
                f"the kernel has replaced {names} in its process: what comes from there is not what it computes"
            )
        return message["returned"]
    raised = message.get("raised") if isinstance(message, dict) else None
    if not (isinstance(raised, dict) and isinstance(raised.get("kinds"), list)):
        raise ProcessLost("the kernel's process answered with what is no answer")
    error = remote_exceptions.rebuild_exception(
        str(raised.get("type")), raised["kinds"], str(raised.get("message"))[:MAX_TEXT]
    )
    running.denial = denials.explain_denial(
        str(raised.get("missing", ""))[:MAX_TEXT], is_permission_error="PermissionError" in raised.get("causes", ())
    )
    mishaps.tell(error, f"{str(raised.get('told'))[:MAX_TEXT]}{running.denial}{running.format_output()}")
    raise error
