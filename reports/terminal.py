"""The summary that a person reads in the terminal after a run."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.bench.measurements import AGREES, TIMED, Measurement
from conformance.records import ERROR, RED, UNJUDGED, UNSUPPORTED, VERDICTS, Record, RunInfo
from reports import findings, summary, wording
from reports.causes import roots, words
from reports.causes.finding import Finding, foremost
from reports.side_by_side import SpeedPanel, comparisons

MOST_FINDINGS = 10
MOST_LINES = 8
"""Of a finding, beside its title and its command."""
_WIDEST = 400
STYLES = {
    summary.CONFORMS: "green",
    summary.KNOWN_FAILURES: "yellow",
    summary.DOES_NOT_CONFORM: "bold red",
    summary.NOT_JUDGED: "yellow",
}


def print_summary(records: Sequence[Record], run: RunInfo, console: Console, page: str = "") -> None:
    """Print the findings, then the counts and the verdict: what matters most stays next to the prompt.

    `page` is where the report is, if there is one.
    """
    standings = summary.standings(records)
    _print_findings(records, run, console, page)
    if standings:
        console.print(_table(standings, summary.count(records), run))
    for contender, reason in summary.not_judged(records):
        console.print(Text(f"{contender.label}: {wording.shorten(reason, longest=300)}", style="dim"), soft_wrap=True)
    for standing in standings if len(standings) > 1 else ():
        if less := wording.declared_text(standing, run):
            console.print(Text(f"{standing.contender.label} declares {less}", style="dim"), soft_wrap=True)
    for differs in findings.flags_differ(records):
        text = f"{differs.contender.label}: {wording.flags_differ_text(differs)}"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    for left_out in summary.left_out(records):
        console.print(Text(f"{left_out.contender.label}: {wording.left_out_text(left_out)}", style="yellow"))
    if run.interrupted:
        console.print(Text("Interrupted: only the records written before the stop are counted.", style="yellow"))
    elif short := wording.shortfall_text(run):
        console.print(Text(short, style="yellow"))
    if not summary.count(records).judged:
        console.print(Text("No record was judged, so nothing here says that anything is right.", style="yellow"))
    facts = f"level {run.level}, {wording.counted(len(records), 'record')}, {wording.duration(run.seconds)}"
    console.print(Text(wording.headline(standings, run), style="bold"))
    console.print(Text(facts, style="dim"))


def findings_text(records: Sequence[Record], run: RunInfo, page: str = "") -> list[str]:
    """The findings as `print_summary` has them, as plain lines."""
    console = Console(file=(text := io.StringIO()), width=_WIDEST)
    _print_findings(records, run, console, page)
    return text.getvalue().splitlines()


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
        label = Text(s.contender.label)
        table.add_row(label, Text(words, style=STYLES[s.conformity]), *figures, Text(f"{s.counts.total:,}"))
    return table


def _figure(number: int, verdict: str) -> Text:
    style = "dim" if not number else ("red" if verdict in RED else "")
    return Text(f"{number:,}", style=style)


def _print_findings(records: Sequence[Record], run: RunInfo, console: Console, page: str) -> None:
    found = roots.of(records, run.probes)
    shown = foremost(found, MOST_FINDINGS)
    for number, finding in shown:
        _print_finding(number, finding, console)
    if hidden := len(found) - len(shown):
        failures = sum(len(x.records) for x in found) - sum(len(x.records) for _, x in shown)
        console.print(Text(f"… and {hidden:,} more findings, of {failures:,} failures\n", style="dim"))
    for label, lines in run.diagnoses.items():
        console.print(Text(f"{label}: {lines[0]}", style="bold"), soft_wrap=True)
        for line in lines[1:]:
            console.print(Text(f"  {line}"), soft_wrap=True)
        console.print()
    if found and page:
        console.print(Text(f"all of it: {page}#findings", style="dim"), soft_wrap=True)
    if found and found[0].smallest.reproduce and "--shrink" not in run.command:
        console.print(Text("the smallest case that fails like the first:", style="dim"))
        console.print(Text(f"{found[0].smallest.reproduce} --shrink", style="cyan"), soft_wrap=True)


def _print_finding(number: int, finding: Finding, console: Console) -> None:
    """At most ten lines; a finding that is one failure is that failure."""
    if len(finding.records) == 1:
        _print_failure(finding.records[0], console)
        return
    smallest = finding.smallest
    title = Text(f"{wording.GLYPHS[smallest.verdict]} {number} ", style="bold red")
    title.append(f"{finding.contender.label}: {words.title(finding)}", style="bold")
    console.print(title, soft_wrap=True)
    figures = [f"{smallest.check}/{smallest.observable} {smallest.case}", *words.evidence(smallest)]
    for fact in (*words.facts(finding), *figures)[:MOST_LINES]:
        console.print(Text(f"  {fact}"), soft_wrap=True)
    if smallest.reproduce:
        # Neither wrapped, cropped nor indented: the line must survive being copied.
        console.print(Text(smallest.reproduce, style="cyan"), soft_wrap=True)
    console.print()


def _print_failure(record: Record, console: Console) -> None:
    title = Text(f"{wording.GLYPHS[record.verdict]} {record.verdict} ", style="bold red")
    title.append(f"{summary.contender_of(record).label} {record.check}/{record.observable}", style="bold")
    console.print(title)
    remedy = f"would pass as declared {record.remedy}" if record.remedy else ""
    facts = (record.case, wording.judged_text(record), wording.worst_text(record), wording.pattern_text(record), remedy)
    for fact in (*facts, wording.shorten(record.reason, longest=300)):
        if fact:
            console.print(Text(f"  {fact}"), soft_wrap=True)
    if record.reproduce:
        # Neither wrapped, cropped nor indented: the line must survive being copied.
        console.print(Text(record.reproduce, style="cyan"), soft_wrap=True)
    console.print()


def print_measurements(measurements: Sequence[Measurement], console: Console) -> None:
    """Print implementations side by side: a table for each case and phase, in the order in which they took turns."""
    for comparison in comparisons(measurements):
        title = Text(f"{comparison.phase} ", style="bold")
        title.append(comparison.case, style="")
        console.print(title, soft_wrap=True)
        facts = f"  {comparison.device}, {comparison.rounds} rounds"
        if comparison.ceiling is not None:
            facts += f", ceiling {wording.rate(comparison.ceiling)} (matrix product)"
        console.print(Text(facts, style="dim"), soft_wrap=True)
        print_whole(_side_by_side(comparison), console)
        for row in comparison.rows:
            if row.reason:
                style = "red" if row.outcome not in (UNSUPPORTED, UNJUDGED) else "dim"
                reason = wording.shorten(row.reason, longest=300)
                console.print(Text(f"  {row.implementation}: {reason}", style=style), soft_wrap=True)
        console.print()


def print_whole(table: Table, console: Console) -> None:
    """Print a table with no figure cut: where the terminal is too narrow, it wraps the lines."""
    wide = console.options.update(max_width=_WIDEST)
    wide = wide.update(width=console.measure(table, options=wide).maximum)
    for line in console.render_lines(table, wide, pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        console.print(text, soft_wrap=True)


def _side_by_side(comparison: SpeedPanel) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  implementation", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for name in ("time", "speed", "quartiles", "work", "of ceiling", "temporaries", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.rows:
        style = {AGREES: "green"}.get(row.outcome, "bold red" if row.outcome in TIMED | {ERROR} else "dim")
        table.add_row(Text(f"  {row.implementation}"), Text(row.outcome, style=style), *_costs(row))
    return table


def _costs(row: Measurement) -> list[str]:
    if row.seconds is None:
        return []
    speed, spread = "", ""
    if row.speed is not None:
        speed = "1 (baseline)" if row.implementation == row.baseline else wording.times(row.speed.median)
        spread = f"{wording.number(row.speed.lower)} to {wording.number(row.speed.upper)}"
    ceiling = "" if row.of_ceiling is None else f"{wording.number(100 * row.of_ceiling)}%"
    memory = [wording.size(row.memory[name]) if name in row.memory else "" for name in ("temporary", "peak")]
    spread = "" if row.implementation == row.baseline else spread
    return [wording.brief(row.seconds.median), speed, spread, wording.rate(row.flops_per_second), ceiling, *memory]
