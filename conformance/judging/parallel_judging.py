"""Judging jobs in several processes. A job travels by names alone; what comes back are records."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from cases.case import parse_case_id
from conformance.check_api.rotation import Rotation
from conformance.checks import CHECKS_BY_NAME
from conformance.contract import Implementation
from conformance.judging import settings, worker_pool
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.records import Record
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.sandboxed_executor import collect_handshakes

# Short jobs a task: few enough to share work evenly, enough to keep the overhead down. Those that share compiled
# programs stay together.
_JOBS_PER_TASK = 4


@dataclasses.dataclass(frozen=True)
class _JobSpec:
    """A job by name."""

    implementation: str
    kernels: KernelOptions
    case: str
    checks: tuple[str, ...]
    rotation: Rotation


def judge_in_parallel(
    jobs: Sequence[Job],
    processes: int,
    kernels: KernelOptions,
    on_job: Callable[[Job, list[Record]], None],
    lost: Callable[[Job], list[Record]],
    *,
    one_by_one: bool = False,
) -> None:
    """Judge `jobs` in worker processes. Ctrl-C stops the workers at once.

    Args:
      jobs: what to judge.
      processes: how many workers.
      kernels: how they are found, and where they run.
      on_job: hears of each job as it ends.
      lost: gives the records of a job that kills its process.
      one_by_one: whether a process takes one job at a time, so that the first of them ends soonest.
    """
    kernels = dataclasses.replace(
        kernels, handshakes=collect_handshakes({job.implementation.name: job.implementation for job in jobs}.values())
    )
    by_order = {_serialize_job(job, kernels): job for job in jobs}

    def heard(orders: tuple[_JobSpec, ...], judged: list[list[Record]]) -> None:
        for order, found in zip(orders, judged, strict=True):
            on_job(by_order[order], found)

    worker_pool.run_tasks(
        [tuple(_serialize_job(job, kernels) for job in chunk) for chunk in _group_jobs(jobs, one_by_one=one_by_one)],
        processes,
        functools.partial(_judge, Path.cwd()),
        heard=heard,
        parts=lambda orders: ((order,) for order in orders),
        lost=lambda orders: heard(orders, [lost(by_order[order]) for order in orders]),
    )


def _serialize_job(job: Job, kernels: KernelOptions) -> _JobSpec:
    checks = tuple(check.name for check in job.checks)
    return _JobSpec(job.implementation.name, kernels, job.case.id, checks, job.rotation)


def _group_jobs(jobs: Sequence[Job], *, one_by_one: bool) -> list[list[Job]]:
    """The jobs in their order, short ones a few at a time; `one_by_one` leaves every job by itself."""
    if one_by_one:
        return [[job] for job in jobs]
    chunks: list[list[Job]] = []
    previous: Job | None = None
    for job in jobs:
        shares = previous is not None and job.case.program == previous.case.program
        joins = previous is not None and previous.short and job.short and (shares or len(chunks[-1]) < _JOBS_PER_TASK)
        if joins:
            chunks[-1].append(job)
        else:
            chunks.append([job])
        previous = job
    return chunks


@functools.cache
def _create_runner(folder: Path, kernels: KernelOptions) -> Runner:
    """The runner of this process, with the settings of the project that the command was given in."""
    return Runner(settings.load_settings(folder), options=kernels.options)


@functools.cache
def _find_implementation(name: str, kernels: KernelOptions) -> Implementation:
    return kernels.find(name)


def _judge(folder: Path, orders: Sequence[_JobSpec]) -> list[list[Record]]:
    results = []
    for order in orders:
        checks = tuple(CHECKS_BY_NAME[name] for name in order.checks)
        implementation = _find_implementation(order.implementation, order.kernels)
        results.append(
            _create_runner(folder, order.kernels).judge(
                Job(implementation, parse_case_id(order.case), checks, order.rotation)
            )
        )
    return results
