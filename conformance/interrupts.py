"""Stop a command on SIGINT, SIGTERM or SIGHUP, without losing the signal.

Raising `KeyboardInterrupt` is not enough, since the exception can get lost. Python drops it in callbacks of the garbage
collector and of imports. JAX and the `except` clauses of many kernels turn it into another error. So a handler records
the first signal, and nothing resets it while the command runs. Inside `raise_on_signal` the handler also raises
`KeyboardInterrupt`, and a thread sends the signal again until the block has ended. Outside of such a block signals are
only recorded. `resolve_exit_code` turns a recorded signal into the exit code.

These use it: the commands `run`, `explore` and `sensitivity`, their workers, and the pytest gate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULT_HANDLERS = (signal.default_int_handler, signal.SIG_DFL)
_REPEAT_SECONDS = 2.0  # a signal without effect is raised again after this time


@dataclasses.dataclass
class _HandlerState:
    """State of the signal handler: the received signal, and how the handler reacts to signals."""

    received: int = 0  # the number of the first stop signal; 0 before one has arrived
    listening: bool = False  # whether `record_signals` has installed the handler
    raising: bool = False  # whether the handler raises `KeyboardInterrupt`, as in `raise_on_signal`
    held: int = 0  # the number of nested `delay_signals` blocks; above 0 nothing is raised
    # A function that the handler calls before it ends the process (`set_early_exit`); None to go on.
    leave: Callable[[], None] | None = None
    raised_at: float = -math.inf  # the time, by `time.monotonic`, when the handler last raised


_state = _HandlerState()
_repeating = threading.Lock()  # held while a signal is sent again, so that `record_signals` can wait for that


@contextlib.contextmanager
def record_signals() -> Iterator[None]:
    """Record stop signals within the block, and restore the handlers after it.

    A signal that is ignored, or that another library handles, is left alone. A nested block leaves the handlers in
    place, and at its end restores how the outer block reacts to signals. Outside the main thread the block does
    nothing, since signals arrive only in the main thread.
    """
    global _state
    if not _is_main_thread():
        yield
        return
    if _state.listening:
        raising, leave = _state.raising, _state.leave
        try:
            yield
        finally:  # a test under the gate may run a command, and the gate continues after that
            _state.raising, _state.leave = raising, leave
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    ours = [number for number, handler in before.items() if handler in _DEFAULT_HANDLERS]
    hook, ended = sys.unraisablehook, threading.Event()

    def on_unraisable(dropped: sys.UnraisableHookArgs) -> None:
        if not (_state.received and issubclass(dropped.exc_type, KeyboardInterrupt)):
            hook(dropped)

    _state = _HandlerState(listening=True)
    sys.unraisablehook = on_unraisable
    for number in ours:
        signal.signal(number, _handle_signal)
    # If no thread can be started, a lost signal has its effect at the next `raise_if_stopped`.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=_resend_signal, args=(ended,), daemon=True).start()
    try:
        yield
    finally:
        _state.raising, _state.leave = False, None
        ended.set()
        with _repeating:  # from here on the thread sends nothing
            pass
        for number in ours:
            if signal.getsignal(number) is _handle_signal:
                signal.signal(number, before[number])
        sys.unraisablehook = hook
        _state.listening = False


def set_early_exit(leave: Callable[[], None] | None) -> None:
    """Make a stop signal outside `raise_on_signal` call `leave` and end the process; None makes it only record.

    This is for a process that still loads its modules. Loading takes seconds, an exception must not interrupt it, and
    there are no results to write yet.
    """
    _state.leave = leave
    if leave is not None and _state.received:
        leave()
        os._exit(128 + _state.received)


class _Raising:
    """Context manager that makes the signal handler raise `KeyboardInterrupt` within the block."""

    def __init__(self) -> None:
        self._before = False

    def __enter__(self) -> None:
        self._before, _state.raising = _state.raising, True


class raise_on_signal(_Raising):  # noqa: N801 -- a context manager in lower case, like those of contextlib
    """Raise `KeyboardInterrupt` in the block when a stop signal arrives; `raise_if_stopped` raises earlier ones."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.raising = self._before


class end_on_signal(_Raising):  # noqa: N801 -- a context manager in lower case, like those of contextlib
    """End the block when a stop signal arrives, and continue after it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        _state.raising = self._before
        return kind is not None and issubclass(kind, KeyboardInterrupt)


@contextlib.contextmanager
def delay_signals() -> Iterator[None]:
    """Delay `KeyboardInterrupt` to the end of a short block; signals that came before the block raise nothing."""
    if not _is_main_thread():
        yield
        return
    if not _state.listening:
        with record_signals():
            yield
        received = _state.received
        _state.received = 0
        if received:
            raise KeyboardInterrupt
        return
    received = _state.received
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
    if not received:
        raise_if_stopped()


def raise_if_stopped() -> None:
    """Raise `KeyboardInterrupt` inside `raise_on_signal` if a stop signal has arrived."""
    if _state.received and _state.listening and _state.raising and not _state.held and _is_main_thread():
        raise KeyboardInterrupt


def stop_raising() -> None:
    """From here to the next `raise_on_signal`, only record signals, so that writing results is not interrupted."""
    _state.raising, _state.leave = False, None


def get_received_signal() -> signal.Signals | None:
    """Return the first stop signal that arrived within `record_signals`."""
    return signal.Signals(_state.received) if _state.received else None


def resolve_exit_code(code: int) -> int:
    """Return 128 plus the number of the signal that stopped the command, or `code` if none did."""
    return 128 + _state.received if _state.received else code


def describe_signal() -> str:
    """Return a short phrase that names the signal that stopped the command."""
    found = get_received_signal()
    return f"stopped by {found.name}" if found is not None else "it was stopped"


def ignore_signals() -> None:
    """Ignore stop signals from here to the end of the process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    if not _state.received:
        _state.received = number
    if _state.leave is not None and not _state.raising and not _state.held:
        _state.leave()
        os._exit(128 + _state.received)
    # A CI service sends two signals in a row. The second must not interrupt the code that handles the first.
    if _state.raising and not _state.held and time.monotonic() - _state.raised_at >= _REPEAT_SECONDS:
        _state.raised_at = time.monotonic()
        raise KeyboardInterrupt


def _resend_signal(ended: threading.Event) -> None:
    """Send a signal to the main thread again until it has raised `KeyboardInterrupt`."""
    main = threading.main_thread().ident
    assert main is not None
    while not ended.wait(_REPEAT_SECONDS / 4):
        with _repeating:
            lost = _state.received and _state.raising and time.monotonic() - _state.raised_at >= _REPEAT_SECONDS
            if lost and not ended.is_set() and signal.getsignal(_state.received) is _handle_signal:
                with contextlib.suppress(ProcessLookupError):
                    signal.pthread_kill(main, _state.received)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
