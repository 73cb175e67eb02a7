"""Judge jobs in several worker processes.

A worker gets the names of the implementation, case and checks of a job, finds them itself, and sends the records back.
"""

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

# The number of short jobs that a worker gets at once: few enough to share work evenly, enough to keep overhead low.
# Jobs that share compiled programs stay together even beyond this number.
_JOBS_PER_TASK = 4


@dataclasses.dataclass(frozen=True)
class _JobSpec:
    """A job in a form that can be pickled: by the names of its parts."""

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
      jobs: the jobs to judge.
      processes: number of workers.
      kernels: how kernels are found, and where they run.
      on_job: called with each job and its records as it ends.
      lost: returns the records of a job that kills its process.
      one_by_one: whether each worker gets a single job at a time. Then the first jobs of the list end soonest.
    """
    kernels = dataclasses.replace(
        kernels, handshakes=collect_handshakes({job.implementation.name: job.implementation for job in jobs}.values())
    )
    by_spec = {_serialize_job(job, kernels): job for job in jobs}

    def report(specs: tuple[_JobSpec, ...], judged: list[list[Record]]) -> None:
        for spec, job_records in zip(specs, judged, strict=True):
            on_job(by_spec[spec], job_records)

    worker_pool.run_tasks(
        [tuple(_serialize_job(job, kernels) for job in chunk) for chunk in _group_jobs(jobs, one_by_one=one_by_one)],
        processes,
        functools.partial(_judge, Path.cwd()),
        on_result=report,
        split=lambda specs: ((spec,) for spec in specs),
        on_lost=lambda specs: report(specs, [lost(by_spec[spec]) for spec in specs]),
    )


def _serialize_job(job: Job, kernels: KernelOptions) -> _JobSpec:
    """Replace the parts of a job by the names from which a worker finds them."""
    checks = tuple(check.name for check in job.checks)
    return _JobSpec(job.implementation.name, kernels, job.case.id, checks, job.rotation)


def _group_jobs(jobs: Sequence[Job], *, one_by_one: bool) -> list[list[Job]]:
    """Group jobs into tasks, in order: a few short jobs each, or one job each with `one_by_one`."""
    if one_by_one:
        return [[job] for job in jobs]
    chunks: list[list[Job]] = []
    previous: Job | None = None
    for job in jobs:
        shares_program = previous is not None and job.case.program == previous.case.program
        joins_previous = (
            previous is not None
            and previous.short
            and job.short
            and (shares_program or len(chunks[-1]) < _JOBS_PER_TASK)
        )
        if joins_previous:
            chunks[-1].append(job)
        else:
            chunks.append([job])
        previous = job
    return chunks


@functools.cache
def _create_runner(folder: Path, kernels: KernelOptions) -> Runner:
    """Create the runner of this worker, once, with the settings of the project in `folder`."""
    return Runner(settings.load_settings(folder), options=kernels.options)


@functools.cache
def _find_implementation(name: str, kernels: KernelOptions) -> Implementation:
    """Find an implementation by its name, once in each worker."""
    return kernels.find(name)


def _judge(folder: Path, specs: Sequence[_JobSpec]) -> list[list[Record]]:
    """Judge the jobs of a task in a worker, and return the records of each."""
    results = []
    for spec in specs:
        checks = tuple(CHECKS_BY_NAME[name] for name in spec.checks)
        implementation = _find_implementation(spec.implementation, spec.kernels)
        results.append(
            _create_runner(folder, spec.kernels).judge(
                Job(implementation, parse_case_id(spec.case), checks, spec.rotation)
            )
        )
    return results
