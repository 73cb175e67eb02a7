"""Compare two sides of runs, old and new, to find regressions.

A side is the runs of one or several files of records, or the run of this session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from conformance.follow_up import bug_diagnosis
from conformance.judging.run_aggregation import aggregate_runs
from conformance.session.failures import CannotJudge
from conformance.session.input_files import read_recorded_runs
from reports import changes
from reports.changes import Comparison
from reports.page_model import build_summary
from reports.records import Record, RecordedRun, RunInfo


@dataclasses.dataclass(frozen=True)
class ComparedRuns:
    """One side of a comparison: runs, their merged records, and the other facts that a report shows."""

    recorded: Sequence[RecordedRun]
    records: Sequence[Record]
    info: RunInfo

    @property
    def planned(self) -> set[tuple[str, str]] | None:
        """All planned pairs of a case and a check, by id and name; None if a file has no run record."""
        if any(one.run is None for one in self.recorded):
            return None
        jobs = [job for one in self.recorded if one.run for job in one.run.jobs]
        return {(job.case, check) for job in jobs for check in job.checks}


def read_compared_runs(names: str, *, command: str) -> ComparedRuns:
    """Read the runs of files, their names joined by commas, as one side of a comparison.

    Raises:
      CannotJudge: if a file cannot be read, or its runs cannot be merged (`gather_compared_runs`).
    """
    recorded = [one for name in names.split(",") for one in read_recorded_runs(name)]
    return gather_compared_runs(recorded, names, command=command)


def gather_compared_runs(recorded: Sequence[RecordedRun], names: str, *, command: str) -> ComparedRuns:
    """Merge runs to one side of a comparison. Raises `CannotJudge` if there are none, or provenances differ."""
    found, info = aggregate_runs(recorded, command=command)
    if not found:
        raise CannotJudge(f"there is no record in {names}")
    for record in found:
        if record.run:
            raise CannotJudge(
                f"{names} has runs of {record.implementation} that differ, such as of {record.run}: compare them with "
                f"each other, each as one side"
            )
    return ComparedRuns(recorded, found, info)


def compare_runs(old: ComparedRuns, new: ComparedRuns) -> Comparison:
    """Compare two sides: what changed from the old one to the new one, and by which findings."""
    found = changes.compare_runs(old.records, new.records, planned=new.planned)
    old_findings, new_findings = (
        build_summary(side.records, bug_diagnosis.add_diagnoses(side.info, side.records)).findings
        for side in (old, new)
    )
    return dataclasses.replace(found, old_findings=old_findings, new_findings=new_findings)
