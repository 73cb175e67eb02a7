"""An alarm that cuts off what takes longer than it may."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from conformance.sandbox.kernel_process import ProcessLost

_MIN_SECONDS, _REPEAT_SECONDS = 1e-3, 1.0  # seconds until an alarm rings at the earliest, and until it rings once more


class DeadlineExceeded(ProcessLost):
    """What was done took longer than it may: whatever was asked of a kernel's process, the process is ended."""


@contextlib.contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Within it, `Overdue` is raised when so many seconds are over: at once where another process is waited for.

    Elsewhere it is raised at the next step of Python, and again and again where it gets lost. Only the main thread can
    be interrupted so. An alarm that others have set rings late by no more than the time within.
    """
    if math.isinf(seconds) or threading.current_thread() is not threading.main_thread():
        yield
        return
    rung = within = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        rung = True
        if within:
            raise DeadlineExceeded

    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            within = True
            theirs, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, _MIN_SECONDS), _REPEAT_SECONDS)
            yield
        finally:
            within = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if theirs:
            signal.setitimer(signal.ITIMER_REAL, max(theirs - (time.monotonic() - started), _MIN_SECONDS))
    if rung:
        raise DeadlineExceeded
