"""Worker processes, and what becomes of a task that takes its process down.

Each worker has one task at a time, over a pipe of its own. So it is known which task was under way in a process that
died, and nothing is shared that a dying process could leave locked. Such a task is done again at the end, in its
parts and alone; one that kills its process once more is lost, and costs only itself.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from conformance import interrupts, packages
from conformance.fork_server.forked_process import ForkedProcess
from conformance.sandbox import kernel_process, scratch_folder

Task = TypeVar("Task")
Result = TypeVar("Result")
# Seconds that workers may take to end, with the processes of their kernels, before they are killed.
_END_SECONDS = 10.0
_END_SECONDS_AFTER_SIGNAL = 4.0


def run_tasks(
    tasks: Iterable[Task],
    workers: int,
    do: Callable[[Task], Result],
    *,
    heard: Callable[[Task, Result], None],
    parts: Callable[[Task], Iterable[Task]],
    lost: Callable[[Task], None],
) -> None:
    """Do `tasks` in `workers` processes. Ctrl-C stops the workers at once, and so does what `do` or `heard` raises.

    Args:
      tasks: what to do, in this order.
      workers: how many processes.
      do: what a process does with a task. Both travel between processes, and so does what it returns or raises.
      heard: hears of each task as it ends.
      parts: the tasks that one is made of, which are done alone after a process died on it.
      lost: hears of a task that kills its process even alone.
    """
    deadly = _run_in_workers(tasks, workers, do, heard)
    for task in _run_in_workers([part for one in deadly for part in parts(one)], 1, do, heard):
        lost(task)


@dataclasses.dataclass
class _Worker(Generic[Task]):
    """A process, our end of its pipe, and what it is doing."""

    process: ForkedProcess
    pipe: Connection
    task: Task


def _run_in_workers(
    tasks: Iterable[Task], workers: int, do: Callable[[Task], Result], heard: Callable[[Task, Result], None]
) -> list[Task]:
    """Do tasks; returns those that their processes died of."""
    waiting = collections.deque(tasks)
    busy: list[_Worker[Task]] = []
    idle: list[_Worker[Task]] = []
    fatal: list[Task] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                busy.append(_start_worker(waiting.popleft(), do))
            ready = _wait_for_workers(busy)
            interrupts.raise_if_stopped()
            for worker in ready:
                task = worker.task
                answer = _receive_answer(worker)
                if answer is None:
                    busy.remove(worker)
                    _end_worker(worker, time.monotonic() + _END_SECONDS)
                    fatal.append(task)
                    continue
                raised, found = answer
                if raised:
                    raise found
                if waiting:
                    worker.task = waiting.popleft()
                    _send_task(worker, do)
                else:
                    busy.remove(worker)
                    idle.append(worker)
                heard(task, found)
    finally:
        with interrupts.delay_signals():
            for worker in busy:
                worker.process.signal(signal.SIGTERM)
            seconds = _END_SECONDS if interrupts.get_received_signal() is None else _END_SECONDS_AFTER_SIGNAL
            until = time.monotonic() + seconds
            for worker in (*busy, *idle):
                _end_worker(worker, until)
    return fatal


def _wait_for_workers(busy: Sequence[_Worker[Task]]) -> list[_Worker[Task]]:
    """The workers that have answered or died, once there is one."""
    while True:
        connection.wait([x for worker in busy for x in (worker.pipe, worker.process.sentinel)])
        if found := [worker for worker in busy if worker.pipe.poll() or worker.process.wait(0) is not None]:
            return found


def _receive_answer(worker: _Worker[Task]) -> tuple[bool, Any] | None:
    """Whether its task raised, and what came of it; None if the worker died."""
    if not worker.pipe.poll():
        return None  # what it started lives on, and holds its end of the pipe
    try:
        answer: tuple[bool, Any] = worker.pipe.recv()
    except (EOFError, OSError):
        return None
    return answer


def _start_worker(task: Task, do: Callable[[Task], Result]) -> _Worker[Task]:
    """A new worker, at work on this."""
    ours, theirs = Pipe()
    with theirs:  # the worker's death must be seen at our end
        process = ForkedProcess(_serve, tuple(sys.path), pass_fds=[theirs.fileno()], may_fork=True)
    worker = _Worker(process, ours, task)
    _send_task(worker, do)
    return worker


def _send_task(worker: _Worker[Task], do: Callable[[Task], Result]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it died, as whoever listens to it will hear
        worker.pipe.send((do, worker.task))


def _end_worker(worker: _Worker[Task], until: float) -> None:
    """End a process that has died, has been told to, or has no more to do, which it sees by its pipe."""
    worker.pipe.close()
    if worker.process.wait(max(0.0, until - time.monotonic())) is None:
        worker.process.signal(signal.SIGKILL)
        worker.process.wait()
        scratch_folder.remove_abandoned_folders()
    worker.process.release()


def _serve(pipe: int, path: Sequence[str]) -> None:
    """Do one task after another, until there are no more or a signal ends the worker."""
    packages.claim_names()
    sys.path[:] = path  # the user's modules are found as in the process that judges
    with interrupts.record_signals():
        with interrupts.end_on_signal():
            _do_tasks(pipe)
        kernel_process.end_all_processes()  # also where a signal ends this process: they have scratch folders


def _do_tasks(pipe: int) -> None:
    tasks = Connection(pipe)
    while True:
        try:
            do, task = tasks.recv()
        except EOFError:
            return
        try:
            answer = False, do(task)
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            answer = True, error
        tasks.send(answer)
