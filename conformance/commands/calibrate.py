"""`calibrate`: what correct implementations reach, the table that the limits follow from."""

from __future__ import annotations

import argparse

import jax

from conformance import records
from conformance.commands import argument_lookup, run
from conformance.commands.command_errors import CannotJudge
from conformance.commands.run_outputs import check_writable
from conformance.records import Record
from conformance.truth import calibration, tolerances


def calibrate(arguments: argparse.Namespace) -> int:
    """Judge correct implementations, or read their records, and write the table."""
    path = check_writable(arguments.out, "out") if arguments.out is not None else tolerances.CALIBRATION
    if not arguments.records and not arguments.impl:
        raise CannotJudge("nothing to calibrate by: give records of correct implementations, or --impl=NAME")
    argument_lookup.reject_bad_job_count(arguments.jobs)
    for seed in arguments.seed:
        argument_lookup.reject_bad_seed(seed)
    found: list[Record] = []
    for name in arguments.records:
        found += argument_lookup.read_records(name)
    if arguments.impl:
        found += run.judge_all(
            arguments.impl, arguments.level or "standard", tuple(arguments.seed) or (0,), arguments.jobs
        )
    # Records do not say what grid they are of, nor which JAX they were made with.
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
