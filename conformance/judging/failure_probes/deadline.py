"""Interrupt a block of code that takes longer than its time limit, by an alarm signal (SIGALRM)."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from conformance.sandbox.kernel_process import ProcessLost

_MIN_SECONDS, _REPEAT_SECONDS = 1e-3, 1.0  # the shortest time until the alarm, and the time between its repetitions


class DeadlineExceeded(ProcessLost):
    """Raised if a block exceeds its time limit.

    As a `ProcessLost`, it makes code that waits for a kernel's process end this process.
    """


@contextlib.contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise `DeadlineExceeded` in the block of this context manager after so many seconds.

    If the block waits for another process, the exception comes at once. Otherwise it comes when the interpreter runs
    the next bytecode, and again each second in case the block swallowed it. Only the main thread can be interrupted
    this way. If other code has set an alarm, it comes late, by no more than the time spent in the block.
    """
    if math.isinf(seconds) or threading.current_thread() is not threading.main_thread():
        yield
        return
    has_rung = is_within = False

    def handle_alarm(number: int, frame: FrameType | None) -> None:
        nonlocal has_rung
        has_rung = True
        if is_within:
            raise DeadlineExceeded

    started = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, handle_alarm)
    try:
        try:
            is_within = True
            other_alarm, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, _MIN_SECONDS), _REPEAT_SECONDS)
            yield
        finally:
            is_within = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        if other_alarm:
            signal.setitimer(signal.ITIMER_REAL, max(other_alarm - (time.monotonic() - started), _MIN_SECONDS))
    if has_rung:
        raise DeadlineExceeded
