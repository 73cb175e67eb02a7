"""Print the summary of a run, or tables of timings, in the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from reports.causes.finding_text import FindingText, choose_foremost
from reports.causes.proposal_text import ProposalText
from reports.causes.sorts import DIFFERS
from reports.conformity import CONFORMITY_GLYPHS, CONFORMS, DOES_NOT_CONFORM, IN_PART, KNOWN_FAILURES, NOT_JUDGED
from reports.page_model import Summary
from reports.printable_text import make_printable
from reports.record_groups import get_implementation
from reports.records import BRANCHES, ERROR, RED, UNJUDGED, UNSUPPORTED, VERDICTS, Record
from reports.records.measurement import AGREES, TIMED, Measurement
from reports.speed_section import SpeedPanel, build_speed_panels
from reports.text_format import (
    GLYPHS,
    format_count,
    format_duration,
    format_factor,
    format_judged,
    format_number,
    format_pattern,
    format_rate,
    format_size,
    format_time,
    format_worst,
    shorten_text,
)

MAX_FINDINGS = 10
MAX_LINES = 9
"""The most lines printed for a finding, not counting its title and its command."""
_MAX_WIDTH = 400
_MAX_REASON = 300
_STYLES = {
    CONFORMS: "green",
    KNOWN_FAILURES: "yellow",
    IN_PART: "bold red",
    DOES_NOT_CONFORM: "bold red",
    NOT_JUDGED: "yellow",
}


def print_summary(summary: Summary, console: Console, page: str = "") -> None:
    """Print the findings, the counts and the verdict of a run, in this order.

    The verdict comes last, so that what matters most is next to the shell's prompt.

    Args:
      page: path of the HTML page, empty if there is none.
    """
    _print_findings(summary, console, page)
    if summary.implementations:
        _print_table(_build_table(summary), console, console.options)
    _print_remarks(summary, console)
    facts = (
        f"level {summary.run.level}",
        format_count(summary.total.total, "record"),
        format_duration(summary.run.seconds),
    )
    console.print(Text(summary.headline, style="bold"), soft_wrap=True)
    console.print(Text(", ".join(facts), style="dim"), soft_wrap=True)


def format_findings(summary: Summary, page: str = "") -> list[str]:
    """Format the findings as `print_summary` prints them, as plain lines."""
    console = Console(file=(text := io.StringIO()), width=_MAX_WIDTH, color_system=None, force_jupyter=False)
    _print_findings(summary, console, page)
    return text.getvalue().splitlines()


def format_finding(text: FindingText) -> str:
    """Format one finding as `print_summary` prints it."""
    console = Console(file=(shown := io.StringIO()), width=_MAX_WIDTH, color_system=None, force_jupyter=False)
    _print_finding(text, console)
    return shown.getvalue().rstrip()


def print_measurements(measurements: Sequence[Measurement], console: Console) -> None:
    """Print timings side by side, in a table per case and phase, with rows in the order of the timing rounds."""
    for panel in build_speed_panels(measurements):
        title = Text(f"{panel.phase} ", style="bold")
        title.append(panel.case, style="")
        console.print(title, soft_wrap=True)
        facts = f"  {panel.device}, {panel.rounds} rounds"
        if panel.ceiling is not None:
            facts += f", ceiling {format_rate(panel.ceiling)} (matrix product)"
        console.print(Text(facts, style="dim"), soft_wrap=True)
        _print_uncut(_build_speed_table(panel), console)
        for row in panel.rows:
            if row.reason:
                style = "red" if row.outcome not in (UNSUPPORTED, UNJUDGED) else "dim"
                reason = shorten_text(row.reason, longest=_MAX_REASON)
                console.print(Text(f"  {row.implementation}: {reason}", style=style), soft_wrap=True)
        console.print()


def _print_uncut(table: Table, console: Console) -> None:
    """Print a table without cutting any column off. A terminal that is too narrow wraps the lines instead."""
    wide = console.options.update(max_width=_MAX_WIDTH)
    _print_table(table, console, wide.update(width=console.measure(table, options=wide).maximum))


def _print_table(table: Table, console: Console, options: ConsoleOptions) -> None:
    """Print a table line by line: a word that is folded may begin a line anywhere."""
    for line in console.render_lines(table, options, pad=False):
        text = Text.assemble(*((make_printable(segment.text), segment.style or "") for segment in line))
        console.print(text, soft_wrap=True)


def _print_remarks(summary: Summary, console: Console) -> None:
    """Print remarks on the counts, such as why an implementation could not be judged."""
    for one in summary.implementations:
        if one.reason:
            reason = shorten_text(one.reason, longest=_MAX_REASON)
            console.print(Text(f"{one.implementation.label}: {reason}", style="dim"), soft_wrap=True)
    for one in summary.implementations if len(summary.implementations) > 1 else ():
        if one.declared:
            text = f"{one.implementation.label} declares {one.declared}"
            console.print(Text(text, style="dim"), soft_wrap=True)
    for difference in summary.flag_differences:
        text = f"{difference.implementation.label}: {difference.text}"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    for found in summary.unreached:
        console.print(Text(f"{found.implementation.label}: {found.heading}", style="yellow"), soft_wrap=True)
        for place, words in found.branches[:MAX_LINES]:
            console.print(Text(f"  {place} {words}"), soft_wrap=True)
        if (more := len(found.branches) - MAX_LINES) > 0:
            console.print(Text(f"  and {more:,} more, in the records of the check {BRANCHES}", style="dim"))
    for rows in summary.undecided_rows:
        console.print(Text(f"{rows.implementation.label}: {rows.text}", style="yellow"), soft_wrap=True)
    if summary.run.interrupted:
        console.print(Text("Interrupted: only the records written before the stop are counted.", style="yellow"))
    elif summary.shortfall:
        console.print(Text(summary.shortfall, style="yellow"), soft_wrap=True)
    if not summary.total.judged:
        console.print(Text("No record was judged, so nothing here says that anything is right.", style="yellow"))


def _build_table(summary: Summary) -> Table:
    total = summary.total
    present = [verdict for verdict in VERDICTS if total[verdict]]
    table = Table(show_footer=len(summary.implementations) > 1, box=None, pad_edge=False)
    table.add_column("implementation", footer="all", overflow="fold")
    table.add_column("verdict")
    for verdict in present:
        table.add_column(verdict, footer=f"{total[verdict]:,}", justify="right", no_wrap=True)
    table.add_column("sum", footer=f"{total.total:,}", justify="right", no_wrap=True)
    for one in summary.implementations:
        verdict_text = Text(f"{CONFORMITY_GLYPHS[one.conformity]} {one.text}", style=_STYLES[one.conformity])
        counts = [_format_verdict_count(one.counts[verdict], verdict) for verdict in present]
        table.add_row(Text(one.implementation.label), verdict_text, *counts, Text(f"{one.counts.total:,}"))
    return table


def _format_verdict_count(count: int, verdict: str) -> Text:
    style = "dim" if not count else ("red" if verdict in RED else "")
    return Text(f"{count:,}", style=style)


def _print_findings(summary: Summary, console: Console, page: str) -> None:
    run, findings = summary.run, summary.findings
    shown, hidden, failures = choose_foremost(findings, MAX_FINDINGS)
    for text in shown:
        _print_finding(text, console)
    if hidden:
        console.print(Text(f"… and {hidden:,} more findings, of {failures:,} failures\n", style="dim"))
    for proposal in summary.proposals:
        _print_proposal(proposal, console)
    if findings and page:
        console.print(Text(f"all findings: {page}#findings", style="dim"), soft_wrap=True)
    command = findings[0].finding.smallest.reproduce if findings else ""
    if (
        command.startswith("python -m conformance run") and "--shrink" not in run.command
    ):  # not a call in Python or a test
        console.print(Text("to find the smallest case that fails like the first finding:", style="dim"))
        console.print(Text(f"{command} --shrink", style="cyan"), soft_wrap=True)


def _print_proposal(text: ProposalText, console: Console) -> None:
    console.print(Text(text.heading, style="bold"), soft_wrap=True)
    for line in text.code:
        _print_command(line, console)
    console.print(Text(f"{text.left}\n", style="bold"), soft_wrap=True)


def _print_finding(text: FindingText, console: Console) -> None:
    """Print a finding in a dozen lines. A finding of only one record is printed as that failure, unless it differs."""
    finding, smallest = text.finding, text.finding.smallest
    if len(finding.records) == 1 and text.sort != DIFFERS:
        _print_failure(finding.records[0], text.resemblance, console)
        return
    title = Text(f"{GLYPHS[smallest.verdict]} {text.number} ", style="bold red")
    title.append(f"{finding.implementation.label}: {text.title}", style="bold")
    console.print(title, soft_wrap=True)
    lines = (*text.facts, f"{smallest.check}/{smallest.observable} {smallest.case}", *text.evidence)
    for line in (*lines[:MAX_LINES], *text.resemblance):
        console.print(Text(f"  {line}"), soft_wrap=True)
    _print_command(smallest.reproduce, console)
    console.print()


def _print_failure(record: Record, resemblance: Sequence[str], console: Console) -> None:
    title = Text(f"{GLYPHS[record.verdict]} {record.verdict} ", style="bold red")
    title.append(f"{get_implementation(record).label} {record.check}/{record.observable}", style="bold")
    console.print(title, soft_wrap=True)
    remedy = f"would pass with the declaration {record.remedy}" if record.remedy else ""
    facts = (record.case, format_judged(record), format_worst(record), format_pattern(record), remedy)
    for fact in (*facts, shorten_text(record.reason, longest=_MAX_REASON), *resemblance):
        if fact:
            console.print(Text(f"  {fact}"), soft_wrap=True)
    _print_command(record.reproduce, console)
    console.print()


def _print_command(command: str, console: Console) -> None:
    if command:
        # The command is not wrapped, cropped or indented, so that it can be copied.
        console.print(Text(command, style="cyan"), soft_wrap=True)


def _build_speed_table(panel: SpeedPanel) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  implementation", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for name in ("time", "speed", "quartiles", "work", "of ceiling", "temporaries", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in panel.rows:
        style = {AGREES: "green"}.get(row.outcome, "bold red" if row.outcome in TIMED | {ERROR} else "dim")
        table.add_row(Text(f"  {row.implementation}"), Text(row.outcome, style=style), *_format_costs(row))
    return table


def _format_costs(row: Measurement) -> list[str]:
    """Format times, speeds and memory of a measurement as the cells of its row; empty if nothing was timed."""
    if row.seconds is None:
        return []
    speed, quartiles = "", ""
    is_baseline = row.implementation == row.baseline
    if row.speed is not None:
        speed = "1 (baseline)" if is_baseline else format_factor(row.speed.median)
        quartiles = "" if is_baseline else f"{format_number(row.speed.lower)} to {format_number(row.speed.upper)}"
    ceiling = "" if row.of_ceiling is None else f"{format_number(100 * row.of_ceiling)}%"
    memory = [format_size(row.memory[name]) if name in row.memory else "" for name in ("temporary", "peak")]
    return [format_time(row.seconds.median), speed, quartiles, format_rate(row.flops_per_second), ceiling, *memory]
