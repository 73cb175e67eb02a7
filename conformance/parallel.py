"""Running jobs in several processes. A job travels by names alone; what comes back are records.

A kernel that takes its process down costs only its own job: the jobs that were under way are judged again one at a
time, and the one that kills its process once more is recorded as lost.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from cases.case import parse
from conformance import environment
from conformance.contract import Implementation
from conformance.plan import Job
from conformance.records import Record
from conformance.sensitivity import Examination

# Short jobs a task: few enough to share work evenly, enough to keep the overhead down. Those that share compiled
# programs stay together.
_CHUNK = 4
# Scopes whose jobs are short. The others are many programs each: they are begun first, or the run would end with one
# process still at work and the others idle.
_SHORT = frozenset(("grid", "declined", "feature"))

_Heard = Callable[[int, list[Record]], None]


@dataclasses.dataclass(frozen=True)
class _Order:
    """A job by name."""

    implementation: str
    case: str
    checks: tuple[str, ...]
    thorough: bool


def run_parallel(
    jobs: Sequence[Job],
    workers: int,
    products: str | None,
    on_job: Callable[[Job, list[Record]], None],
    lost: Callable[[Job], list[Record]],
) -> None:
    """Judge `jobs` in `workers` processes. Ctrl-C stops the workers at once.

    Args:
      jobs: what to judge.
      workers: how many processes.
      products: what `--products` says.
      on_job: hears of each job as it ends.
      lost: gives the records of a job that kills its process.
    """
    orders = [
        _Order(job.implementation.name, job.case.id, tuple(check.name for check in job.checks), job.thorough)
        for job in jobs
    ]

    def heard(n: int, judged: list[Record]) -> None:
        on_job(jobs[n], judged)

    waiting = _chunks(jobs)
    while waiting:
        suspects = _judge_chunks(orders, waiting, workers, products, heard)
        alone = collections.deque(range(n, n + 1) for chunk in suspects for n in chunk)
        while alone:
            for chunk in _judge_chunks(orders, alone, 1, products, heard):
                heard(chunk.start, lost(jobs[chunk.start]))


def _chunks(jobs: Sequence[Job]) -> collections.deque[range]:
    """The jobs' numbers: long ones first, each by itself, then the others as they come, a few at a time."""
    long: list[range] = []
    short: list[range] = []
    for n, job in enumerate(jobs):
        shares = n > 0 and job.case.program == jobs[n - 1].case.program
        if not {check.scope for check in job.checks} <= _SHORT:
            long.append(range(n, n + 1))
        elif short and short[-1].stop == n and (shares or len(short[-1]) < _CHUNK):
            short[-1] = range(short[-1].start, n + 1)
        else:
            short.append(range(n, n + 1))
    return collections.deque(long + short)


def _judge_chunks(
    orders: Sequence[_Order], waiting: collections.deque[range], workers: int, products: str | None, heard: _Heard
) -> list[range]:
    """Judge chunks, taken from `waiting`, until none is left or a worker dies; returns those under way when it did."""
    pending: dict[concurrent.futures.Future[list[list[Record]]], range] = {}
    # One chunk more than there are workers, so that none waits for the next; a single worker may well be killed by its
    # chunk, and then no other may be under suspicion.
    ahead = workers + 1 if workers > 1 else 1
    with _pool(workers, products) as pool:
        while waiting or pending:
            try:
                while waiting and len(pending) < ahead:
                    future = pool.submit(_judge, [orders[n] for n in waiting[0]])
                    pending[future] = waiting.popleft()
                done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    for n, judged in zip(pending[future], future.result(), strict=True):
                        heard(n, judged)
                    del pending[future]
            except BrokenProcessPool:
                return _unfinished(pending, heard) or [waiting.popleft()]
    return []


def _unfinished(pending: dict[concurrent.futures.Future[list[list[Record]]], range], heard: _Heard) -> list[range]:
    """The chunks without results; what others finished before the pool broke is heard of."""
    concurrent.futures.wait(pending)
    unfinished = []
    for future, chunk in pending.items():
        if future.exception() is not None:
            unfinished.append(chunk)
            continue
        for n, judged in zip(chunk, future.result(), strict=True):
            heard(n, judged)
    return unfinished


def examine_parallel(
    bank: str, names: Sequence[str], level: str, workers: int, on_bug: Callable[[Examination], None]
) -> None:
    """Examine planted bugs in `workers` processes. Ctrl-C stops the workers at once.

    Args:
      bank: where they are, `module:attribute`.
      names: which of them.
      level: of the grid.
      workers: how many processes.
      on_bug: hears of each bug as it is done.
    """
    waiting = collections.deque(names)
    while waiting:
        suspects = _examine_until_broken(bank, waiting, level, workers, on_bug)
        for name in suspects:
            alone = collections.deque([name])
            if _examine_until_broken(bank, alone, level, 1, on_bug):
                raise KernelDied(f"planted bug {name} kills the process that judges it: it cannot be measured")


class KernelDied(Exception):  # noqa: N818 -- a statement, as the message is
    """A planted bug took its process down twice."""


def _examine_until_broken(
    bank: str, waiting: collections.deque[str], level: str, workers: int, on_bug: Callable[[Examination], None]
) -> list[str]:
    """Examine bugs, taken from `waiting`, until none is left or a worker dies; returns those under way when it did."""
    pending: dict[concurrent.futures.Future[Examination], str] = {}
    with _pool(workers, None) as pool:
        while waiting or pending:
            try:
                while waiting and len(pending) < workers:
                    future = pool.submit(_examine, bank, waiting[0], level)
                    pending[future] = waiting.popleft()
                done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    on_bug(future.result())
                    del pending[future]
            except BrokenProcessPool:
                return list(pending.values()) or [waiting.popleft()]
    return []


@contextlib.contextmanager
def _pool(workers: int, products: str | None) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes that ignore Ctrl-C from their first instruction on, stopped at once if the body raises."""
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(products, str(Path.cwd())),
    )
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            pool.submit(int)  # starts the processes, which inherit what is ignored
        finally:
            signal.signal(signal.SIGINT, before)
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


_products: str | None = None
_runner = None


def _start(products: str | None, folder: str) -> None:
    """Worker set-up: set flags before JAX is imported, load the settings."""
    global _products, _runner
    threading.Thread(target=_end_with_parent, daemon=True).start()
    environment.prepare()
    from conformance import runner, settings  # imported late: they load JAX

    _products = products
    _runner = runner.Runner(settings.load(Path(folder)))


def _end_with_parent() -> None:
    """A parent that is killed cannot stop its workers: they stop by themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@functools.cache
def _find(name: str) -> Implementation:
    from conformance import registry  # imported late: it loads JAX

    return registry.find(name, products=_products)  # type: ignore[arg-type] # argparse has checked it


def _judge(orders: Sequence[_Order]) -> list[list[Record]]:
    from conformance.checks import BY_NAME  # imported late: it loads JAX

    assert _runner is not None
    results = []
    for order in orders:
        checks = tuple(BY_NAME[name] for name in order.checks)
        job = Job(_find(order.implementation), parse(order.case), checks, order.thorough)
        results.append(_runner.judge(job))
    return results


def _examine(bank: str, name: str, level: str) -> Examination:
    from conformance import sensitivity  # imported late: it loads JAX

    (bug,) = (bug for bug in sensitivity.load_bank(bank) if bug.name == name)
    return sensitivity.examine(bug, level)
