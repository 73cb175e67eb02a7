"""A history as a page, as Markdown and in the terminal."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance import output_files
from reports import history, wording
from reports.history import Entry, Point, Track
from reports.history_figure import MOST_RUNS, history_svg
from reports.page import environment
from reports.summary import CONFORMS, DOES_NOT_CONFORM, KNOWN_FAILURES, NOT_JUDGED
from reports.terminal import STYLES, print_whole

MOST_ROWS = 200
"""Runs in a table of the page, the newest; in the terminal and in Markdown `MOST_LINES`."""
MOST_LINES = 30
MOST_NOTES = 50
_STATES = {CONFORMS: "pass", KNOWN_FAILURES: "expected", DOES_NOT_CONFORM: "fail", NOT_JUDGED: "unjudged"}
_COLUMNS = ("failures", "errors", "judged", "unsupported", "unjudged", "largest", "seconds")


def render(made: Sequence[Track], entries: Sequence[Entry], notes: Sequence[str]) -> str:
    """The whole page as text; the same runs always give the same text."""
    return (
        environment()
        .get_template("history.html.j2")
        .render(
            headline=history.headline(made, entries),
            entries=entries,
            # Markup of our own making: matplotlib has escaped the names in it.
            tracks=[(track, Markup(history_svg(track))) for track in made],
            notes=notes,
            most_notes=MOST_NOTES,
            most_rows=MOST_ROWS,
            most_runs=MOST_RUNS,
            since_text=history.since_text,
            changed_text=history.changed_text,
            state=_state,
            severity=history.severity,
        )
    )


def write(path: Path, made: Sequence[Track], entries: Sequence[Entry], notes: Sequence[str]) -> None:
    """Write the page to `path`."""
    output_files.write_text(path, render(made, entries, notes))


def _state(point: Point) -> str:
    """The colour of a verdict: that of a pass only where the run was whole."""
    if point.conformity in (CONFORMS, KNOWN_FAILURES) and point.verdict != point.conformity:
        return "unsupported"
    return _STATES[point.conformity]


def _figures(point: Point) -> list[str]:
    counts = (point.failures, point.errors, point.judged, point.unsupported, point.unjudged)
    largest = wording.share(point.largest) if point.largest is not None else wording.DASH
    return [*(f"{count:,}" for count in counts), largest, wording.number(point.seconds)]


def markdown(made: Sequence[Track], entries: Sequence[Entry], notes: Sequence[str]) -> str:
    """The history as Markdown text."""
    blocks = [f"## Attention conformance: history\n\n**{_inline(history.headline(made, entries))}**"]
    for track in made:
        blocks.append(f"### {_inline(track.contender.label)}\n\n{_inline(history.since_text(track))}.")
        header = ("run", "began", "level", "asked", "verdict", *_COLUMNS, "changed")
        rows = [_row(header), _row(["---"] * 5 + ["---:"] * len(_COLUMNS) + ["---"])]
        for point in track.points[-MOST_LINES:]:
            changed = "; ".join(map(history.changed_text, point.changed))
            words = (str(point.number), point.entry.time, point.level, point.asked)
            verdict = f"{wording.GLYPHS[point.conformity]} {point.verdict}"
            rows.append(_row([*map(_inline, words), _inline(verdict), *_figures(point), _inline(changed)]))
        blocks.append("\n".join(rows))
        if (more := len(track.points) - MOST_LINES) > 0:
            blocks.append(f"{more:,} earlier runs are not in this table.")
    if notes:
        blocks.append("\n".join(f"- {_inline(note)}" for note in notes[:MOST_NOTES]))
    if (more := len(notes) - MOST_NOTES) > 0:
        blocks.append(f"{more:,} more notes are in the terminal only.")
    return "\n\n".join(blocks) + "\n"


def print_history(made: Sequence[Track], entries: Sequence[Entry], notes: Sequence[str], console: Console) -> None:
    """Print a line for each run of each implementation, what changed between them, and the sentence that sums it up."""
    for track in made:
        console.print(Text(track.contender.label, style="bold"), soft_wrap=True)
        print_whole(_table(track.points[-MOST_LINES:]), console)
        if (more := len(track.points) - MOST_LINES) > 0:
            console.print(Text(f"  and {more:,} earlier runs", style="dim"))
        for point in track.points[-MOST_LINES:]:
            if point.changed:
                what = "; ".join(map(history.changed_text, point.changed))
                console.print(Text(f"  before run {point.number}: {what}", style="dim"), soft_wrap=True)
        console.print(Text(f"  {history.since_text(track)}\n"), soft_wrap=True)
    for note in notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print(Text(history.headline(made, entries), style="bold"), soft_wrap=True)


def _table(points: Sequence[Point]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("  run", "began", "level", "asked", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("file", no_wrap=True)
    for point in points:
        passing = point.conformity in (CONFORMS, KNOWN_FAILURES)
        style = "dim" if passing and point.verdict != point.conformity else STYLES[point.conformity]
        words = Text(f"{wording.GLYPHS[point.conformity]} {point.verdict}", style=style)
        facts = (f"  {point.number}", point.entry.time, point.level, point.asked)
        figures = map(Text, (*_figures(point), point.entry.files))
        table.add_row(*map(Text, facts), words, *figures)
    return table


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _inline(text: str) -> str:
    """Text that shows as it is: on one line, no markup of Markdown or HTML taking effect."""
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
