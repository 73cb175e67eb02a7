"""`compare`: what changed between two runs, or two sets of shards."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from rich.console import Console

from conformance.commands import argument_lookup, run_annotations
from conformance.commands.command_errors import CannotJudge
from conformance.commands.run_outputs import check_writable, format_command_line, write_summary
from conformance.judging.run_aggregation import aggregate_runs
from conformance.records import Record, RunInfo
from conformance.runs import RecordedRun
from reports import changes, changes_page
from reports.changes import Comparison


@dataclasses.dataclass(frozen=True)
class ComparedRuns:
    """One of the two that are compared."""

    recorded: Sequence[RecordedRun]
    records: Sequence[Record]
    info: RunInfo

    @property
    def planned(self) -> set[tuple[str, str]] | None:
        """Case and check of all that was planned to be asked; none where a file does not say so."""
        if any(one.run is None for one in self.recorded):
            return None
        jobs = [job for one in self.recorded if one.run for job in one.run.jobs]
        return {(job.case, check) for job in jobs for check in job.checks}


def compare(arguments: argparse.Namespace) -> int:
    """`compare`: what changed between two runs, and by the exit code whether anything became worse."""
    page = check_writable(arguments.report, "report") if arguments.report is not None else None
    text = check_writable(arguments.markdown, "markdown") if arguments.markdown is not None else None
    named = [*arguments.old.split(","), *arguments.new.split(",")]
    for option, place in (("report", page), ("markdown", text)):
        if place is not None and place.resolve() in [
            argument_lookup.parse_input_path(name).resolve() for name in named
        ]:
            raise CannotJudge(f"--{option}={place} is one of the files to be read: give it its own file")
    old, new = read_compared_runs(arguments.old), read_compared_runs(arguments.new)
    found = compare_runs(old, new)
    try:
        if page is not None:
            changes_page.save_changes_page(page, found, (old.records, old.info), (new.records, new.info))
        if text is not None:
            write_summary(text, changes_page.format_changes_markdown(found))
    except OSError as error:
        raise CannotJudge(f"{error.filename or 'an output'} cannot be written: {error.strerror or error}") from error
    changes_page.print_comparison(found, Console())
    print("".join(f"{line}\n" for line in run_annotations.annotate_comparison(found)), end="")
    return 1 if found.regressions else 0


def read_compared_runs(names: str) -> ComparedRuns:
    """The runs in files, joined by commas. Raises `CannotJudge` for what cannot be read, or is not one thing."""
    recorded = [one for name in names.split(",") for one in argument_lookup.read_recorded_runs(name)]
    return gather_compared_runs(recorded, names)


def gather_compared_runs(recorded: Sequence[RecordedRun], names: str) -> ComparedRuns:
    """Runs as one side. Raises `CannotJudge` for none, and for runs of an implementation that differ."""
    found, info = aggregate_runs(recorded, command=format_command_line())
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
    """What changed from the one side to the other."""
    return changes.compare_runs(old.records, new.records, planned=new.planned)
