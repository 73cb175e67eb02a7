"""Define pools that run tasks: worker processes of this machine, or any `concurrent.futures` executor.

Whoever has tasks (judging jobs, examining planted bugs, exploring) takes a `TaskPool` and does not depend on where the
tasks run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from conformance import interrupts
from conformance.judging import worker_pool
from conformance.judging.remote_call import Conditions, call_remotely, pack_call

Task = TypeVar("Task")
Result = TypeVar("Result")
_QUEUED_PER_WORKER = 2  # tasks in flight for each worker: one runs, and the next waits beside it
_WAKE_SECONDS = 1.0  # how often lost workers and stop signals are looked for while nothing finishes
_NO_WORKER_SECONDS = 120.0  # a cluster without any worker for this long is given up: a restart takes some seconds


class ExecutorFailed(Exception):
    """An executor cannot run tasks any more; the message is one line."""


class TaskPool(Protocol):
    """An object that runs tasks in other processes, and survives tasks that kill their process."""

    @property
    def is_remote(self) -> bool:
        """Whether tasks may run on another machine or under another version. Then results must be plain data."""

    @property
    def platforms(self) -> frozenset[str]:
        """Platforms that have workers of their own, beside those of this process's platform."""

    def run_tasks(
        self,
        tasks: Iterable[Task],
        do: Callable[[Task], Result],
        *,
        on_result: Callable[[Task, Result], None],
        split: Callable[[Task], Iterable[Task]],
        on_lost: Callable[[Task], None],
        find_platform: Callable[[Task], str] = lambda task: "",
    ) -> None:
        """Run `tasks`, and return when all have ended. Ctrl-C ends this at once, and so does an exception.

        Args:
          tasks: the tasks, in the order in which they start.
          do: the function to call with a task. The function, the task and the result are pickled.
          on_result: called with each task and its result, in this process.
          split: returns the parts of a task that killed its process. The parts run one at a time.
          on_lost: called with a part that kills its process again.
          find_platform: returns the platform (`gpu`, `tpu`) whose workers should take a task; empty for any.
        """


@dataclasses.dataclass(frozen=True)
class LocalPool:
    """A pool of `processes` worker processes on this machine, which share its fork server."""

    processes: int

    @property
    def is_remote(self) -> bool:
        """Whether tasks may run on another machine: never."""
        return False

    @property
    def platforms(self) -> frozenset[str]:
        """Platforms that have workers of their own, beside those of this process's platform."""
        return frozenset()

    def run_tasks(
        self,
        tasks: Iterable[Task],
        do: Callable[[Task], Result],
        *,
        on_result: Callable[[Task, Result], None],
        split: Callable[[Task], Iterable[Task]],
        on_lost: Callable[[Task], None],
        find_platform: Callable[[Task], str] = lambda task: "",
    ) -> None:
        """Run tasks in worker processes, as `TaskPool.run_tasks` says."""
        worker_pool.run_tasks(tasks, self.processes, do, on_result=on_result, split=split, on_lost=on_lost)


@dataclasses.dataclass(frozen=True)
class WorkerGroup:
    """The workers of an executor that have the same platform."""

    executor: concurrent.futures.Executor  # submits calls to these workers
    conditions: Conditions  # what these workers must have in common with this process
    count_workers: Callable[[], int]  # returns the number of these workers at this moment


@dataclasses.dataclass(frozen=True)
class ExecutorPool:
    """A pool over one or several executors of `concurrent.futures`.

    An executor may run a task again elsewhere when a worker is lost. It gives a task up with one of `losses`: then the
    task's parts run once more, one at a time, and a part that is given up again is lost.
    """

    # Groups of workers by platform. The group of the empty name takes tasks of all platforms without a group.
    groups: Mapping[str, WorkerGroup]
    # Exceptions by which an executor says that a task killed its worker again and again.
    losses: tuple[type[BaseException], ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether tasks may run on another machine: an executor does not say."""
        return True

    @property
    def platforms(self) -> frozenset[str]:
        """Platforms that have workers of their own, beside those of this process's platform."""
        return frozenset(self.groups) - {""}

    def run_tasks(
        self,
        tasks: Iterable[Task],
        do: Callable[[Task], Result],
        *,
        on_result: Callable[[Task, Result], None],
        split: Callable[[Task], Iterable[Task]],
        on_lost: Callable[[Task], None],
        find_platform: Callable[[Task], str] = lambda task: "",
    ) -> None:
        """Run tasks over the executors, as `TaskPool.run_tasks` says.

        Tasks that run when this ends early cannot be stopped: their results are dropped.

        Raises:
          ExecutorFailed: if an executor cannot run tasks any more.
          WorkerMismatch: if a worker differs from this process.
        """

        def find_group(task: Task) -> str:
            platform = find_platform(task)
            return platform if platform in self.groups else ""

        killers = self._run_once(tasks, do, on_result, find_group, _QUEUED_PER_WORKER)
        parts = (part for task in killers for part in split(task))
        for part in self._run_once(parts, do, on_result, find_group, 0):
            on_lost(part)

    def _run_once(
        self,
        tasks: Iterable[Task],
        do: Callable[[Task], Result],
        on_result: Callable[[Task, Result], None],
        find_group: Callable[[Task], str],
        queued_per_worker: int,
    ) -> list[Task]:
        """Run tasks, and return those that the executor gave up. With 0 queued per worker, run one at a time."""
        waiting: dict[str, collections.deque[Task]] = {name: collections.deque() for name in self.groups}
        for task in tasks:
            waiting[find_group(task)].append(task)
        running: dict[concurrent.futures.Future[Any], tuple[str, Task]] = {}
        given_up: list[Task] = []
        watch = _WorkerWatch(self.groups)
        try:
            while running or any(waiting.values()):
                for name, task in self._choose_next(waiting, running, queued_per_worker):
                    group = self.groups[name]
                    try:
                        future = group.executor.submit(call_remotely, pack_call(do, task), group.conditions)
                    except RuntimeError as error:  # it is shut down or broken
                        raise ExecutorFailed(_describe_failure(error)) from error
                    running[future] = (name, task)
                done, _ = concurrent.futures.wait(running, _WAKE_SECONDS, concurrent.futures.FIRST_COMPLETED)
                interrupts.raise_if_stopped()
                watch.raise_if_deserted({name for name, _ in running.values()}, is_moving=bool(done))
                for future in done:
                    _, task = running.pop(future)
                    try:
                        result = future.result()
                    except self.losses:
                        given_up.append(task)
                        continue
                    except (concurrent.futures.BrokenExecutor, concurrent.futures.CancelledError) as error:
                        raise ExecutorFailed(_describe_failure(error)) from error
                    on_result(task, result)
        finally:
            with interrupts.delay_signals():
                for future in running:
                    future.cancel()
        return given_up

    def _choose_next(
        self,
        waiting: Mapping[str, collections.deque[Task]],
        running: Mapping[Any, tuple[str, Task]],
        queued_per_worker: int,
    ) -> Iterator[tuple[str, Task]]:
        """Take tasks from `waiting` that may be submitted now, each with the name of its group."""
        in_flight = collections.Counter(name for name, _ in running.values())
        for name, tasks in waiting.items():
            if not tasks:
                continue
            room = max(1, queued_per_worker * self.groups[name].count_workers()) - in_flight[name]
            for _ in range(min(room, len(tasks))):
                yield name, tasks.popleft()


class _WorkerWatch:
    """Notices that the workers of a group are gone for good."""

    def __init__(self, groups: Mapping[str, WorkerGroup]) -> None:
        self._groups = groups
        self._last_seen = {name: time.monotonic() for name in groups}

    def raise_if_deserted(self, busy: Iterable[str], *, is_moving: bool) -> None:
        """Raise `ExecutorFailed` if a `busy` group has had no worker for a while, unless a task just ended."""
        now = time.monotonic()
        for name in busy:
            if is_moving or self._groups[name].count_workers():
                self._last_seen[name] = now
            elif now - self._last_seen[name] > _NO_WORKER_SECONDS:
                kind = f"{name} worker" if name else "worker"
                raise ExecutorFailed(f"there has been no {kind} for {_NO_WORKER_SECONDS:.0f} s, and tasks wait for one")


def build_pool(executor: concurrent.futures.Executor, conditions: Conditions, workers: int | None = None) -> TaskPool:
    """Build a pool over one executor.

    Args:
      executor: the executor, such as a `ProcessPoolExecutor` whose processes are spawned.
      conditions: what its processes must have in common with this one.
      workers: the number of its workers, which bounds the tasks in flight; None for one a core.
    """
    count = workers or os.cpu_count() or 1
    return ExecutorPool({"": WorkerGroup(executor, conditions, lambda: count)})


def _describe_failure(error: BaseException) -> str:
    """Describe in one line why an executor takes no more tasks."""
    if isinstance(error, concurrent.futures.CancelledError):
        return "the executor cancelled a task: the connection to its workers is lost, or somebody else ended it"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"the executor is broken: {reason}. Judge with --jobs=N to find the job that kills its process"
