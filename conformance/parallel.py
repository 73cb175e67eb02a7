"""Running jobs in several processes. A job travels by names alone; what comes back are records."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from cases.case import parse
from conformance import environment
from conformance.plan import Job
from conformance.records import Record

_CHUNK = 6  # jobs a task: small enough to share work evenly, large enough to keep the overhead down


@dataclasses.dataclass(frozen=True)
class _Order:
    """A job by name."""

    implementation: str
    case: str
    checks: tuple[str, ...]


def run_parallel(
    jobs: Sequence[Job], workers: int, products: str | None, on_job: Callable[[Job, list[Record]], None]
) -> None:
    """Judge `jobs` in `workers` processes; `on_job` hears of each as it ends. Ctrl-C stops the workers at once."""
    orders = [_Order(job.implementation.name, job.case.id, tuple(check.name for check in job.checks)) for job in jobs]
    chunks = [range(start, min(start + _CHUNK, len(jobs))) for start in range(0, len(jobs), _CHUNK)]
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start, initargs=(products, str(Path.cwd()))
    )
    try:
        pending = {pool.submit(_judge, [orders[n] for n in chunk]): chunk for chunk in chunks}
        for done in concurrent.futures.as_completed(pending):
            for n, judged in zip(pending[done], done.result(), strict=True):
                on_job(jobs[n], judged)
    except BaseException:
        for process in list(pool._processes.values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


_products: str | None = None
_runner = None


def _start(products: str | None, folder: str) -> None:
    """Worker set-up: leave Ctrl-C to the parent, set flags before JAX is imported, load the settings."""
    global _products, _runner
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    environment.prepare()
    from conformance import runner, settings  # imported late: they load JAX

    _products = products
    _runner = runner.Runner(settings.load(Path(folder)))


def _judge(orders: Sequence[_Order]) -> list[list[Record]]:
    from conformance import registry  # imported late: it loads JAX
    from conformance.checks import BY_NAME

    assert _runner is not None
    results = []
    for order in orders:
        implementation = registry.find(order.implementation, products=_products)  # type: ignore[arg-type] # as given
        job = Job(implementation, parse(order.case), tuple(BY_NAME[name] for name in order.checks))
        results.append(_runner.judge(job))
    return results
