"""The summary that a person reads in the terminal after a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.records import RED, VERDICTS, Record, RunInfo
from reports import summary, wording

MOST_FAILURES = 10
STYLES = {
    summary.CONFORMS: "green",
    summary.KNOWN_FAILURES: "yellow",
    summary.DOES_NOT_CONFORM: "bold red",
    summary.NOT_JUDGED: "yellow",
}


def print_summary(records: Sequence[Record], run: RunInfo, console: Console) -> None:
    """Print the first failures, then the counts and the verdict: what matters most stays next to the prompt."""
    standings = summary.standings(records)
    _print_failures(records, console)
    if standings:
        console.print(_table(standings, summary.count(records), run))
    if run.interrupted:
        console.print(Text("Interrupted: only the records written before the stop are counted.", style="yellow"))
    if not summary.count(records).judged:
        console.print(Text("No record was judged, so nothing here says that anything is right.", style="yellow"))
    facts = f"level {run.level}, {len(records):,} records, {wording.duration(run.seconds)}"
    console.print(Text(wording.headline(standings, run), style="bold"))
    console.print(Text(facts, style="dim"))


def _table(standings: Sequence[summary.Standing], total: summary.Counts, run: RunInfo) -> Table:
    present = [verdict for verdict in VERDICTS if total[verdict]]
    table = Table(show_footer=len(standings) > 1, box=None, pad_edge=False)
    table.add_column("implementation", footer="all", overflow="fold")
    table.add_column("verdict")
    for verdict in present:
        table.add_column(verdict, footer=f"{total[verdict]:,}", justify="right", no_wrap=True)
    table.add_column("sum", footer=f"{total.total:,}", justify="right", no_wrap=True)
    for s in standings:
        words = f"{wording.GLYPHS[s.conformity]} {wording.standing_text(s, run)}"
        figures = [_figure(s.counts[verdict], verdict) for verdict in present]
        label = Text(s.subject.label)
        table.add_row(label, Text(words, style=STYLES[s.conformity]), *figures, Text(f"{s.counts.total:,}"))
    return table


def _figure(number: int, verdict: str) -> Text:
    style = "dim" if not number else ("red" if verdict in RED else "")
    return Text(f"{number:,}", style=style)


def _print_failures(records: Sequence[Record], console: Console) -> None:
    shown, hidden = summary.first_failures(records, cap=MOST_FAILURES)
    for record in shown:
        _print_failure(record, console)
    if hidden:
        console.print(Text(f"… and {hidden:,} more failures\n", style="dim"))


def _print_failure(record: Record, console: Console) -> None:
    title = Text(f"{wording.GLYPHS[record.verdict]} {record.verdict} ", style="bold red")
    title.append(f"{summary.subject_of(record).label} {record.check}/{record.observable}", style="bold")
    console.print(title)
    facts = (record.case, wording.judged_text(record), wording.worst_text(record))
    for fact in (*facts, wording.shorten(record.reason, longest=300)):
        if fact:
            console.print(Text(f"  {fact}"), soft_wrap=True)
    if record.reproduce:
        # Neither wrapped, cropped nor indented: the line must survive being copied.
        console.print(Text(record.reproduce, style="cyan"), soft_wrap=True)
    console.print()
