"""A comparison as a page, as Markdown and in the terminal."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from conformance import output_files
from conformance.records import Record, RunInfo
from reports import changes, conformity, text_format
from reports.changes import REGRESSIONS, Comparison
from reports.template_environment import create_environment

MAX_CASES = 20
"""Cases listed of a group; the page and the other texts say how many more there are."""


def render_changes_page(
    found: Comparison, old: tuple[Sequence[Record], RunInfo], new: tuple[Sequence[Record], RunInfo]
) -> str:
    """The whole page as text; the same comparison always gives the same text."""
    return (
        create_environment()
        .get_template("changes.html.j2")
        .render(
            headline=changes.format_changes_headline(found),
            found=found,
            groups=changes.list_reported_changes(found),
            regressions=REGRESSIONS,
            turned_text=changes.format_transition,
            counted=changes.format_kind_count,
            standings=[_list_standings(*old), _list_standings(*new)],
            totals=changes.count_totals(old[0], new[0]),
            environments=changes.compare_environments(old[1], new[1]),
            notes=[*old[1].notes, *new[1].notes],
            most=MAX_CASES,
            one_moves=changes.SINGLE_SHIFT,
            all_move=changes.COMMON_SHIFT,
            worth_a_look=changes.MIN_SHARE,
        )
    )


def save_changes_page(
    path: Path, found: Comparison, old: tuple[Sequence[Record], RunInfo], new: tuple[Sequence[Record], RunInfo]
) -> None:
    """Write the page to `path`."""
    output_files.write_text(path, render_changes_page(found, old, new))


def _list_standings(records: Sequence[Record], run: RunInfo) -> list[tuple[str, str]]:
    found = conformity.build_standings(records)
    return [(standing.contender.label, text_format.format_standing(standing, run)) for standing in found]


def format_changes_markdown(found: Comparison) -> str:
    """The comparison as Markdown text."""
    blocks = [f"## Attention conformance: compared\n\n**{_escape_inline(changes.format_changes_headline(found))}**"]
    for (kind, label, check, observable), group in changes.list_reported_changes(found):
        first = group[0]
        lines = [
            f"- **{_escape_inline(changes.format_kind_count(len(group), kind))}** {_escape_inline(f'{label}, {check} / {observable}')}"
        ]
        lines += [f"  {_escape_inline(changes.format_transition(first))}, as in {_escape_inline(first.record.case)}"]
        if kind in REGRESSIONS and first.record.reproduce:
            lines += ["", f"  ```sh\n  {first.record.reproduce}\n  ```"]
        blocks.append("\n".join(lines))
    blocks += [
        f"- {_escape_inline(format_shift(one))}" for one in (*found.moved_together, *found.moved_alone[:MAX_CASES])
    ]
    return "\n\n".join(blocks) + "\n"


def print_comparison(found: Comparison, console: Console) -> None:
    """Print what changed, and the sentence that sums it up last."""
    for (kind, label, check, observable), group in changes.list_reported_changes(found):
        style = "bold red" if kind in REGRESSIONS else "green" if kind == changes.FIXED else "dim"
        console.print(
            Text(f"{changes.format_kind_count(len(group), kind)} {label} {check}/{observable}", style=style),
            soft_wrap=True,
        )
        for change in group[:3]:
            console.print(Text(f"  {changes.format_transition(change)}  {change.record.case}"), soft_wrap=True)
        if kind in REGRESSIONS and group[0].record.reproduce:
            console.print(Text(group[0].record.reproduce, style="cyan"), soft_wrap=True)
    for one in (*found.moved_together, *found.moved_alone[:MAX_CASES]):
        console.print(Text(format_shift(one), style="yellow"), soft_wrap=True)
    if (more := len(found.moved_alone) - MAX_CASES) > 0:
        console.print(Text(f"{more:,} more ratios moved", style="dim"))
    console.print(Text(changes.format_changes_headline(found), style="bold"))


def format_shift(moved: changes.RatioShift) -> str:
    """A ratio that moved, or those of a result."""
    what = f"{moved.contender.label} {moved.check}/{moved.observable} {moved.dtype}"
    by = f"{text_format.share(moved.old)} to {text_format.share(moved.new)} of the limit"
    if moved.cases == 1:
        return f"moved: {what}, {by}: {moved.example}"
    return f"moved: {what}, in the median of {moved.cases:,} cases {by}; furthest in {moved.example}"


def _escape_inline(text: str) -> str:
    """Text that shows as it is: on one line, no markup of Markdown or HTML taking effect."""
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
