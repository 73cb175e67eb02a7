"""Stop a command on SIGINT, SIGTERM or SIGHUP, without losing the signal.

`KeyboardInterrupt` alone gets lost: Python drops it in callbacks of the garbage collector and of imports, and JAX and
many a kernel's `except` turn it into another error. So a handler records the first signal, and nothing resets that
while the command runs. Inside `stoppable` the handler also raises `KeyboardInterrupt`, and a thread sends the signal
again until the block has ended. Outside it signals are only recorded. `resolve_exit_code` reports them at the end.

Every command goes by this: `run`, `explore`, `sensitivity`, their workers, and the pytest gate.
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
_REPEAT_SECONDS = 2.0  # seconds after which a signal that has stopped nothing is raised again


@dataclasses.dataclass
class _HandlerState:
    """State of the signal handler: what it has received, and what it does about it."""

    received: int = 0
    listening: bool = False
    raising: bool = False
    held: int = 0
    leave: Callable[[], None] | None = None
    raised_at: float = -math.inf


_state = _HandlerState()
_repeating = threading.Lock()  # held while a signal is sent again, so that none is sent after `listening`


@contextlib.contextmanager
def record_signals() -> Iterator[None]:
    """Record stop signals within the block, and restore the handlers after it.

    Signals that are ignored, or that somebody else handles, are left alone. Inside another such block this restores
    what that one does about signals. It does nothing outside the main thread, which alone gets signals.
    """
    global _state
    if not _is_main_thread():
        yield
        return
    if _state.listening:
        raising, leave = _state.raising, _state.leave
        try:
            yield
        finally:  # a command that a test of the gate runs has finished, and the gate has not
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
    # Without the thread, where there can be no other, a signal that gets lost waits for `check`.
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
    """Have a stop signal outside `stoppable` call `leave` and end the process at once; None has it recorded only.

    For a process that loads what it needs, which takes seconds and must not be interrupted, and has nothing to write.
    """
    _state.leave = leave
    if leave is not None and _state.received:
        leave()
        os._exit(128 + _state.received)


class _Raising:
    """Has the handler raise."""

    def __init__(self) -> None:
        self._before = False

    def __enter__(self) -> None:
        self._before, _state.raising = _state.raising, True


class raise_on_signal(_Raising):  # noqa: N801 -- a context manager, as those of contextlib are
    """Raise `KeyboardInterrupt` in the block when a stop signal arrives, or at `check` if one has arrived before."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.raising = self._before


class end_on_signal(_Raising):  # noqa: N801 -- as above
    """Do the block until a stop signal arrives; the code after the block goes on."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        _state.raising = self._before
        return kind is not None and issubclass(kind, KeyboardInterrupt)


@contextlib.contextmanager
def delay_signals() -> Iterator[None]:
    """Let the block end before a stop signal raises `KeyboardInterrupt`. For short blocks that must not be cut."""
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
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
    raise_if_stopped()


def raise_if_stopped() -> None:
    """Raise `KeyboardInterrupt` inside `stoppable` if a stop signal has arrived."""
    if _state.received and _state.listening and _state.raising and not _state.held and _is_main_thread():
        raise KeyboardInterrupt


def stop_raising() -> None:
    """Record signals only, until the next `stoppable`: what was judged is written whole."""
    _state.raising, _state.leave = False, None


def get_received_signal() -> signal.Signals | None:
    """Return the first stop signal that arrived within `listening`."""
    return signal.Signals(_state.received) if _state.received else None


def resolve_exit_code(code: int) -> int:
    """Return 128 and the number of the signal that stopped the command, or `code` if none did."""
    return 128 + _state.received if _state.received else code


def describe_signal() -> str:
    """Say in a few words what stopped the command."""
    found = get_received_signal()
    return f"stopped by {found.name}" if found is not None else "it was stopped"


def ignore_signals() -> None:
    """Ignore stop signals until the process ends, which has nothing left to do."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _handle_signal(number: int, frame: FrameType | None) -> None:
    if not _state.received:
        _state.received = number
    if _state.leave is not None and not _state.raising and not _state.held:
        _state.leave()
        os._exit(128 + _state.received)
    # Two signals in a row, as a CI service sends them, must not cut off what handles the first.
    if _state.raising and not _state.held and time.monotonic() - _state.raised_at >= _REPEAT_SECONDS:
        _state.raised_at = time.monotonic()
        raise KeyboardInterrupt


def _resend_signal(ended: threading.Event) -> None:
    """Send the signal to the main thread again while it should have stopped and has not."""
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
