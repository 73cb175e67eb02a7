"""Ctrl-C that is not lost: JAX's callbacks and many a kernel's `except` turn `KeyboardInterrupt` into another error."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_pressed = False


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Within it, Ctrl-C raises `KeyboardInterrupt` as ever, and `check` raises it again if that got lost."""
    global _pressed
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    _pressed = False
    signal.signal(signal.SIGINT, _on_signal)
    try:
        yield
    finally:
        _pressed = False
        if signal.getsignal(signal.SIGINT) is _on_signal:  # not where the body has it ignored from now on
            signal.signal(signal.SIGINT, signal.default_int_handler)


def check() -> None:
    """Raise `KeyboardInterrupt` if Ctrl-C was pressed within `remembered`."""
    if _pressed:
        raise KeyboardInterrupt


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _pressed
    _pressed = True
    signal.default_int_handler(number, frame)
