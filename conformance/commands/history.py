"""Implement `history`: show the results of each implementation over many runs, from the oldest to the newest."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from conformance import measurements
from conformance.commands.argument_lookup import format_command_line
from conformance.judging import run_history
from conformance.judging.run_aggregation import aggregate_runs
from conformance.judging.run_history import PastRun, RunPiece
from conformance.session import input_files
from conformance.session.failures import CannotJudge
from conformance.session.run_outputs import check_writable, write_summary
from reports import history_page
from reports.conformity import summarize_contenders
from reports.history_tracks import Changed, RunEntry, build_tracks
from reports.record_groups import group_by_contender


def show_history(arguments: argparse.Namespace) -> int:
    """Print a table of the runs of each implementation, and write a page with a chart for each."""
    page = check_writable(arguments.report, "report") if arguments.report is not None else None
    text = check_writable(arguments.markdown, "markdown") if arguments.markdown is not None else None
    if page is not None and text is not None and page.resolve() == text.resolve():
        raise CannotJudge(f"two outputs go to {page.name}: give each of --report and --markdown its own file")
    given, notes = _find_files(arguments.records)
    for option, place in (("report", page), ("markdown", text)):
        if place is not None and place.resolve() in [path.resolve() for group in given for path in group]:
            raise CannotJudge(f"--{option}={place} is one of the files to be read: give it its own file")
    found, more = _read_runs(given)
    notes += more
    if not found:
        raise CannotJudge(f"there is no run in {', '.join(arguments.records)}")
    entries = [_build_entry(one) for one in found]
    notes += _collect_notes(entries)

    def changed(earlier: int, later: int, implementation: str) -> Sequence[Changed]:
        return run_history.find_changes(found[earlier], found[later], implementation)

    made = build_tracks(entries, changed)
    try:
        if page is not None:
            history_page.save_history_page(page, made, entries, notes)
        if text is not None:
            write_summary(text, history_page.format_history_markdown(made, entries, notes))
    except OSError as error:
        raise CannotJudge(f"{error.filename or 'an output'} cannot be written: {error.strerror or error}") from error
    history_page.print_history(made, entries, notes, Console())
    return 0


def _find_files(names: Sequence[str]) -> tuple[list[list[Path]], list[str]]:
    """Find the named files, and return notes on skipped files. Files joined by commas form one group, of one run."""
    found: list[list[Path]] = []
    notes = []
    for name in names:
        path = input_files.parse_input_path(name)
        if not path.is_dir():
            found.append([input_files.parse_input_path(part) for part in name.split(",")])
            continue
        there = sorted(path.rglob("*.jsonl"))
        timed = [one for one in there if _holds_measurements(one)]
        notes += [f"{one.name}: measurements of `bench`, which have no verdict" for one in timed]
        found += [[one] for one in there if one not in timed]
        if len(timed) == len(there):
            raise CannotJudge(f"{name} has no file of records: they are called NAME.jsonl")
    return found, notes


def _holds_measurements(path: Path) -> bool:
    try:
        return measurements.has_measurements(path)
    except OSError as error:
        raise CannotJudge(f"{path} cannot be read: {error.strerror or error}") from error


def _read_runs(given: Sequence[Sequence[Path]]) -> tuple[list[PastRun], list[str]]:
    """Read the runs of the files, ordered by time. A run that is in two files counts once."""
    groups: list[list[RunPiece]] = []
    notes = []
    seen: list[object] = []
    for paths in given:
        ones = []
        for path in paths:
            found = run_history.list_pieces(path, input_files.read_recorded_runs(str(path)))
            if not found:
                notes.append(f"{path}: the file has no run")
            for one in found:
                if one.identity in seen:
                    notes.append(f"{path}: its run is also in another file, and counts once")
                else:
                    seen.append(one.identity)
                    ones.append(one)
        groups += [ones] if len(paths) > 1 else [[one] for one in ones]
    try:
        return run_history.order_runs(groups), notes
    except ValueError as error:
        raise CannotJudge(str(error)) from error


def _build_entry(one: PastRun) -> RunEntry:
    """Build the entry of a run for reports. Raises `CannotJudge` if its files hold runs that differ."""
    recorded = [input_files.read_recorded_runs(str(piece.path))[piece.place] for piece in one.pieces]
    records, info = aggregate_runs(recorded, command=format_command_line())
    for record in records:
        if record.run:
            raise CannotJudge(
                f"{','.join(one.sources)} has runs of {record.implementation} that differ, such as of {record.run}: "
                f"give each by itself"
            )
    started = one.started.astimezone(datetime.UTC).isoformat(timespec="seconds") if one.started is not None else ""
    contenders = summarize_contenders(group_by_contender(records), info)
    return RunEntry(started=started, sources=one.sources, contenders=contenders, info=info, planned=one.planned)


def _collect_notes(entries: Sequence[RunEntry]) -> list[str]:
    """Collect the notes on runs, each note once, with the numbers of the runs that it applies to."""
    said: dict[str, list[int]] = {}
    for number, entry in enumerate(entries, 1):
        for note in entry.info.notes:
            said.setdefault(note, []).append(number)
    return [f"run{'s' if len(n) > 1 else ''} {', '.join(map(str, n))}: {note}" for note, n in said.items()]
