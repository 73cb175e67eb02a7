"""The process above a kernel's: it ends whatever the kernel has started and let go of, once the kernel is gone.

A process whose parent has ended gets another parent: the nearest above it that asks for such (`prctl(2)`,
PR_SET_CHILD_SUBREAPER), which is this one. So nothing that the kernel starts gets out of reach, whatever session it
makes its own. Only Linux has this; elsewhere there is no process in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

IS_AVAILABLE = sys.platform.startswith("linux")
_TAKE_ORPHANS = 36


def start_supervised(pipes: Sequence[int]) -> None:
    """Go on in a child, which has these pipes for itself; the process that was called stays, and ends as that does."""
    if not IS_AVAILABLE:
        return
    ctypes.CDLL(None).prctl(_TAKE_ORPHANS, 1, 0, 0, 0)
    asked_to_end = signal.signal(signal.SIGTERM, _end)
    kernel = os.fork()
    if kernel == 0:
        signal.signal(signal.SIGTERM, asked_to_end)
        return
    for pipe in (*pipes, 0, 1, 2):
        os.close(pipe)  # the judge must see when the kernel closes its own
    _wait(kernel)


def list_children(process: int) -> list[int]:
    """The children of a process, in the order in which they came; none where the system does not say."""
    with contextlib.suppress(OSError, ValueError):
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def _wait(kernel: int) -> NoReturn:
    while True:
        ended, status = os.wait()  # others are orphans
        if ended == kernel:
            break
    _end_the_rest()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the kernel may have left one
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _end_the_rest()
    os.killpg(os.getpid(), signal.SIGKILL)  # also where the system does not say what is below
    os._exit(128 + number)


def _end_the_rest() -> None:
    """Kill all that is below; the children of what is killed come here, until there are none.

    What starts another and ends can be faster than this, over and over. So nothing is waited for, nothing is listed
    that has ended already, and the youngest come first.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what ends from now on is gone at once
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    before: list[int] = []
    while below := list_children(os.getpid()):
        for process in reversed(below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if below == before:  # killed, and not gone yet
            time.sleep(0.001)
        before = below
