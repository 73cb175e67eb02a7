"""Worker processes, and what becomes of a task that takes its process down.

Each worker has one task at a time, over a pipe of its own. So it is known which task was under way in a process that
died, and nothing is shared that a dying process could leave locked. Such a task is done again at the end, in its
parts and alone; one that kills its process once more is lost, and costs only itself.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from conformance import environment, packages
from conformance.judging import interrupts

Task = TypeVar("Task")
Result = TypeVar("Result")
_LOADED_ONCE = "conformance.judging.loaded_once"
_ENDING = 10.0  # seconds that a worker may take to end, with the processes of its kernels, before it is killed


def work_through(
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
    deadly = _done(tasks, workers, do, heard)
    for task in _done([part for one in deadly for part in parts(one)], 1, do, heard):
        lost(task)


@dataclasses.dataclass
class _Worker(Generic[Task]):
    """A process, our end of its pipe, and what it is doing."""

    process: BaseProcess
    pipe: Connection
    task: Task


def _done(
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
                busy.append(_started(waiting.popleft(), do))
            for worker in _ready(busy):
                task = worker.task
                answer = _answer(worker)
                if answer is None:
                    busy.remove(worker)
                    _end(worker)
                    fatal.append(task)
                    continue
                raised, found = answer
                if raised:
                    raise found
                if waiting:
                    worker.task = waiting.popleft()
                    _tell(worker, do)
                else:
                    busy.remove(worker)
                    idle.append(worker)
                heard(task, found)
    finally:
        with interrupts.held():
            for worker in busy:
                worker.process.terminate()
            for worker in (*busy, *idle):
                _end(worker)
    return fatal


def _ready(busy: Sequence[_Worker[Task]]) -> list[_Worker[Task]]:
    """The workers that have answered or died, once there is one."""
    ready = connection.wait([x for worker in busy for x in (worker.pipe, worker.process.sentinel)])
    return [worker for worker in busy if worker.pipe in ready or worker.process.sentinel in ready]


def _answer(worker: _Worker[Task]) -> tuple[bool, Any] | None:
    """Whether its task raised, and what came of it; None if the worker died."""
    if not worker.pipe.poll():
        return None  # what it started lives on, and holds its end of the pipe
    try:
        answer: tuple[bool, Any] = worker.pipe.recv()
    except (EOFError, OSError):
        return None
    return answer


def _started(task: Task, do: Callable[[Task], Result]) -> _Worker[Task]:
    """A new worker, at work on this."""
    ours, theirs = multiprocessing.Pipe()
    process = _context().Process(target=_serve, args=(theirs, tuple(sys.path), dict(os.environ)))
    with _unhurt_by_ctrl_c():
        process.start()
    theirs.close()  # the worker's death must be seen at our end
    worker = _Worker(process, ours, task)
    _tell(worker, do)
    return worker


def _tell(worker: _Worker[Task], do: Callable[[Task], Result]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it died, as whoever listens to it will hear
        worker.pipe.send((do, worker.task))


def _end(worker: _Worker[Task]) -> None:
    """End a process that has died, has been told to, or has no more to do, which it sees by its pipe."""
    worker.pipe.close()
    worker.process.join(_ENDING)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _serve(pipe: Connection, path: Sequence[str], environ: Mapping[str, str]) -> None:
    """What a worker does: one task after another, until there are no more."""
    _start(path, environ)
    while True:
        try:
            do, task = pipe.recv()
        except EOFError:
            return
        try:
            answer = False, do(task)
        except Exception as error:
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            answer = True, error
        pipe.send(answer)


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
    """Processes that are started within it do not hear of Ctrl-C from their first instruction on, and find our modules.

    Who starts them hears of it afterwards: half a process more could neither be used nor ended.
    What loads modules before it hears of any path goes by the environment: not by the current folder, where a user's
    own `cases.py` may be.
    """
    environ = dict(os.environ)
    with interrupts.held():
        resource_tracker.ensure_running()  # forkserver needs it, and starting it would let the signal through again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.environ |= {
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, (packages.HOME, environ.get("PYTHONPATH"))))),
        }
        try:
            with packages.first_on_path():
                yield
        finally:
            _restore(environ)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _restore(environ: Mapping[str, str]) -> None:
    """Make the environment this again."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


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
