"""The summary that a person reads in the terminal after a run."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from conformance.measurements import AGREES, TIMED, Measurement
from conformance.records import ERROR, RED, UNJUDGED, UNSUPPORTED, VERDICTS, Record, RunInfo
from reports import conformity, shared_evidence, text_format
from reports.causes import finding_text, root_causes
from reports.causes.finding import Finding, choose_foremost
from reports.speed_section import SpeedPanel, build_speed_panels

MAX_FINDINGS = 10
MAX_LINES = 8
"""Of a finding, beside its title and its command."""
_MAX_WIDTH = 400
STYLES = {
    conformity.CONFORMS: "green",
    conformity.KNOWN_FAILURES: "yellow",
    conformity.DOES_NOT_CONFORM: "bold red",
    conformity.NOT_JUDGED: "yellow",
}


def print_summary(records: Sequence[Record], run: RunInfo, console: Console, page: str = "") -> None:
    """Print the findings, then the counts and the verdict: what matters most stays next to the prompt.

    `page` is where the report is, if there is one.
    """
    standings = conformity.build_standings(records)
    _print_findings(records, run, console, page)
    if standings:
        console.print(_build_table(standings, conformity.count_verdicts(records), run))
    for contender, reason in conformity.iter_not_judged(records):
        console.print(
            Text(f"{contender.label}: {text_format.shorten(reason, longest=300)}", style="dim"), soft_wrap=True
        )
    for standing in standings if len(standings) > 1 else ():
        if less := text_format.format_declared(standing, run):
            console.print(Text(f"{standing.contender.label} declares {less}", style="dim"), soft_wrap=True)
    for differs in shared_evidence.find_flag_differences(records):
        text = f"{differs.contender.label}: {text_format.format_flag_differences(differs)}"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    for left_out in conformity.find_undecided_rows(records):
        console.print(
            Text(f"{left_out.contender.label}: {text_format.format_undecided_rows(left_out)}", style="yellow")
        )
    if run.interrupted:
        console.print(Text("Interrupted: only the records written before the stop are counted.", style="yellow"))
    elif short := text_format.format_shortfall(run):
        console.print(Text(short, style="yellow"))
    if not conformity.count_verdicts(records).judged:
        console.print(Text("No record was judged, so nothing here says that anything is right.", style="yellow"))
    facts = (
        f"level {run.level}, {text_format.format_count(len(records), 'record')}, {text_format.duration(run.seconds)}"
    )
    console.print(Text(text_format.format_headline(standings, run), style="bold"))
    console.print(Text(facts, style="dim"))


def format_findings(records: Sequence[Record], run: RunInfo, page: str = "") -> list[str]:
    """The findings as `print_summary` has them, as plain lines."""
    console = Console(file=(text := io.StringIO()), width=_MAX_WIDTH)
    _print_findings(records, run, console, page)
    return text.getvalue().splitlines()


def _build_table(standings: Sequence[conformity.Standing], total: conformity.Counts, run: RunInfo) -> Table:
    present = [verdict for verdict in VERDICTS if total[verdict]]
    table = Table(show_footer=len(standings) > 1, box=None, pad_edge=False)
    table.add_column("implementation", footer="all", overflow="fold")
    table.add_column("verdict")
    for verdict in present:
        table.add_column(verdict, footer=f"{total[verdict]:,}", justify="right", no_wrap=True)
    table.add_column("sum", footer=f"{total.total:,}", justify="right", no_wrap=True)
    for s in standings:
        words = f"{text_format.GLYPHS[s.conformity]} {text_format.format_standing(s, run)}"
        figures = [_format_figure(s.counts[verdict], verdict) for verdict in present]
        label = Text(s.contender.label)
        table.add_row(label, Text(words, style=STYLES[s.conformity]), *figures, Text(f"{s.counts.total:,}"))
    return table


def _format_figure(number: int, verdict: str) -> Text:
    style = "dim" if not number else ("red" if verdict in RED else "")
    return Text(f"{number:,}", style=style)


def _print_findings(records: Sequence[Record], run: RunInfo, console: Console, page: str) -> None:
    found = root_causes.find_root_causes(records, run.probes)
    shown = choose_foremost(found, MAX_FINDINGS)
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
    title = Text(f"{text_format.GLYPHS[smallest.verdict]} {number} ", style="bold red")
    title.append(f"{finding.contender.label}: {finding_text.format_title(finding)}", style="bold")
    console.print(title, soft_wrap=True)
    figures = [f"{smallest.check}/{smallest.observable} {smallest.case}", *finding_text.list_evidence(smallest)]
    for fact in (*finding_text.list_facts(finding), *figures)[:MAX_LINES]:
        console.print(Text(f"  {fact}"), soft_wrap=True)
    if smallest.reproduce:
        # Neither wrapped, cropped nor indented: the line must survive being copied.
        console.print(Text(smallest.reproduce, style="cyan"), soft_wrap=True)
    console.print()


def _print_failure(record: Record, console: Console) -> None:
    title = Text(f"{text_format.GLYPHS[record.verdict]} {record.verdict} ", style="bold red")
    title.append(f"{conformity.get_contender(record).label} {record.check}/{record.observable}", style="bold")
    console.print(title)
    remedy = f"would pass as declared {record.remedy}" if record.remedy else ""
    facts = (
        record.case,
        text_format.format_judged(record),
        text_format.worst_text(record),
        text_format.pattern_text(record),
        remedy,
    )
    for fact in (*facts, text_format.shorten(record.reason, longest=300)):
        if fact:
            console.print(Text(f"  {fact}"), soft_wrap=True)
    if record.reproduce:
        # Neither wrapped, cropped nor indented: the line must survive being copied.
        console.print(Text(record.reproduce, style="cyan"), soft_wrap=True)
    console.print()


def print_measurements(measurements: Sequence[Measurement], console: Console) -> None:
    """Print implementations side by side: a table for each case and phase, in the order in which they took turns."""
    for comparison in build_speed_panels(measurements):
        title = Text(f"{comparison.phase} ", style="bold")
        title.append(comparison.case, style="")
        console.print(title, soft_wrap=True)
        facts = f"  {comparison.device}, {comparison.rounds} rounds"
        if comparison.ceiling is not None:
            facts += f", ceiling {text_format.rate(comparison.ceiling)} (matrix product)"
        console.print(Text(facts, style="dim"), soft_wrap=True)
        print_uncut(_build_speed_table(comparison), console)
        for row in comparison.rows:
            if row.reason:
                style = "red" if row.outcome not in (UNSUPPORTED, UNJUDGED) else "dim"
                reason = text_format.shorten(row.reason, longest=300)
                console.print(Text(f"  {row.implementation}: {reason}", style=style), soft_wrap=True)
        console.print()


def print_uncut(table: Table, console: Console) -> None:
    """Print a table with no figure cut: where the terminal is too narrow, it wraps the lines."""
    wide = console.options.update(max_width=_MAX_WIDTH)
    wide = wide.update(width=console.measure(table, options=wide).maximum)
    for line in console.render_lines(table, wide, pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        console.print(text, soft_wrap=True)


def _build_speed_table(comparison: SpeedPanel) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  implementation", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for name in ("time", "speed", "quartiles", "work", "of ceiling", "temporaries", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.rows:
        style = {AGREES: "green"}.get(row.outcome, "bold red" if row.outcome in TIMED | {ERROR} else "dim")
        table.add_row(Text(f"  {row.implementation}"), Text(row.outcome, style=style), *_format_costs(row))
    return table


def _format_costs(row: Measurement) -> list[str]:
    if row.seconds is None:
        return []
    speed, spread = "", ""
    if row.speed is not None:
        speed = "1 (baseline)" if row.implementation == row.baseline else text_format.times(row.speed.median)
        spread = f"{text_format.number(row.speed.lower)} to {text_format.number(row.speed.upper)}"
    ceiling = "" if row.of_ceiling is None else f"{text_format.number(100 * row.of_ceiling)}%"
    memory = [text_format.size(row.memory[name]) if name in row.memory else "" for name in ("temporary", "peak")]
    spread = "" if row.implementation == row.baseline else spread
    return [
        text_format.brief(row.seconds.median),
        speed,
        spread,
        text_format.rate(row.flops_per_second),
        ceiling,
        *memory,
    ]
