"""`compare`: what changed between two runs, or two sets of shards."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from rich.console import Console

from conformance.commands import annotate, lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import command_line, writable, write_summary
from conformance.judging.evidence import gather
from conformance.records import Record, RunInfo
from conformance.runs import Recorded
from reports import changes, changes_page
from reports.changes import Comparison


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    recorded: Sequence[Recorded]
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
    page = writable(arguments.report, "report") if arguments.report is not None else None
    text = writable(arguments.markdown, "markdown") if arguments.markdown is not None else None
    named = [*arguments.old.split(","), *arguments.new.split(",")]
    for option, place in (("report", page), ("markdown", text)):
        if place is not None and place.resolve() in [lookup.input_file(name).resolve() for name in named]:
            raise CannotJudge(f"--{option}={place} is one of the files to be read: give it its own file")
    old, new = side(arguments.old), side(arguments.new)
    found = compared(old, new)
    try:
        if page is not None:
            changes_page.write(page, found, (old.records, old.info), (new.records, new.info))
        if text is not None:
            write_summary(text, changes_page.markdown(found))
    except OSError as error:
        raise CannotJudge(f"{error.filename or 'an output'} cannot be written: {error.strerror or error}") from error
    changes_page.print_comparison(found, Console())
    print("".join(f"{line}\n" for line in annotate.compared(found)), end="")
    return 1 if found.regressions else 0


def side(names: str) -> Side:
    """The runs in files, joined by commas. Raises `CannotJudge` for what cannot be read, or is not one thing."""
    recorded = [one for name in names.split(",") for one in lookup.recorded(name)]
    return side_of(recorded, names)


def side_of(recorded: Sequence[Recorded], names: str) -> Side:
    """Runs as one side. Raises `CannotJudge` for none, and for runs of an implementation that differ."""
    found, info = gather(recorded, command=command_line())
    if not found:
        raise CannotJudge(f"there is no record in {names}")
    for record in found:
        if record.run:
            raise CannotJudge(
                f"{names} has runs of {record.implementation} that differ, such as of {record.run}: compare them with "
                f"each other, each as one side"
            )
    return Side(recorded, found, info)


def compared(old: Side, new: Side) -> Comparison:
    """What changed from the one side to the other."""
    return changes.compare(old.records, new.records, planned=new.planned)
