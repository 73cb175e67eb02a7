"""Render the comparison of two runs (`reports.changes`) as an HTML page, as Markdown and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from reports import output_files
from reports.changes import (
    COMMON_SHIFT,
    FIXED,
    MIN_SHARE,
    REGRESSIONS,
    SINGLE_SHIFT,
    ChangeGroup,
    Comparison,
    RatioShift,
    compare_environments,
    count_totals,
    format_changes_headline,
    format_kind_count,
    format_transition,
    group_changes_by_cause,
    list_reported_changes,
)
from reports.conformity import summarize_implementations
from reports.record_groups import group_by_implementation
from reports.records import Record, RunInfo
from reports.template_environment import create_environment
from reports.text_format import escape_inline, format_command, format_count, format_share

MAX_CASES = 20
"""The most cases listed for one group of changes, and the most single ratios listed in Markdown and the terminal."""

Side = tuple[Sequence[Record], RunInfo]
"""One of the two runs: its records and its run record."""


def render_changes_page(found: Comparison, old: Side, new: Side) -> str:
    """Render the comparison as the text of an HTML page. The same comparison always gives the same text."""
    template = create_environment().get_template("changes.html.j2")
    return template.render(
        headline=format_changes_headline(found),
        found=found,
        groups=group_changes_by_cause(found),
        list_facts=_list_facts,
        format_count=format_count,
        regressions=REGRESSIONS,
        format_transition=format_transition,
        format_kind_count=format_kind_count,
        verdicts=[_list_verdicts(*old), _list_verdicts(*new)],
        totals=count_totals(old[0], new[0]),
        environments=compare_environments(old[1], new[1]),
        notes=[*old[1].notes, *new[1].notes],
        max_cases=MAX_CASES,
        single_shift=SINGLE_SHIFT,
        common_shift=COMMON_SHIFT,
        min_share=MIN_SHARE,
    )


def save_changes_page(path: Path, found: Comparison, old: Side, new: Side) -> None:
    """Render the comparison as an HTML page and write it to `path`."""
    output_files.write_text(path, render_changes_page(found, old, new))


def format_changes_markdown(found: Comparison) -> str:
    """Format the comparison of two runs as Markdown, a block for each cause."""
    blocks = [f"## Attention conformance: compared\n\n**{escape_inline(format_changes_headline(found))}**"]
    for group in group_changes_by_cause(found):
        first, title = group.changes[0], escape_inline(f"{group.implementation}: {group.title}")
        lines = [f"- **{escape_inline(_format_count(group))}** {title}"]
        lines += [f"  {escape_inline(line)}" for line in _list_facts(group)]
        lines += [f"  {escape_inline(format_transition(first))}, as in {escape_inline(first.record.case)}"]
        if group.kind in REGRESSIONS and (command := _choose_command(group)):
            lines += ["", format_command(command)]
        blocks.append("\n".join(lines))
    shifts = (*found.common_shifts, *found.single_shifts[:MAX_CASES])
    blocks += [f"- {escape_inline(format_shift(shift))}" for shift in shifts]
    return "\n\n".join(blocks) + "\n"


def print_comparison(found: Comparison, console: Console, *, lists_all: bool = False) -> None:
    """Print the changes between two runs, then one sentence that sums them up.

    Args:
      found: the comparison.
      console: to print to.
      lists_all: whether each changed judgement is printed, by check and result, in place of the causes.
    """
    if lists_all:
        _print_every_change(found, console)
    else:
        for group in group_changes_by_cause(found):
            title = f"{_format_count(group)} {group.implementation}: {group.title}"
            console.print(Text(title, style=_choose_style(group.kind)), soft_wrap=True)
            for line in (*_list_facts(group), f"{format_transition(group.changes[0])}  {group.changes[0].record.case}"):
                console.print(Text(f"  {line}"), soft_wrap=True)
            if group.kind in REGRESSIONS and (command := _choose_command(group)):
                console.print(Text(command, style="cyan"), soft_wrap=True)
        if any(len(group.changes) > 1 for group in group_changes_by_cause(found)):
            console.print(Text("`compare --all` lists every judgement that changed", style="dim"), soft_wrap=True)
    for shift in (*found.common_shifts, *found.single_shifts[:MAX_CASES]):
        console.print(Text(format_shift(shift), style="yellow"), soft_wrap=True)
    if (more := len(found.single_shifts) - MAX_CASES) > 0:
        console.print(Text(f"{more:,} more ratios moved", style="dim"))
    console.print(Text(format_changes_headline(found), style="bold"), soft_wrap=True)


def _print_every_change(found: Comparison, console: Console) -> None:
    """Print each change that is reported, by kind, check and result."""
    for (kind, label, check, observable), group in list_reported_changes(found):
        title = f"{format_kind_count(len(group), kind)} {label} {check}/{observable}"
        console.print(Text(title, style=_choose_style(kind)), soft_wrap=True)
        for change in group:
            console.print(Text(f"  {format_transition(change)}  {change.record.case}"), soft_wrap=True)
        if kind in REGRESSIONS and group[0].record.reproduce:
            console.print(Text(group[0].record.reproduce, style="cyan"), soft_wrap=True)


def _choose_style(kind: str) -> str:
    return "bold red" if kind in REGRESSIONS else "green" if kind == FIXED else "dim"


def _format_count(group: ChangeGroup) -> str:
    count = format_kind_count(len(group.changes), group.kind)
    return count if len(group.changes) == 1 else f"{count} in {format_count(group.cases, 'case')}:"


def _list_facts(group: ChangeGroup) -> tuple[str, ...]:
    """List what is known of the cause of new failures, a line each."""
    if group.finding is None or group.kind not in REGRESSIONS:
        return ()
    return (*group.finding.facts, *group.finding.resemblance)


def _choose_command(group: ChangeGroup) -> str:
    """Choose the command that repeats a failure: that of the finding, which has the plainest case."""
    if group.finding is not None and group.finding.finding.smallest.reproduce:
        return group.finding.finding.smallest.reproduce
    return group.changes[0].record.reproduce


def format_shift(shift: RatioShift) -> str:
    """Format the change of a single error ratio, or of the median ratio of a result, as one line."""
    what = f"{shift.implementation.label} {shift.check}/{shift.observable} {shift.dtype}"
    change = f"{format_share(shift.old)} to {format_share(shift.new)} of the limit"
    if shift.cases == 1:
        return f"moved: {what}, {change}: {shift.example}"
    return f"moved: {what}, in the median of {shift.cases:,} cases {change}; furthest in {shift.example}"


def _list_verdicts(records: Sequence[Record], run: RunInfo) -> list[tuple[str, str]]:
    """List each implementation's label with a phrase that says whether it conforms."""
    summaries = summarize_implementations(group_by_implementation(records), run)
    return [(one.implementation.label, one.text) for one in summaries]
