"""Implement `calibrate`: tabulate the largest ratios of correct implementations. The limits are derived from them."""

from __future__ import annotations

import argparse

import jax
from rich.console import Console

from conformance.commands.progress_display import RunProgress
from conformance.session import input_files, run_spec
from conformance.session.failures import CannotJudge
from conformance.session.job_judging import judge_jobs, open_journal
from conformance.session.planned_run import plan_jobs
from conformance.session.resolved_run import resolve_run
from conformance.session.run_outputs import check_writable
from conformance.session.run_spec import RunSpec
from conformance.truth import calibration, tolerances
from reports import records
from reports.records import COMPLETE, Record


def calibrate(arguments: argparse.Namespace) -> int:
    """Judge correct implementations, or read their records, and write the table of their largest ratios."""
    path = check_writable(arguments.out, "out") if arguments.out is not None else tolerances.CALIBRATION
    if not arguments.records and not arguments.impl:
        raise CannotJudge("nothing to calibrate by: give records of correct implementations, or --impl=NAME")
    run_spec.reject_bad_job_count(arguments.jobs)
    for seed in arguments.seed:
        run_spec.reject_bad_seed(seed)
    found: list[Record] = []
    for name in arguments.records:
        found += (record for one in input_files.read_recorded_runs(name) for record in one.records)
    if arguments.impl:
        found += _judge_grids(arguments)
    # Records do not contain the level of their grid or the version of JAX, so the table of read records has neither.
    judged_here = not arguments.records
    level = arguments.level or ("standard" if judged_here else "")
    try:
        table = calibration.tabulate(
            records.merge_records(found), level=level, jax=jax.__version__ if judged_here else ""
        )
    except ValueError as error:
        raise CannotJudge(str(error)) from error
    if arguments.add:
        table = calibration.merge_calibrations(table, tolerances.load_calibration())
    calibration.write_calibration(table, path)
    print(f"{len(found):,} records tabulated in {path}")
    return 0


def _judge_grids(arguments: argparse.Namespace) -> list[Record]:
    """Judge the implementations on whole grids, and return the records. Raises `CannotJudge` if the run is stopped."""
    options = RunSpec(
        implementations=tuple(arguments.impl),
        level=arguments.level or "standard",
        seeds=tuple(arguments.seed),
        jobs=arguments.jobs,
    )
    planned = plan_jobs(resolve_run(options))
    journal = open_journal(planned)
    console = Console(stderr=True)
    how, reason = judge_jobs(planned, journal, lambda total, finished: RunProgress(total, console, finished))
    if how != COMPLETE:
        raise CannotJudge(reason)
    return journal.recorded.records
