"""Start, call, watch and end a kernel's process, from the judge.

`KernelProcess` represents a kernel, and starts a process for the kernel when one is needed. `_RunningProcess` is one
such process with its pipes. A process that dies, takes too long or sends an invalid answer is ended, and the next call
starts another one.
"""

from __future__ import annotations

import builtins
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

from conformance import environment, interrupts
from conformance.execution import kernel_errors
from conformance.fork_server import visible_environment
from conformance.fork_server.forked_process import ForkedProcess
from conformance.sandbox import (
    compilation_cache,
    denials,
    kernel_server,
    loaded_files,
    protocol,
    supervisor,
)
from conformance.sandbox.handshake import MAX_TEXT, Handshake, parse_first_files, parse_handshake
from conformance.sandbox.kernel_server import REQUEST_LENGTH, CallRequest, LoadRequest
from conformance.sandbox.policy import SandboxPolicy
from conformance.temporary_folders import TemporaryFolder
from reports.printable_text import make_printable

_POLL_INTERVAL = 0.05
_END_SECONDS = 5.0  # time for the supervisor to end all that the kernel started, before SIGKILL
_MAX_STATUS = 4096
_MAX_KEPT_OUTPUT = 4096  # the last bytes of the kernel's output that are kept for messages
_PIPE_BYTES = 2**20  # capacity of a pipe if the system allows it: large enough for most operands in one write
_DEFAULT_PIPE_BYTES = 2**16  # capacity of a pipe if the system does not allow more
_MAX_PENDING = 4
TIMED_OUT = "the call did not return within"
"""The first words of the message of a call that takes longer than its limit."""
# After this many timeouts, the time limit of a call is a multiple of the time of the slowest call that returned.
_TIMEOUTS_BEFORE_CUT = 2
_MIN_LOAD_SECONDS = 120.0  # `--timeout` limits calls; loading, which may import JAX, gets at least this
_MIN_CALL_SECONDS = 10.0
_SLOWEST_MULTIPLE = 5
# Environment variables that name folders for temporary files and caches. They are set to the scratch folder, the only
# folder that a kernel may write to.
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
    """Limits of a kernel's process: seconds of a call, and bytes of memory and files, 0 bytes for no limit."""

    timeout: float = 300.0
    memory: int = 0

    @classmethod
    def from_options(cls, timeout: float | None, memory: float | None) -> Limits:
        """Return the limits for `--timeout` and for `--memory` in GiB, by default half of the machine's."""
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = whole // 2 if memory is None else int(memory * 2**30)
        return cls(cls.timeout if timeout is None else timeout, most)


class ProcessLost(BaseException):
    """Raised when the kernel's process has died or had to be ended; the message says why.

    This is not an `Exception`, so no check takes it for an error that the kernel raised. It ends the job.
    """


class CallTimeout(ProcessLost):
    """Raised when a call takes longer than its limit."""


class LoadFailed(Exception):
    """Raised when the kernel could not be loaded; the message is one line."""


@dataclasses.dataclass(eq=False)
class _PendingCall:
    """A call that `begin` has started and whose result `call` has not returned yet."""

    request: CallRequest
    size: int
    message: Any = None


class KernelProcess:
    """The process of one kernel. The first call starts it, and so does the next call after it was lost."""

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
        new_hashes: bool = False,
    ) -> None:
        """Prepare the process of a kernel, without starting it.

        Args:
          first_handshake: the text of the kernel's first handshake, if another process of the judge received it.
          xla_flags: flags of XLA; None for those of the environment.
          reads_cache: whether the process may read programs that earlier runs compiled.
          new_hashes: whether `hash` of text has other values in the process than in others.
        """
        self._sandbox = SandboxPolicy() if sandbox is None else sandbox
        self.name, self.limits = name, limits
        self._first_handshake, self._xla_flags = first_handshake, xla_flags
        self._reads_cache, self._new_hashes = reads_cache, new_hashes
        self._cache_folder = compilation_cache.find_cache_folder(name)
        self.files = loaded_files.LoadedFiles(name, parse_first_files(first_handshake))
        self._with_default_flags: KernelProcess | None = None
        self._products, self._problem = products, problem
        self._running: list[_RunningProcess] = []  # empty, or the one started process
        # Calls in the order in which their answers arrive.
        self._pending: collections.deque[_PendingCall] = collections.deque()
        self._handshake: Handshake | None = None
        self._slowest_seconds = 0.0  # time of the slowest call that returned
        self._timeouts = 0
        self._lost: ProcessLost | None = None  # noticed by `begin`; the next `call` or `settle` raises it
        # End the process when this object is collected, and when the judge ends.
        weakref.finalize(self, _end, self._running)
        _ALL.add(self)

    @property
    def handshake(self) -> Handshake:
        """The kernel's handshake. The first use starts the kernel's process."""
        if self._handshake is None:
            self._start()
        assert self._handshake is not None
        return self._handshake

    def with_default_flags(self) -> KernelProcess:
        """Return another process of the same kernel, which compiles under JAX's default flags."""
        if self._with_default_flags is None:
            self._with_default_flags = self.create_fresh(environment.build_default_flags())
        return self._with_default_flags

    def create_fresh(self, xla_flags: str | None = None, *, new_hashes: bool = False) -> KernelProcess:
        """Return another process of the same kernel, under the same XLA flags unless others are given.

        The process reads no programs of earlier runs. To the kernel, all such processes differ only by XLA's flags,
        except those of `new_hashes`, in which `hash` of text has other values.
        """
        arguments = (self.name, self._products, self.limits, self._problem, self.handshake.text)
        flags = self._xla_flags if xla_flags is None else xla_flags
        other = KernelProcess(*arguments, flags, self._sandbox, reads_cache=False, new_hashes=new_hashes)
        other.files = self.files
        return other

    def begin(self, request: CallRequest) -> None:
        """Send a call's request without waiting, so that the judge computes meanwhile; `call` returns the result."""
        if not self._running:
            return  # `call` will start the process, and raise if that fails
        packed = protocol.pack_request(request)
        while len(self._pending) >= _MAX_PENDING and self._pending[0].message is not None:
            self._pending.popleft()
        unanswered = [one for one in self._pending if one.message is None]
        if unanswered and sum(one.size for one in unanswered) + len(packed) > self._running[0].room:
            return  # if the process is writing an answer, both sides would wait for the other to read
        try:
            self._running[0].send(packed, self._current_limits, is_busy=bool(unanswered))
            self._pending.append(_PendingCall(request, len(packed)))
        except ProcessLost as lost:  # the next `call` or `settle` raises it
            self._timeouts += isinstance(lost, CallTimeout)
            self.end()
            self._lost = lost

    def call(self, request: CallRequest) -> Any:
        """Call a function in the kernel's process and return its result.

        Raises:
          ProcessLost: if the process dies, takes too long or too much memory, or its answer cannot be read.
          Exception: the kernel's own exception, rebuilt with the same name and message.
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
        except KeyboardInterrupt:  # an answer may be half read, so the pipe is no longer usable
            self.end()
            raise

    def settle(self) -> None:
        """Wait for all pending calls, and discard their results. Raises `ProcessLost`."""
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
        """Raise the loss that `begin` has noticed, once."""
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost

    def _receive_pending(self, last: _PendingCall | None) -> None:
        """Receive the answers to pending calls in order: up to `last`, or all of them."""
        for one in self._pending:
            if one.message is None:
                one.message = self._receive(one.request)
            if one is last:
                return

    def _receive(self, request: CallRequest) -> Any:
        """Receive the answer to a call, and record the files that it reports. Raises `ProcessLost`."""
        most = protocol.max_array_bytes(request.arguments, request.keywords)
        message = self._running[0].receive(self._current_limits, most)
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
        """The limits of the next call. A kernel whose calls have timed out gets less time: more of them may hang."""
        if self._timeouts < _TIMEOUTS_BEFORE_CUT:
            return self.limits
        seconds = min(self.limits.timeout, max(_MIN_CALL_SECONDS, _SLOWEST_MULTIPLE * self._slowest_seconds))
        return dataclasses.replace(self.limits, timeout=seconds)

    def _start(self) -> None:
        with interrupts.delay_signals():  # an interrupt between these lines would leave a process that nothing ends
            how = {"reads_cache": self._reads_cache, "new_hashes": self._new_hashes}
            running = _RunningProcess(self._cache_folder, self.limits, self._sandbox, **how)
            self._running.append(running)
        try:
            load_limits = dataclasses.replace(self.limits, timeout=max(self.limits.timeout, _MIN_LOAD_SECONDS))
            message = running.load(self.name, self._products, self._problem, self._xla_flags, load_limits)
            self._record_files(message)
            result = _unpack_result(message, running)
        except ProcessLost as lost:
            self.end()
            raise LoadFailed(f"{self.name} does not load: {lost}") from lost
        except Exception as error:  # the kernel's import may raise any exception
            self.end()
            message = str(error).strip() or f"{self.name} does not import: {kernel_errors.describe_kernel_error(error)}"
            raise LoadFailed(make_printable(message.split("\n")[0]) + running.denial) from error
        try:
            self._handshake = parse_handshake(result, running.confined, self._first_handshake, self.files.files_at_load)
        except ValueError as error:
            self.end()
            raise LoadFailed(f"{self.name} does not load: {error}") from error
        self._first_handshake = self._handshake.text

    def end(self) -> None:
        """End the kernel's process and all processes that it started. The next call starts another one."""
        self._pending.clear()
        _end(self._running)
        if self._with_default_flags is not None:
            self._with_default_flags.end()


_ALL: weakref.WeakSet[KernelProcess] = weakref.WeakSet()


def end_all_processes() -> None:
    """End the processes of all kernels, at the end of a command. The next call of a kernel starts its process again."""
    for process in list(_ALL):
        process.end()


def _end(running: list[_RunningProcess]) -> None:
    with interrupts.delay_signals():
        while running:
            running.pop().end()


class _RunningProcess:
    """One started process of a kernel, with its pipes and its scratch folder."""

    def __init__(
        self, cache_folder: Path | None, limits: Limits, sandbox: SandboxPolicy, *, reads_cache: bool, new_hashes: bool
    ) -> None:
        self._sandbox = sandbox
        self._scratch, self._cache_folder = TemporaryFolder("kernel"), cache_folder if reads_cache else None
        if cache_folder is not None:
            compilation_cache.link_programs(self._cache_folder, self._scratch.path)
        self._status, status = os.pipe()
        requests_end, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(AttributeError, OSError):  # only Linux can enlarge pipes, and not for every user
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
            kernel_server.serve,
            *arguments,
            pass_fds=child_pipes,
            environ=environ,
            output=output,
            new_hashes=new_hashes,
        )
        for pipe in (*child_pipes, output):
            os.close(pipe)
        self.confined = ""
        self.denial = ""  # explains the kernel's last error, if the sandbox caused it
        self._output_parts: collections.deque[bytes] = collections.deque(maxlen=4)
        self._output_lock = threading.Lock()  # held while reading the output, since two threads do so
        self._output_reader = threading.Thread(target=self._drain_output, daemon=True)
        self._output_reader.start()

    def load(self, name: str, products: str | None, problem: str | None, xla_flags: str | None, limits: Limits) -> Any:
        """Request that the process load the kernel, and return its answer, the handshake."""
        load = LoadRequest(name, products, problem, (os.getcwd(), *sys.path), self._scratch.path, self._sandbox)
        # A kernel can read `load` in the frames of its callers. The flags must stay hidden from it, so they are sent
        # in a request of their own, which the process deletes before it loads the kernel.
        for request in (xla_flags, load):
            self._write(protocol.pack_request(request), time.monotonic() + limits.timeout)
        self.confined = str(self.receive(limits, 0))  # the process sends this before any code of the kernel runs
        return self.receive(limits, 0)

    @property
    def room(self) -> int:
        """The most bytes of requests that may wait in the pipe: half of its capacity."""
        try:
            return fcntl.fcntl(self._requests, fcntl.F_GETPIPE_SZ) // 2
        except (AttributeError, OSError):
            return _DEFAULT_PIPE_BYTES // 2

    def send(self, packed: bytes, limits: Limits, *, is_busy: bool = False) -> None:
        """Send a request; `receive` returns its answer. `is_busy` means that the process still works on another one."""
        if not is_busy:
            self._read_output()
            self._output_parts.clear()  # this output belongs to earlier requests
        self._write(packed, time.monotonic() + limits.timeout)

    def receive(self, limits: Limits, max_bytes: int) -> Any:
        """Receive the next answer, with at most `max_bytes` bytes of arrays. Raises `ProcessLost`."""
        deadline = time.monotonic() + limits.timeout
        try:
            text, rest = protocol.parse_lengths(self._read(protocol.LENGTHS.size, deadline, limits), max_bytes)
            return protocol.parse_answer(self._read(text, deadline, limits), self._read(rest, deadline, limits))
        except protocol.UnreadableAnswer as error:
            raise ProcessLost(f"the kernel's process gave {error}{self.format_output()}") from error

    def format_output(self) -> str:
        """Return the last lines that the process printed, in brackets; empty if it printed nothing."""
        self._read_output()
        text = b"".join(self._output_parts)[-_MAX_KEPT_OUTPUT:].decode(errors="replace")
        lines = [make_printable(line.strip()) for line in text.splitlines() if line.strip()]
        return f" (it printed: {' | '.join(lines[-3:])[:300]})" if lines else ""

    def end(self) -> None:
        """End the process and all that it started, store its compiled programs, and remove its scratch folder."""
        self._process.signal(supervisor.END_SIGNAL)  # the supervisor kills all its descendants
        if not supervisor.IS_AVAILABLE or self._process.wait(_END_SECONDS) is None:
            self._process.signal(signal.SIGKILL)
            self._process.wait(_END_SECONDS)
        self._process.release()
        self._output_reader.join(timeout=1.0)  # without a supervisor, a descendant may keep the pipe open
        with self._output_lock:
            for pipe in (self._requests, self._answers, self._output, self._status):
                with contextlib.suppress(OSError):
                    os.close(pipe)
            self._output = -1
        compilation_cache.store_programs(self._cache_folder, self._scratch.path)
        self._scratch.remove()

    def _drain_output(self) -> None:
        """Read the output continuously, so that the pipe does not fill up. This runs in a thread."""
        with contextlib.suppress(OSError, ValueError):  # `end` closes the pipe
            while self._read_output():
                select.select((self._output,), (), ())

    def _read_output(self) -> bool:
        """Read the output that is in the pipe, keep its last bytes, and return whether more may come."""
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
                raise CallTimeout("the kernel's process does not read its requests")

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
                raise CallTimeout(f"{TIMED_OUT} {limits.timeout:.3g} s (--timeout){self.format_output()}")
        return bytes(received)

    def _describe_end(self) -> str:
        """Describe how the process ended: by the supervisor's message, its signal or its exit code."""
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
    """Return the result in an answer.

    Raises:
      ProcessLost: if this is no valid answer, or the kernel has replaced functions that requests are executed with.
      Exception: the kernel's own exception, rebuilt with the same name and message.
    """
    if isinstance(message, dict) and list(message) == ["returned", "replaced", "files"]:
        if not isinstance(message["replaced"], list):
            raise ProcessLost("the kernel's process answered with what is no answer")
        if message["replaced"]:
            names = make_printable(", ".join(str(name) for name in message["replaced"][:3]))
            raise ProcessLost(f"the kernel has replaced {names} in its process, so its results cannot be trusted")
        return message["returned"]
    raised = message.get("raised") if isinstance(message, dict) else None
    if not (isinstance(raised, dict) and isinstance(raised.get("kinds"), list)):
        raise ProcessLost("the kernel's process answered with what is no answer")
    error = rebuild_exception(str(raised.get("type")), raised["kinds"], str(raised.get("message"))[:MAX_TEXT])
    running.denial = denials.explain_denial(
        str(raised.get("missing", ""))[:MAX_TEXT], is_permission_error="PermissionError" in raised.get("causes", ())
    )
    kernel_errors.set_remote_message(
        error, f"{str(raised.get('told'))[:MAX_TEXT]}{running.denial}{running.format_output()}"
    )
    raise error


def rebuild_exception(name: str, kinds: list[Any], message: str) -> Exception:
    """Return an exception with the same name and built-in base type as the kernel's, without code of the kernel.

    Args:
      kinds: the names of the type's built-in base types, most specific first.
    """
    known = (vars(builtins).get(kind) for kind in kinds if isinstance(kind, str))
    bases = [kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception)]
    for base in (*bases, RuntimeError):
        kind = base if base.__name__ == name else type(name[:80] if name.isidentifier() else "KernelError", (base,), {})
        with contextlib.suppress(TypeError):  # some exception types need more arguments than a message
            return kind(message)
    raise AssertionError("RuntimeError takes a message")
