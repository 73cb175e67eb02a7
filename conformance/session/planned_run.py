"""Plan the jobs of a run, narrow them, and take over those that a resumed file has finished."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import msgspec

from cases.case_id import matches_query
from cases.grid import build_grid
from cases.name_suggestions import suggest_query
from cases.parameter_names import name_parameters
from conformance.check_api.scopes import ImplementationGrids, select_models
from conformance.check_api.subchecks import ALL_SUBCHECKS, Subchecks
from conformance.judging import provenance, run_plan
from conformance.judging.job import Job
from conformance.judging.journal import ResumeMismatchError, describe_resumed_jobs, load_resumed_run
from conformance.judging.run_levels import get_grid_level
from conformance.judging.run_plan import Plan
from conformance.session.failures import CannotJudge
from conformance.session.project_lookup import parse_case, select_problem_cases
from conformance.session.resolved_run import ResolvedRun
from impls.contract.implementation import Implementation
from reports import text_format
from reports.conformity import count_reasons
from reports.records import Record, Run, read_runs

_START_SECONDS, _CHECK_SECONDS = 5.0, 0.05
"""Processor seconds to start, and for a check of a case of a plain function on a CPU; only a guess is made from them.

They are those of level `quick` on the machine where the loop below took `_LOOP_SECONDS`.
"""
_LOOP_STEPS, _LOOP_SECONDS = 200_000, 0.009
"""An empty loop of Python that tells how fast a machine is, and its processor time where checks were timed."""
_FEW_JOBS = 8
"""Runs with at most this number of jobs use one process: they are done before worker processes would have started."""
# The most workers on each JAX backend. Compiling takes most of the time and runs on the CPU, so several processes share
# a GPU. A TPU can be used by one process only.
_MAX_WORKERS = {"cpu": sys.maxsize, "gpu": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run whose jobs are known.

    Attributes:
      resolved: what the run uses.
      plan: all jobs of the run, including those of other shards.
      jobs: the jobs to judge here: those of this shard.
      finished: the records of jobs that a resumed file has, by the job's number in the plan.
      resumed: the run record of that file; None if no file is resumed, or another process writes it.
    """

    resolved: ResolvedRun
    plan: Plan
    jobs: Sequence[Job]
    finished: Mapping[int, tuple[Record, ...]] = dataclasses.field(default_factory=dict)
    resumed: Run | None = None

    @functools.cached_property
    def run(self) -> Run:
        """The run record: the facts that hold for all records of the run, such as versions and planned jobs."""
        return self.resumed or _describe_run(self)

    @functools.cached_property
    def numbers(self) -> Mapping[int, int]:
        """The number of each planned job, by the identity of the job."""
        return {id(job): number for number, job in enumerate(self.plan.jobs)}

    @property
    def waiting(self) -> list[Job]:
        """The jobs that the resumed file has not finished."""
        return [job for job in self.jobs if self.numbers[id(job)] not in self.finished]

    @property
    def notes(self) -> list[str]:
        """Lines for the user about the run."""
        return [*self.resolved.notes, *([describe_resumed_jobs(len(self.finished))] if self.finished else [])]


def describe_unasked(implementations: Sequence[Implementation]) -> list[str]:
    """Describe, in a line for each implementation that has any, the parameters to which the run passes nothing."""
    lines = []
    for one in (each for each in implementations if each.unasked):
        adapt = f"python -m conformance adapt --impl={one.name}" if ":" in one.name else "conformance.adapt(function)"
        named = f"{one.name} has parameters to which nothing is passed: {name_parameters(one.unasked)}"
        lines.append(f"{named}. `{adapt}` finds out what they are; or declare ignores={one.unasked!r}")
    return lines


def plan_jobs(resolved: ResolvedRun) -> PlannedRun:
    """Plan the jobs of a run. Raises `CannotJudge` if there are none; the message is one line."""
    plan = _build_plan(resolved)
    if not plan.jobs:
        raise CannotJudge(_describe_empty_plan(resolved))
    shard = resolved.spec.shard
    return PlannedRun(
        resolved=resolved, plan=plan, jobs=run_plan.select_shard(plan.jobs, *shard) if shard else plan.jobs
    )


def select_jobs(
    planned: PlannedRun, select: Callable[[Job], Job | None], selection: str, *, further: Sequence[Job] = ()
) -> PlannedRun:
    """Leave out planned jobs, or some of their checks. The plan stays as it is if nothing would be left.

    Args:
      planned: the run, before a resumed file is loaded.
      select: returns the job to judge in place of a planned one, or None to leave it out.
      selection: how the caller selects, as the user wrote it, such as `-k forward`.
      further: jobs to add that the plan lacks.
    """
    selected = {id(job): found for job in planned.plan.jobs if (found := select(job)) is not None}
    if not (selected or further):
        return planned
    spec = dataclasses.replace(planned.resolved.spec, selection=selection)
    return PlannedRun(
        resolved=dataclasses.replace(planned.resolved, spec=spec),
        plan=dataclasses.replace(planned.plan, jobs=(*selected.values(), *further)),
        jobs=(*(selected[id(job)] for job in planned.jobs if id(job) in selected), *further),
    )


def load_resumed(planned: PlannedRun) -> PlannedRun:
    """Take over the jobs that the file of `--resume` has finished, if there is one.

    Raises:
      CannotJudge: if the file cannot be read, or another run wrote it.
    """
    spec = planned.resolved.spec
    if spec.resume is None:
        return planned
    path = Path(spec.resume)
    try:
        if planned.resolved.caller.is_worker:  # the main process checks that the file is of this run
            return dataclasses.replace(planned, finished=read_runs(path)[0].done)
        run, finished = load_resumed_run(path, planned.run)
    except OSError as error:
        raise CannotJudge(f"{spec.spell('resume')}: {path} cannot be read: {error.strerror or error}") from error
    except (ResumeMismatchError, ValueError) as error:
        raise CannotJudge(f"{spec.spell('resume')}: {error}") from error
    return dataclasses.replace(planned, finished=finished, resumed=run)


def find_number(planned: PlannedRun, job: Job) -> int | None:
    """Return the number of a job in the plan; None for a job whose checks the caller has narrowed since."""
    if (number := planned.numbers.get(id(job))) is not None:
        return number
    return next((number for number, other in enumerate(planned.plan.jobs) if other == job), None)


def count_workers(planned: PlannedRun, jobs: int) -> int:
    """Return the number of processes of this machine that judge so many jobs."""
    if planned.resolved.caller.implementations:
        return 1
    return planned.resolved.spec.jobs or choose_worker_count(jobs)


def choose_worker_count(jobs: int) -> int:
    """Choose the number of processes that judge so many jobs on this machine."""
    most = _MAX_WORKERS.get(jax.default_backend(), 1)
    return min(os.cpu_count() or 1, most) if jobs > _FEW_JOBS else 1


def describe_plan(planned: PlannedRun) -> str:
    """Describe in one line what will be judged, and about how long that takes on this machine."""
    resolved, waiting = planned.resolved, planned.waiting
    spec, workers = resolved.spec, count_workers(planned, len(waiting))
    parts = [f"judging {', '.join(one.name for one in resolved.implementations)} on {jax.default_backend()}"]
    level = spec.recorded_level
    parts.append(level if spec.is_one_case_or_problem or spec.regressions else f"level {level}")
    jobs = "1 job" if len(waiting) == 1 else f"{len(waiting):,} jobs"
    parts.append(f"{jobs} in 1 process" if workers == 1 else f"{jobs} in {workers} processes")
    seconds = _START_SECONDS + sum(len(job.checks) for job in waiting) * _CHECK_SECONDS / workers
    slowness = _measure_slowness(workers if resolved.remote is None else 0)
    return f"{', '.join(parts)}: about {text_format.format_rough_duration(seconds * slowness)}"


def _build_plan(resolved: ResolvedRun) -> Plan:
    spec, implementations, checks = resolved.spec, resolved.implementations, resolved.checks
    if spec.problem:
        cases = select_problem_cases(spec.problem, full_size=spec.full_size, case=spec.case, query=spec.cases)
        return run_plan.plan_problem(implementations, cases, checks)
    if spec.case is not None:
        case = parse_case(spec.case)
        selection = Subchecks(pullbacks=(spec.pullback,)) if spec.pullback else ALL_SUBCHECKS
        plans = [run_plan.plan_case(implementation, case, checks, selection) for implementation in implementations]
        return Plan(tuple(job for one in plans for job in one.jobs), ())
    if spec.regressions:
        return run_plan.plan_regressions(implementations, checks)
    return run_plan.plan_run(
        implementations,
        level=spec.chosen_level,
        seeds=spec.seeds or (0,),
        query=spec.cases,
        checks=checks,
        packages=spec.branches,
    )


def _describe_empty_plan(resolved: ResolvedRun) -> str:
    spec = resolved.spec
    if spec.cases is None:
        return f"no case asks for {', '.join(spec.checks) or 'any check'}"
    query = f"{spec.spell('cases')}={spec.cases!r}"
    if spec.problem:
        return f"no case of {spec.problem} matches {query}"
    grids = [
        ImplementationGrids(one, get_grid_level(spec.chosen_level), seed)
        for one in resolved.implementations
        for seed in spec.seeds or (0,)
    ]
    for one in resolved.implementations:
        if declined := _describe_declined(one, resolved):
            return f"{one.name} supports no case that {query} matches: {declined}"
    ids = (case.id for one in grids for grid in one.all_grids for case in grid.cases)
    closest = suggest_query(spec.cases, ids)
    return f"no case of the grid matches {query}{closest} (see `python -m conformance list cases`)"


def _describe_declined(implementation: Implementation, resolved: ResolvedRun) -> str:
    """Describe why cases are unsupported that the query matches on the grid of all features; empty if it matches none.

    The grid of an implementation has no combinations with features that it does not support.
    """
    spec = resolved.spec
    seeds, models = spec.seeds or (0,), select_models(implementation)
    grids = [build_grid(get_grid_level("quick"), seed, lambda case: None, one) for seed in seeds for one in models]
    matched = {case for grid in grids for case in grid.cases if matches_query(spec.cases or "", case.id)}
    return count_reasons(reason for case in matched if (reason := implementation.supports(case)) is not None)


def _describe_run(planned: PlannedRun) -> Run:
    resolved, spec = planned.resolved, planned.resolved.spec
    run = provenance.build_run(
        resolved.implementations,
        planned.plan,
        command=spec.command,
        level=spec.recorded_level,
        seeds=spec.recorded_seeds,
        narrowed=spec.describe_narrowing(),
        query=spec.build_query(),
        shard="/".join(map(str, spec.shard or ())),
        limits=resolved.settings.tolerances.rows(),
        kernels=resolved.kernels,
    )
    remote = resolved.remote.environment if resolved.remote is not None else {}
    return msgspec.structs.replace(run, environment={**run.environment, **remote})


def _measure_slowness(workers: int) -> float:
    """Estimate how much longer a run takes here than on the machine where checks were timed.

    The best of three loops tells how fast a processor is. The load tells how many processes share the processors.

    Args:
      workers: how many processes judge on this machine; 0 if other machines judge, whose load is unknown.
    """
    took = []
    for _ in range(3):
        started = time.process_time()
        for _ in range(_LOOP_STEPS):
            pass
        took.append(time.process_time() - started)
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = 0.0
    sharing = max(1.0, (load + workers) / (os.cpu_count() or 1)) if workers else 1.0
    return max(0.2, min(took) / _LOOP_SECONDS) * sharing
