"""Supervise a kernel's process from the process above it: enforce its limits, and end all that it started.

A process whose parent has ended gets another parent: the nearest ancestor that asks for such orphans (`prctl(2)`,
PR_SET_CHILD_SUBREAPER). The supervisor asks for them. So nothing that the kernel starts gets out of reach, whatever
session it makes its own. Only Linux has this; elsewhere a kernel's process has no supervisor.

The supervisor is not confined. It measures memory and files all the time, also while the judge does something else. If
the judge was killed, it removes the scratch folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from conformance.sandbox import scratch_folder
from conformance.sandbox.resource_usage import OverLimit, UsageMonitor, list_children

IS_AVAILABLE = sys.platform.startswith("linux")
END_SIGNAL = signal.SIGUSR1
"""Ends the kernel for a judge that removes the scratch folder itself. After SIGTERM the supervisor removes it."""
_PR_SET_CHILD_SUBREAPER = 36
_POLL_INTERVAL = 0.1  # seconds
_JUDGE_END_SECONDS = 0.2  # seconds from when the pipes of a killed judge close one after the other
_MAX_OPEN_FILES = 4096


def start_supervised(pipes: Sequence[int], status: int, scratch: str, memory: int) -> None:
    """Fork: return in the child, where the kernel will run, and supervise it in this process.

    The supervisor ends as the kernel's process ends.

    Args:
      pipes: what the child alone keeps.
      status: a pipe that the supervisor alone keeps. It writes there which limit was passed.
      scratch: the scratch folder.
      memory: bytes of memory and files that the kernel's processes may hold together; zero for no limit.
    """
    if not IS_AVAILABLE:
        os.close(status)
        _limit_resources(memory)
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def end_for_judge(number: int, frame: FrameType | None) -> NoReturn:
        _end_all()

    def end_and_remove(number: int, frame: FrameType | None) -> NoReturn:
        _kill_descendants()
        scratch_folder.remove_folder(scratch)
        _end_all()

    before = {END_SIGNAL: signal.signal(END_SIGNAL, end_for_judge)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, end_and_remove)
    kernel = os.fork()
    if kernel == 0:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(status)
        _limit_resources(memory)
        return
    for pipe in (*pipes, 0, 1, 2):
        os.close(pipe)  # the judge must see when the kernel closes its own
    _supervise(kernel, status, scratch, memory)


def _limit_resources(memory: int) -> None:
    """Set the limits of this process that the system enforces by itself, and that what it starts inherits."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: _MAX_OPEN_FILES}
    if memory:
        limits[resource.RLIMIT_FSIZE] = memory
    if IS_AVAILABLE:
        limits[resource.RLIMIT_MSGQUEUE] = 0
    for name, limit in limits.items():
        with contextlib.suppress(OSError, ValueError):
            soft, hard = resource.getrlimit(name)
            resource.setrlimit(name, (_lower(limit, soft), _lower(limit, hard)))


def _lower(limit: int, current: int) -> int:
    return limit if current == resource.RLIM_INFINITY else min(limit, current)


def _supervise(kernel: int, status: int, scratch: str, memory: int) -> NoReturn:
    """Check limits until the kernel's process ends, then end likewise."""
    monitor = UsageMonitor(os.getpid(), scratch, memory)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while (ended := _reap(kernel)) is None:
        try:
            monitor.check()
        except OverLimit as error:
            with contextlib.suppress(OSError):  # the judge has ended
                os.write(status, str(error).encode())
            _kill_descendants()
            _remove_for_ended_judge(status, scratch)
            os._exit(1)
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_INTERVAL)
    _kill_descendants()
    _remove_for_ended_judge(status, scratch)
    code = os.waitstatus_to_exitcode(ended)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _reap(kernel: int) -> int | None:
    """Collect children that have ended, orphans too; return the kernel's status if it is among them."""
    while True:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == kernel:
            return status
        if process == 0:
            return None


def _remove_for_ended_judge(status: int, scratch: str) -> None:
    """Remove the scratch folder if nobody reads the status any more: the judge was killed."""
    watched = select.poll()
    watched.register(status, 0)
    if watched.poll(_JUDGE_END_SECONDS * 1000):
        scratch_folder.remove_folder(scratch)


def _end_all() -> NoReturn:
    _kill_descendants()
    os.killpg(os.getpid(), signal.SIGKILL)  # also where the system does not list descendants
    os._exit(1)


def _kill_descendants() -> None:
    """Kill all descendants. The children of what is killed become children of this process, until there are none.

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
