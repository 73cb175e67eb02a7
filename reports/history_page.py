"""Render the history of many runs (`reports.history_tracks`) as an HTML page, as Markdown and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance import output_files
from reports.conformity import CONFORMITY_GLYPHS, CONFORMS, KNOWN_FAILURES
from reports.history_figure import MAX_RUNS, render_history
from reports.history_tracks import RunEntry, RunPoint, RunTrack, format_changed, format_history_headline, format_since
from reports.html_page import STATES
from reports.markdown_text import escape_inline, format_row
from reports.template_environment import create_environment
from reports.terminal import STYLES, print_uncut
from reports.text_format import DASH, format_number, format_share

MAX_ROWS = 200
"""The most runs in a table of the page, which shows the newest. The terminal and Markdown show at most `MAX_LINES`."""
MAX_LINES = 30
MAX_NOTES = 50
_COLUMNS = ("failures", "errors", "judged", "unsupported", "unjudged", "largest", "seconds")


def render_history_page(tracks: Sequence[RunTrack], entries: Sequence[RunEntry], notes: Sequence[str]) -> str:
    """Render the history as the text of an HTML page. The same runs always give the same text."""
    template = create_environment().get_template("history.html.j2")
    return template.render(
        headline=format_history_headline(tracks, entries),
        entries=entries,
        tracks=[(track, render_history(track)) for track in tracks],
        notes=notes,
        max_notes=MAX_NOTES,
        max_rows=MAX_ROWS,
        max_runs=MAX_RUNS,
        format_since=format_since,
        format_changed=format_changed,
        choose_color=_choose_color,
    )


def save_history_page(
    path: Path, tracks: Sequence[RunTrack], entries: Sequence[RunEntry], notes: Sequence[str]
) -> None:
    """Render the history as an HTML page and write it to `path`."""
    output_files.write_text(path, render_history_page(tracks, entries, notes))


def format_history_markdown(tracks: Sequence[RunTrack], entries: Sequence[RunEntry], notes: Sequence[str]) -> str:
    """Format the history of runs as Markdown, with a table for each contender."""
    headline = format_history_headline(tracks, entries)
    blocks = [f"## Attention conformance: history\n\n**{escape_inline(headline)}**"]
    for track in tracks:
        blocks.append(f"### {escape_inline(track.contender.label)}\n\n{escape_inline(format_since(track))}.")
        header = ("run", "began", "level", "asked", "verdict", *_COLUMNS, "changed")
        rows = [format_row(*header), format_row(*["---"] * 5, *["---:"] * len(_COLUMNS), "---")]
        for point in track.points[-MAX_LINES:]:
            changed = "; ".join(map(format_changed, point.changed))
            facts = (str(point.number), point.entry.time, point.level, point.asked, _format_verdict(point))
            rows.append(format_row(*map(escape_inline, facts), *_format_figures(point), escape_inline(changed)))
        blocks.append("\n".join(rows))
        if (more := len(track.points) - MAX_LINES) > 0:
            blocks.append(f"{more:,} earlier runs are not in this table.")
    if notes:
        blocks.append("\n".join(f"- {escape_inline(note)}" for note in notes[:MAX_NOTES]))
    if (more := len(notes) - MAX_NOTES) > 0:
        blocks.append(f"{more:,} more notes are in the terminal only.")
    return "\n\n".join(blocks) + "\n"


def print_history(
    tracks: Sequence[RunTrack], entries: Sequence[RunEntry], notes: Sequence[str], console: Console
) -> None:
    """Print, for each contender, a line for each run and the changes between runs; then a summary of all."""
    for track in tracks:
        console.print(Text(track.contender.label, style="bold"), soft_wrap=True)
        print_uncut(_build_table(track.points[-MAX_LINES:]), console)
        if (more := len(track.points) - MAX_LINES) > 0:
            console.print(Text(f"  and {more:,} earlier runs", style="dim"))
        for point in track.points[-MAX_LINES:]:
            if point.changed:
                changed = "; ".join(map(format_changed, point.changed))
                console.print(Text(f"  before run {point.number}: {changed}", style="dim"), soft_wrap=True)
        console.print(Text(f"  {format_since(track)}\n"), soft_wrap=True)
    for note in notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print(Text(format_history_headline(tracks, entries), style="bold"), soft_wrap=True)


def _choose_color(point: RunPoint) -> str:
    """Return the CSS class that colours a verdict. Only a verdict that says "conforms" has the colour of a pass."""
    return "unsupported" if _is_narrow_pass(point) else STATES[point.conformity]


def _is_narrow_pass(point: RunPoint) -> bool:
    return point.conformity in (CONFORMS, KNOWN_FAILURES) and point.verdict != point.conformity


def _format_verdict(point: RunPoint) -> str:
    return f"{CONFORMITY_GLYPHS[point.conformity]} {point.verdict}"


def _format_figures(point: RunPoint) -> list[str]:
    counts = (point.failures, point.errors, point.judged, point.unsupported, point.unjudged)
    largest = format_share(point.largest) if point.largest is not None else DASH
    return [*(f"{count:,}" for count in counts), largest, format_number(point.seconds)]


def _build_table(points: Sequence[RunPoint]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("  run", "began", "level", "asked", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("file", no_wrap=True)
    for point in points:
        style = "dim" if _is_narrow_pass(point) else STYLES[point.conformity]
        facts = (f"  {point.number}", point.entry.time, point.level, point.asked)
        figures = map(Text, (*_format_figures(point), point.entry.files))
        table.add_row(*map(Text, facts), Text(_format_verdict(point), style=style), *figures)
    return table
