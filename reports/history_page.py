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
from reports import history_tracks, text_format
from reports.conformity import CONFORMS, DOES_NOT_CONFORM, KNOWN_FAILURES, NOT_JUDGED
from reports.history_figure import MAX_RUNS, render_history
from reports.history_tracks import RunEntry, RunPoint, RunTrack
from reports.template_environment import create_environment
from reports.terminal import STYLES, print_uncut

MAX_ROWS = 200
"""Runs in a table of the page, the newest; in the terminal and in Markdown `MOST_LINES`."""
MAX_LINES = 30
MAX_NOTES = 50
_STATES = {CONFORMS: "pass", KNOWN_FAILURES: "expected", DOES_NOT_CONFORM: "fail", NOT_JUDGED: "unjudged"}
_COLUMNS = ("failures", "errors", "judged", "unsupported", "unjudged", "largest", "seconds")


def render_history_page(made: Sequence[RunTrack], entries: Sequence[RunEntry], notes: Sequence[str]) -> str:
    """The whole page as text; the same runs always give the same text."""
    return (
        create_environment()
        .get_template("history.html.j2")
        .render(
            headline=history_tracks.format_history_headline(made, entries),
            entries=entries,
            # Markup of our own making: matplotlib has escaped the names in it.
            tracks=[(track, Markup(render_history(track))) for track in made],
            notes=notes,
            most_notes=MAX_NOTES,
            most_rows=MAX_ROWS,
            most_runs=MAX_RUNS,
            since_text=history_tracks.format_since,
            changed_text=history_tracks.format_changed,
            state=_choose_color,
            severity=history_tracks.rank_point,
        )
    )


def save_history_page(path: Path, made: Sequence[RunTrack], entries: Sequence[RunEntry], notes: Sequence[str]) -> None:
    """Write the page to `path`."""
    output_files.write_text(path, render_history_page(made, entries, notes))


def _choose_color(point: RunPoint) -> str:
    """The colour of a verdict: that of a pass only where the run was whole."""
    if point.conformity in (CONFORMS, KNOWN_FAILURES) and point.verdict != point.conformity:
        return "unsupported"
    return _STATES[point.conformity]


def _format_figures(point: RunPoint) -> list[str]:
    counts = (point.failures, point.errors, point.judged, point.unsupported, point.unjudged)
    largest = text_format.share(point.largest) if point.largest is not None else text_format.DASH
    return [*(f"{count:,}" for count in counts), largest, text_format.number(point.seconds)]


def format_history_markdown(made: Sequence[RunTrack], entries: Sequence[RunEntry], notes: Sequence[str]) -> str:
    """The history as Markdown text."""
    blocks = [
        f"## Attention conformance: history\n\n**{_escape_inline(history_tracks.format_history_headline(made, entries))}**"
    ]
    for track in made:
        blocks.append(
            f"### {_escape_inline(track.contender.label)}\n\n{_escape_inline(history_tracks.format_since(track))}."
        )
        header = ("run", "began", "level", "asked", "verdict", *_COLUMNS, "changed")
        rows = [_format_row(header), _format_row(["---"] * 5 + ["---:"] * len(_COLUMNS) + ["---"])]
        for point in track.points[-MAX_LINES:]:
            changed = "; ".join(map(history_tracks.format_changed, point.changed))
            words = (str(point.number), point.entry.time, point.level, point.asked)
            verdict = f"{text_format.GLYPHS[point.conformity]} {point.verdict}"
            rows.append(
                _format_row(
                    [
                        *map(_escape_inline, words),
                        _escape_inline(verdict),
                        *_format_figures(point),
                        _escape_inline(changed),
                    ]
                )
            )
        blocks.append("\n".join(rows))
        if (more := len(track.points) - MAX_LINES) > 0:
            blocks.append(f"{more:,} earlier runs are not in this table.")
    if notes:
        blocks.append("\n".join(f"- {_escape_inline(note)}" for note in notes[:MAX_NOTES]))
    if (more := len(notes) - MAX_NOTES) > 0:
        blocks.append(f"{more:,} more notes are in the terminal only.")
    return "\n\n".join(blocks) + "\n"


def print_history(
    made: Sequence[RunTrack], entries: Sequence[RunEntry], notes: Sequence[str], console: Console
) -> None:
    """Print a line for each run of each implementation, what changed between them, and the sentence that sums it up."""
    for track in made:
        console.print(Text(track.contender.label, style="bold"), soft_wrap=True)
        print_uncut(_build_table(track.points[-MAX_LINES:]), console)
        if (more := len(track.points) - MAX_LINES) > 0:
            console.print(Text(f"  and {more:,} earlier runs", style="dim"))
        for point in track.points[-MAX_LINES:]:
            if point.changed:
                what = "; ".join(map(history_tracks.format_changed, point.changed))
                console.print(Text(f"  before run {point.number}: {what}", style="dim"), soft_wrap=True)
        console.print(Text(f"  {history_tracks.format_since(track)}\n"), soft_wrap=True)
    for note in notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print(Text(history_tracks.format_history_headline(made, entries), style="bold"), soft_wrap=True)


def _build_table(points: Sequence[RunPoint]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("  run", "began", "level", "asked", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("file", no_wrap=True)
    for point in points:
        passing = point.conformity in (CONFORMS, KNOWN_FAILURES)
        style = "dim" if passing and point.verdict != point.conformity else STYLES[point.conformity]
        words = Text(f"{text_format.GLYPHS[point.conformity]} {point.verdict}", style=style)
        facts = (f"  {point.number}", point.entry.time, point.level, point.asked)
        figures = map(Text, (*_format_figures(point), point.entry.files))
        table.add_row(*map(Text, facts), words, *figures)
    return table


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape_inline(text: str) -> str:
    """Text that shows as it is: on one line, no markup of Markdown or HTML taking effect."""
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
