"""Cut off what takes longer than it may, by an alarm signal."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from conformance.sandbox.kernel_process import ProcessLost

_MIN_SECONDS, _REPEAT_SECONDS = 1e-3, 1.0  # seconds until an alarm rings at the earliest, and between repetitions


class DeadlineExceeded(ProcessLost):
    """The block took longer than it may. If it waited for a kernel's process, that process is ended."""


@contextlib.contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise `DeadlineExceeded` in the block after so many seconds: at once if another process is waited for.

    Otherwise it is raised at the next step of Python, and again each second in case it was swallowed. Only the main
    thread can be interrupted this way. An alarm that other code has set rings late, by no more than the time in the
    block.
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
