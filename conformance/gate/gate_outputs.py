"""Write the page and the records of a run of pytest that judges kernels of test files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from conformance.session.failures import CannotJudge
from conformance.session.run_options import RunOptions
from conformance.session.run_outputs import check_outputs, find_step_summary
from conformance.session.session import merge_runs
from reports.page_model import build_summary
from reports.records import RecordedRun, serialize_recorded_run


def write_outputs(before: Sequence[RecordedRun], here: Sequence[RecordedRun], options: RunOptions) -> None:
    """Write the outputs that the command line names, for all sessions of the run.

    Args:
      before: the gate's own run, whose records are in the files already; empty without one.
      here: the runs of test files.
      options: those of the command line.

    Raises:
      CannotJudge: if a file cannot be written.
    """
    outputs = check_outputs(report=options.report, json=options.json, prefix=options.option_prefix)
    outputs = dataclasses.replace(outputs, step=None if before else find_step_summary())
    lines = "".join(map(serialize_recorded_run, here))
    for path in outputs.journals:
        try:
            with path.open("a" if before else "w", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            raise CannotJudge(f"{path} cannot be written: {error.strerror or error}") from error
    if outputs.report is not None or outputs.step is not None:
        records, info = merge_runs([*before, *here], command=options.command)
        outputs.write(build_summary(records, info))
