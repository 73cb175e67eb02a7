"""Supervise a kernel's process from its parent process: enforce its limits, and end all that it started.

When the parent of a process ends, the process gets a new parent: the nearest ancestor that is a subreaper (`prctl(2)`,
PR_SET_CHILD_SUBREAPER). The supervisor is a subreaper. So no process that the kernel starts can escape the supervisor,
even in a session of its own. Only Linux has subreapers; on other systems a kernel's process has no supervisor.

The supervisor is not confined. It measures memory and files ten times a second, also while the judge is busy. It
removes the scratch folder if the judge was killed.
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

from conformance import temporary_folders
from conformance.sandbox.resource_usage import OverLimit, UsageMonitor, list_children

IS_AVAILABLE = sys.platform.startswith("linux")
END_SIGNAL = signal.SIGUSR1
"""The signal that makes the supervisor end the kernel. After SIGTERM, it also removes the scratch folder."""
_PR_SET_CHILD_SUBREAPER = 36
_POLL_INTERVAL = 0.1  # seconds
_JUDGE_END_SECONDS = 0.2  # within this time, the system closes all pipes of a killed judge
_MAX_OPEN_FILES = 4096


def start_supervised(pipes: Sequence[int], status: int, scratch: str, memory: int) -> None:
    """Fork this process: return in the child, which will run the kernel, and supervise the child in the parent.

    The supervisor ends in the same way as the kernel's process: with the same exit code, or by the same signal. On
    systems without supervisor, this only sets resource limits.

    Args:
      pipes: descriptors that only the child keeps.
      status: a pipe that only the supervisor keeps, to which it writes the limit that was exceeded.
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
        temporary_folders.remove_folder(scratch)
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
        os.close(pipe)  # otherwise the judge could not notice that the kernel's process has closed them
    _supervise(kernel, status, scratch, memory)


def _limit_resources(memory: int) -> None:
    """Set resource limits that the system enforces, for this process and for all that it starts."""
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
    """Check limits until the kernel's process ends, then end this process with the same exit code or signal."""
    monitor = UsageMonitor(os.getpid(), scratch, memory)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while (ended := _reap(kernel)) is None:
        try:
            monitor.check()
        except OverLimit as error:
            with contextlib.suppress(OSError):  # the judge has ended and no longer reads
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
    with contextlib.suppress(OSError):  # the handler of SIGKILL cannot be set
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _reap(kernel: int) -> int | None:
    """Reap ended children, also adopted ones; return the kernel process's wait status, or None if it still runs."""
    while True:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == kernel:
            return status
        if process == 0:
            return None


def _remove_for_ended_judge(status: int, scratch: str) -> None:
    """Remove the scratch folder if the judge was killed, which shows in the status pipe: it has no reader."""
    poller = select.poll()
    poller.register(status, 0)
    if poller.poll(_JUDGE_END_SECONDS * 1000):
        temporary_folders.remove_folder(scratch)


def _end_all() -> NoReturn:
    _kill_descendants()
    os.killpg(os.getpid(), signal.SIGKILL)  # for systems that do not list descendants of a process
    os._exit(1)


def _kill_descendants() -> None:
    """Kill all descendants of this process.

    Children of a killed process become children of this one, and are killed in the next round. A chain of processes
    that each start another one and end could be faster than this loop. So the loop waits for nothing, ended processes
    are not listed, and the youngest are killed first.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # from here on, ended children leave no zombies
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    before: list[int] = []
    while below := list_children(os.getpid()):
        for process in reversed(below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if below == before:  # the same processes as before: they are killed but have not ended yet
            time.sleep(0.001)
        before = below
