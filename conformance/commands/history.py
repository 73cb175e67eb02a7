"""`history`: how each implementation fared over many runs, from the oldest to the newest."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from conformance.bench import measurements
from conformance.commands import lookup
from conformance.commands.errors import CannotJudge
from conformance.commands.outputs import command_line, writable, write_summary
from conformance.judging import past
from conformance.judging.evidence import gather
from conformance.judging.past import Past, Piece
from reports import history_page, summary
from reports.history import Changed, Entry, tracks


def history(arguments: argparse.Namespace) -> int:
    """`history`: a table of each implementation's runs, and a page with a chart of each."""
    page = writable(arguments.report, "report") if arguments.report is not None else None
    text = writable(arguments.markdown, "markdown") if arguments.markdown is not None else None
    if page is not None and text is not None and page.resolve() == text.resolve():
        raise CannotJudge(f"two outputs go to {page.name}: give each of --report and --markdown its own file")
    given, notes = _files(arguments.records)
    for option, place in (("report", page), ("markdown", text)):
        if place is not None and place.resolve() in [path.resolve() for group in given for path in group]:
            raise CannotJudge(f"--{option}={place} is one of the files to be read: give it its own file")
    found, more = _read(given)
    notes += more
    if not found:
        raise CannotJudge(f"there is no run in {', '.join(arguments.records)}")
    entries = [_entry(one) for one in found]
    notes += _notes(entries)

    def changed(earlier: int, later: int, implementation: str) -> Sequence[Changed]:
        return past.changed(found[earlier], found[later], implementation)

    made = tracks(entries, changed)
    try:
        if page is not None:
            history_page.write(page, made, entries, notes)
        if text is not None:
            write_summary(text, history_page.markdown(made, entries, notes))
    except OSError as error:
        raise CannotJudge(f"{error.filename or 'an output'} cannot be written: {error.strerror or error}") from error
    history_page.print_history(made, entries, notes, Console())
    return 0


def _files(names: Sequence[str]) -> tuple[list[list[Path]], list[str]]:
    """The files that are named: those joined by commas together, those of a folder one by one."""
    found: list[list[Path]] = []
    notes = []
    for name in names:
        path = lookup.input_file(name)
        if not path.is_dir():
            found.append([lookup.input_file(part) for part in name.split(",")])
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
        return measurements.holds(path)
    except OSError as error:
        raise CannotJudge(f"{path} cannot be read: {error.strerror or error}") from error


def _read(given: Sequence[Sequence[Path]]) -> tuple[list[Past], list[str]]:
    """The runs of files in their order; a run that is there twice, as beside a page, counts once."""
    groups: list[list[Piece]] = []
    notes = []
    seen: list[object] = []
    for paths in given:
        ones = []
        for path in paths:
            found = past.pieces(path, lookup.recorded(str(path)))
            if not found:
                notes.append(f"{path}: nothing is in it")
            for one in found:
                if one.is_of in seen:
                    notes.append(f"{path}: its run is in another file too, and counts once")
                else:
                    seen.append(one.is_of)
                    ones.append(one)
        groups += [ones] if len(paths) > 1 else [[one] for one in ones]
    try:
        return past.in_order(groups), notes
    except ValueError as error:
        raise CannotJudge(str(error)) from error


def _entry(one: Past) -> Entry:
    """A run as reports know it. Raises `CannotJudge` for files that are given as one run, and are not."""
    recorded = [lookup.recorded(str(piece.path))[piece.place] for piece in one.pieces]
    records, info = gather(recorded, command=command_line())
    for record in records:
        if record.run:
            raise CannotJudge(
                f"{','.join(one.sources)} has runs of {record.implementation} that differ, such as of {record.run}: "
                f"give each by itself"
            )
    started = one.started.astimezone(datetime.UTC).isoformat(timespec="seconds") if one.started is not None else ""
    standings = summary.standings(records)
    return Entry(started=started, sources=one.sources, standings=standings, info=info, planned=one.planned)


def _notes(entries: Sequence[Entry]) -> list[str]:
    """What is to be said of single runs, each with the numbers of those that it is said of."""
    said: dict[str, list[int]] = {}
    for number, entry in enumerate(entries, 1):
        for note in entry.info.notes:
            said.setdefault(note, []).append(number)
    return [f"run{'s' if len(n) > 1 else ''} {', '.join(map(str, n))}: {note}" for note, n in said.items()]
