"""Worker processes, and what becomes of a task that takes its process down.

A process that dies breaks the pool, and any of the tasks that were under way may have killed it. They are done again
one at a time; one that kills its process once more is lost, and costs only itself.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import TypeVar

from conformance import environment, packages

Task = TypeVar("Task")
Result = TypeVar("Result")
_LOADED_ONCE = "conformance.judging.loaded_once"


def work_through(
    tasks: Iterable[Task],
    workers: int,
    do: Callable[[Task], Result],
    *,
    heard: Callable[[Task, Result], None],
    parts: Callable[[Task], Iterable[Task]],
    lost: Callable[[Task], None],
) -> None:
    """Do `tasks` in `workers` processes. Ctrl-C stops the workers at once.

    Args:
      tasks: what to do, in this order.
      workers: how many processes.
      do: what a process does with a task. Both travel between processes, and so does what it returns.
      heard: hears of each task as it ends.
      parts: the tasks that one is made of, which are done alone after a process died on it.
      lost: hears of a task that kills its process even alone.
    """
    waiting = collections.deque(tasks)
    while waiting:
        suspects = _until_broken(waiting, workers, do, heard)
        alone = collections.deque(part for task in suspects for part in parts(task))
        while alone:
            for task in _until_broken(alone, 1, do, heard):
                lost(task)


def _until_broken(
    waiting: collections.deque[Task],
    workers: int,
    do: Callable[[Task], Result],
    heard: Callable[[Task, Result], None],
) -> list[Task]:
    """Do tasks, taken from `waiting`, until none is left or a worker dies; returns those under way when it did."""
    pending: dict[Future[Result], Task] = {}
    # One task more than there are workers, so that none waits for the next; a single worker may well be killed by its
    # task, and then no other may be under suspicion.
    ahead = workers + 1 if workers > 1 else 1
    with _pool(workers) as pool:
        while waiting or pending:
            try:
                while waiting and len(pending) < ahead:
                    future = pool.submit(do, waiting[0])
                    pending[future] = waiting.popleft()
                done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    heard(pending[future], future.result())
                    del pending[future]
            except BrokenProcessPool:
                return _unfinished(pending, heard) or [waiting.popleft()]
    return []


def _unfinished(pending: dict[Future[Result], Task], heard: Callable[[Task, Result], None]) -> list[Task]:
    """The tasks without results; what others finished before the pool broke is heard of."""
    concurrent.futures.wait(pending)
    unfinished = []
    for future, task in pending.items():
        if future.exception() is not None:
            unfinished.append(task)
        else:
            heard(task, future.result())
    return unfinished


def make_ready() -> None:
    """Start loading what workers need, in a process of its own: for who will have work for them in a second or two."""
    if _context().get_start_method() == "forkserver":
        with _unhurt_by_ctrl_c():
            forkserver.ensure_running()


def _context() -> SpawnContext | ForkServerContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([_LOADED_ONCE])
    return found


@contextlib.contextmanager
def _unhurt_by_ctrl_c() -> Iterator[None]:
    """Processes that are started within it ignore Ctrl-C from their first instruction on, and find our modules.

    What loads modules before it hears of any path goes by the environment: not by the current folder, where a user's
    own `cases.py` may be.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    environ = dict(os.environ)
    os.environ |= {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, (packages.HOME, environ.get("PYTHONPATH"))))),
    }
    try:
        with packages.first_on_path():
            yield
    finally:
        _restore(environ)
        signal.signal(signal.SIGINT, before)


def _restore(environ: Mapping[str, str]) -> None:
    """Make the environment this again."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that ignore Ctrl-C, stopped at once if the body raises."""
    pool = ProcessPoolExecutor(
        workers, mp_context=_context(), initializer=_start, initargs=(tuple(sys.path), dict(os.environ))
    )
    try:
        with _unhurt_by_ctrl_c():
            pool.submit(int)  # starts the processes
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _start(path: Sequence[str], environ: Mapping[str, str]) -> None:
    """Worker set-up: our packages are found, and flags are set before JAX is imported."""
    _restore(environ)
    packages.claim()
    sys.path[:] = path  # the user's modules are found as in the process that judges
    threading.Thread(target=_end_with_parent, daemon=True).start()
    environment.prepare()
    environment.collect_rarely()


def _end_with_parent() -> None:
    """A parent that is killed cannot stop its workers: they stop by themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
