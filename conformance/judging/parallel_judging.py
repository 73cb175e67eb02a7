"""Judge jobs in several processes: worker processes of this machine, or those of an executor.

A worker gets the names of the implementation, case and checks of a job, finds them itself, and sends the records back.
A worker of an executor may be on another machine. It sends records as they are written to files, with its host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from cases.case_id import parse_case_id
from conformance.check_api.branch_search_request import BranchSearch
from conformance.check_api.subchecks import Subchecks
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import source_digests
from conformance.execution.implementation_registry import ImplementationNotFound, is_builtin
from conformance.judging import remote_call, settings
from conformance.judging.exploration import build_exploration_runner
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.task_pools import TaskPool
from conformance.sandbox import kernel_process
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sandbox.sandboxed_executor import collect_handshakes
from conformance.truth import disk_cache
from impls.contract.implementation import Implementation
from reports.records import Record, parse_record, serialize_record

# The number of short jobs that a worker gets at once: few enough to share work evenly, enough to keep overhead low.
# Jobs that share compiled programs stay together even beyond this number.
_JOBS_PER_TASK = 4


# Each of the first tasks has one program only, so that it is known soon if a kernel's first cases all fail.
_FIRST_TASKS = 8

# The sources of kernels that were imported into this process, which Python does not import again.
_imported_sources: dict[str, tuple[str, str]] = {}


@dataclasses.dataclass(frozen=True)
class _JobSpec:
    """A job with its parts by name, so it can be pickled; all failures of an `exploring` job are judged again."""

    implementation: str
    kernels: KernelOptions
    case: str
    checks: tuple[str, ...]
    selection: Subchecks
    branch_search: BranchSearch
    exploring: bool = False


def judge_in_parallel(
    jobs: Sequence[Job],
    pool: TaskPool,
    kernels: KernelOptions,
    on_job: Callable[[Job, list[Record]], None],
    lost: Callable[[Job], list[Record]],
    *,
    one_by_one: bool = False,
    exploring: bool = False,
) -> None:
    """Judge `jobs` in the processes of a pool. Ctrl-C ends this at once.

    Args:
      lost: returns the records of a job that kills its process.
      one_by_one: whether each worker gets a single job at a time. Then the first jobs of the list end soonest.
      exploring: whether these are jobs of an exploration.
    """
    implementations = {job.implementation.name: job.implementation for job in jobs}
    # A kernel that goes to workers of another platform declares other values there.
    here = [each for each in implementations.values() if each.accelerator.platform not in pool.platforms]
    kernels = dataclasses.replace(kernels, handshakes=collect_handshakes(here))
    by_spec = {_serialize_job(job, kernels, exploring=exploring): job for job in jobs}

    def report(specs: tuple[_JobSpec, ...], judged: Sequence[Sequence[Record]]) -> None:
        for spec, job_records in zip(specs, judged, strict=True):
            on_job(by_spec[spec], list(job_records))

    def find_platform(specs: tuple[_JobSpec, ...]) -> str:
        return by_spec[specs[0]].implementation.accelerator.platform or ""

    def report_lost(specs: tuple[_JobSpec, ...]) -> None:
        report(specs, [lost(by_spec[spec]) for spec in specs])

    chunks = _group_jobs(jobs, one_by_one=one_by_one)
    tasks = [tuple(_serialize_job(job, kernels, exploring=exploring) for job in chunk) for chunk in chunks]
    folder = Path.cwd()
    if pool.is_remote:
        pool.run_tasks(
            tasks,
            functools.partial(_judge_as_lines, folder),
            on_result=lambda specs, lines: report(specs, [[parse_record(line) for line in one] for one in lines]),
            split=_split,
            on_lost=report_lost,
            find_platform=find_platform,
        )
    else:
        pool.run_tasks(tasks, functools.partial(_judge, folder), on_result=report, split=_split, on_lost=report_lost)


def _split(specs: tuple[_JobSpec, ...]) -> Iterable[tuple[_JobSpec, ...]]:
    """Return a task for each job of a task."""
    return ((spec,) for spec in specs)


def _serialize_job(job: Job, kernels: KernelOptions, *, exploring: bool) -> _JobSpec:
    """Replace the parts of a job by the names from which a worker finds them."""
    checks = tuple(check.name for check in job.checks)
    return _JobSpec(job.implementation.name, kernels, job.case.id, checks, job.selection, job.branch_search, exploring)


def _group_jobs(jobs: Sequence[Job], *, one_by_one: bool) -> list[list[Job]]:
    """Group jobs into tasks, in order: a few short jobs each, or one job each with `one_by_one`.

    Jobs that share a program are one task. The first tasks have no others.
    """
    if one_by_one:
        return [[job] for job in jobs]
    chunks: list[list[Job]] = []
    previous: Job | None = None
    for job in jobs:
        shares_program = previous is not None and job.case.program == previous.case.program
        joins_previous = (
            previous is not None
            and previous.implementation.accelerator.platform == job.implementation.accelerator.platform
            and previous.short
            and job.short
            and (shares_program or (len(chunks) > _FIRST_TASKS and len(chunks[-1]) < _JOBS_PER_TASK))
        )
        if joins_previous:
            chunks[-1].append(job)
        else:
            chunks.append([job])
        previous = job
    return chunks


@functools.cache
def _create_runner(folder: Path, kernels: KernelOptions, exploring: bool) -> Runner:
    """Create the runner of this worker, once, with the settings of the project in `folder`."""
    found = settings.load_settings(folder)
    return build_exploration_runner(found, kernels.options) if exploring else Runner(found, options=kernels.options)


@functools.cache
def _find_implementation(name: str, kernels: KernelOptions) -> Implementation:
    """Find an implementation by its name, once in each worker and run.

    Raises:
      ImplementationNotFound: if there is none, or if this process imported an older version of its source.
    """
    if kernels.in_process and not is_builtin(name):
        source = source_digests.describe_source(name)
        if _imported_sources.setdefault(name, source) != source:
            raise ImplementationNotFound(
                f"{name} was changed since this process imported it for --in-process: restart the worker"
            )
    return kernels.find(name)


def _judge(folder: Path, specs: Sequence[_JobSpec]) -> list[list[Record]]:
    """Judge the jobs of a task in a worker, and return the records of each."""
    results = []
    for spec in specs:
        checks = tuple(CHECKS_BY_NAME[name] for name in spec.checks)
        implementation = _find_implementation(spec.implementation, spec.kernels)
        job = Job(implementation, parse_case_id(spec.case), checks, spec.selection, spec.branch_search)
        with disk_cache.disable_cache() if spec.exploring else contextlib.nullcontext():
            results.append(_create_runner(folder, spec.kernels, spec.exploring).judge(job))
    return results


def _judge_as_lines(folder: Path, specs: Sequence[_JobSpec]) -> list[list[str]]:
    """Judge the jobs of a task in a worker of an executor, and return the records of each as lines of a file."""
    try:
        judged_jobs = _judge(folder, specs)
    except ImplementationNotFound as error:
        raise ImplementationNotFound(f"worker {remote_call.name_process()}: {error}") from error
    host = socket.gethostname()
    return [
        [serialize_record(msgspec.structs.replace(record, host=host)) for record in judged] for judged in judged_jobs
    ]


def _forget_kernels() -> None:
    """Drop the kernels of this worker: their files may have changed before the next run."""
    _create_runner.cache_clear()
    _find_implementation.cache_clear()
    kernel_process.end_all_processes()


remote_call.call_at_new_run(_forget_kernels)
