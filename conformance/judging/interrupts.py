"""Signals that stop a run, and are not lost: Ctrl-C, and what ends a job or a session.

JAX's callbacks and many a kernel's `except` turn `KeyboardInterrupt` into another error. SIGTERM and SIGHUP would end
the process where it stands; here they stop a run as Ctrl-C does, so that what was judged is written down.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULTS = (signal.default_int_handler, signal.SIG_DFL)
_pressed = False


@contextlib.contextmanager
def remembered(*, last: bool = False) -> Iterator[None]:
    """Within it, a signal that stops the run raises `KeyboardInterrupt`, and `check` raises it again if that got lost.

    Where Python itself must drop it, as while it collects garbage, nothing is printed of that.
    Signals that somebody else handles, or that are ignored, are left alone. With `last`, the process only ends after
    it, and no signal of these says anything about that.
    """
    global _pressed
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _STOPPING}
    ours = [number for number, handler in before.items() if handler in _DEFAULTS]
    _pressed = False
    hook = sys.unraisablehook

    def on_unraisable(dropped: sys.UnraisableHookArgs) -> None:
        if not (_pressed and issubclass(dropped.exc_type, KeyboardInterrupt)):
            hook(dropped)

    for number in ours:
        signal.signal(number, _on_signal)
    sys.unraisablehook = on_unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
        _pressed = False
        for number in ours:
            if signal.getsignal(number) in (_on_signal, signal.SIG_IGN):  # by this, or by `ignore`
                signal.signal(number, signal.SIG_IGN if last else before[number])


def check() -> None:
    """Raise `KeyboardInterrupt` if a signal stopped the run within `remembered`."""
    if _pressed:
        raise KeyboardInterrupt


def ignore() -> None:
    """Until the end of `remembered` nothing stops the run any more: what was judged gets written."""
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """After `ignore`, a signal of these ends what is done within it, and nothing more."""
    global _pressed
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _STOPPING}
    for number, handler in before.items():
        if handler == signal.SIG_IGN:
            signal.signal(number, _on_signal)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        _pressed = False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within it, signals that stop the run wait: what is done there is done whole. For moments only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    before = {number: signal.getsignal(number) for number in _STOPPING}
    # Not by a mask of signals: another thread would take the signal, and Python handles it in this one all the same.
    theirs = {number: handler for number, handler in before.items() if callable(handler) or handler == signal.SIG_DFL}
    for number in theirs:
        signal.signal(number, lambda signalled, frame: waiting.append(signalled))
    try:
        yield
    finally:
        for number, handler in theirs.items():
            signal.signal(number, handler)
        for signalled in waiting:
            signal.raise_signal(signalled)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _pressed
    _pressed = True
    signal.default_int_handler(number, frame)
