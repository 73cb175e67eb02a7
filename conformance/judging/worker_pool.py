"""Run tasks in worker processes, and survive tasks that kill their process.

Each worker has one task at a time, and its own pipe. So the task that killed a process is known, and processes share
nothing that a dying one could leave locked. At the end, a task that killed its process is split into parts, which run
one at a time. Only a part that kills its process again is lost.
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

from conformance import interrupts, packages, temporary_folders
from conformance.fork_server.forked_process import ForkedProcess
from conformance.sandbox import kernel_process

Task = TypeVar("Task")
Result = TypeVar("Result")
# Seconds that workers, and the kernels' processes that they started, may take to end before they are killed.
_END_SECONDS = 10.0
_END_SECONDS_AFTER_SIGNAL = 4.0


def run_tasks(
    tasks: Iterable[Task],
    workers: int,
    do: Callable[[Task], Result],
    *,
    on_result: Callable[[Task, Result], None],
    split: Callable[[Task], Iterable[Task]],
    on_lost: Callable[[Task], None],
) -> None:
    """Run `tasks` in `workers` processes.

    Ctrl-C stops the workers at once, and so does an exception of `do` or `on_result`.

    Args:
      do: the function that a worker calls with a task. The function, the task, its result and its exception are
        pickled.
      split: returns the parts of a task that killed its process. The parts run one at a time.
      on_lost: called with a part that kills its process again.
    """
    fatal = _run_in_workers(tasks, workers, do, on_result)
    for task in _run_in_workers([part for one in fatal for part in split(one)], 1, do, on_result):
        on_lost(task)


@dataclasses.dataclass
class _Worker(Generic[Task]):
    """A worker process, the judge's end of its pipe, and the task that the worker runs."""

    process: ForkedProcess
    pipe: Connection
    task: Task


def _run_in_workers(
    tasks: Iterable[Task], workers: int, do: Callable[[Task], Result], on_result: Callable[[Task, Result], None]
) -> list[Task]:
    """Run tasks in so many worker processes, and return the tasks that killed their process."""
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
                raised, result = answer
                if raised:
                    raise result
                if waiting:
                    worker.task = waiting.popleft()
                    _send_task(worker, do)
                else:
                    busy.remove(worker)
                    idle.append(worker)
                on_result(task, result)
    finally:
        with interrupts.delay_signals():
            for worker in busy:
                worker.process.signal(signal.SIGTERM)
            seconds = _END_SECONDS if interrupts.get_received_signal() is None else _END_SECONDS_AFTER_SIGNAL
            deadline = time.monotonic() + seconds
            for worker in (*busy, *idle):
                _end_worker(worker, deadline)
    return fatal


def _wait_for_workers(busy: Sequence[_Worker[Task]]) -> list[_Worker[Task]]:
    """Wait until workers have answered or died, and return them."""
    while True:
        connection.wait([x for worker in busy for x in (worker.pipe, worker.process.sentinel)])
        if ready := [worker for worker in busy if worker.pipe.poll() or worker.process.wait(0) is not None]:
            return ready


def _receive_answer(worker: _Worker[Task]) -> tuple[bool, Any] | None:
    """Return whether the task raised, and its result or exception; None if the worker died."""
    if not worker.pipe.poll():
        return None  # the worker is dead, but a process that it started still holds the pipe open
    try:
        answer: tuple[bool, Any] = worker.pipe.recv()
    except (EOFError, OSError):
        return None
    return answer


def _start_worker(task: Task, do: Callable[[Task], Result]) -> _Worker[Task]:
    """Start a worker process and send it its first task."""
    this_end, worker_end = Pipe()
    with worker_end:  # close this copy of the worker's end: otherwise the pipe would stay open after the worker's death
        process = ForkedProcess(_serve, tuple(sys.path), pass_fds=[worker_end.fileno()], may_fork=True)
    worker = _Worker(process, this_end, task)
    _send_task(worker, do)
    return worker


def _send_task(worker: _Worker[Task], do: Callable[[Task], Result]) -> None:
    """Send a worker its task."""
    with contextlib.suppress(BrokenPipeError):  # the worker died, which the caller notices at its next wait
        worker.pipe.send((do, worker.task))


def _end_worker(worker: _Worker[Task], deadline: float) -> None:
    """Wait until the deadline for a worker's process to end, which closing its pipe requests, then kill it."""
    worker.pipe.close()
    if worker.process.wait(max(0.0, deadline - time.monotonic())) is None:
        worker.process.signal(signal.SIGKILL)
        worker.process.wait()
        temporary_folders.remove_abandoned_folders()
    worker.process.release()


def _serve(pipe: int, path: Sequence[str]) -> None:
    """Run tasks from a pipe as a worker process's main function, until the pipe is closed or a signal arrives."""
    packages.claim_names()
    sys.path[:] = path  # find the user's modules in the same folders as the judge's process
    with interrupts.record_signals():
        with interrupts.end_on_signal():
            _do_tasks(pipe)
        kernel_process.end_all_processes()  # also after a signal, so that their scratch folders are removed


def _do_tasks(pipe: int) -> None:
    """Receive tasks, run them and send the results, until the pipe is closed."""
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
