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
from reports import changes, summary, wording
from reports.changes import REGRESSIONS, Comparison
from reports.page import environment

MOST = 20
"""Cases listed of a group; the page and the other texts say how many more there are."""


def render(found: Comparison, old: tuple[Sequence[Record], RunInfo], new: tuple[Sequence[Record], RunInfo]) -> str:
    """The whole page as text; the same comparison always gives the same text."""
    return (
        environment()
        .get_template("changes.html.j2")
        .render(
            headline=changes.headline(found),
            found=found,
            groups=changes.told(found),
            regressions=REGRESSIONS,
            turned_text=changes.turned_text,
            counted=changes.counted,
            standings=[_standings(*old), _standings(*new)],
            totals=changes.totals(old[0], new[0]),
            environments=changes.environments(old[1], new[1]),
            notes=[*old[1].notes, *new[1].notes],
            most=MOST,
            one_moves=changes.ONE_MOVES,
            all_move=changes.ALL_MOVE,
            worth_a_look=changes.WORTH_A_LOOK,
        )
    )


def write(
    path: Path, found: Comparison, old: tuple[Sequence[Record], RunInfo], new: tuple[Sequence[Record], RunInfo]
) -> None:
    """Write the page to `path`."""
    output_files.write_text(path, render(found, old, new))


def _standings(records: Sequence[Record], run: RunInfo) -> list[tuple[str, str]]:
    found = summary.standings(records)
    return [(standing.contender.label, wording.standing_text(standing, run)) for standing in found]


def markdown(found: Comparison) -> str:
    """The comparison as Markdown text."""
    blocks = [f"## Attention conformance: compared\n\n**{_inline(changes.headline(found))}**"]
    for (kind, label, check, observable), group in changes.told(found):
        first = group[0]
        lines = [f"- **{_inline(changes.counted(len(group), kind))}** {_inline(f'{label}, {check} / {observable}')}"]
        lines += [f"  {_inline(changes.turned_text(first))}, as in {_inline(first.record.case)}"]
        if kind in REGRESSIONS and first.record.reproduce:
            lines += ["", f"  ```sh\n  {first.record.reproduce}\n  ```"]
        blocks.append("\n".join(lines))
    blocks += [f"- {_inline(moved_text(one))}" for one in (*found.moved_together, *found.moved_alone[:MOST])]
    return "\n\n".join(blocks) + "\n"


def print_comparison(found: Comparison, console: Console) -> None:
    """Print what changed, and the sentence that sums it up last."""
    for (kind, label, check, observable), group in changes.told(found):
        style = "bold red" if kind in REGRESSIONS else "green" if kind == changes.FIXED else "dim"
        console.print(
            Text(f"{changes.counted(len(group), kind)} {label} {check}/{observable}", style=style), soft_wrap=True
        )
        for change in group[:3]:
            console.print(Text(f"  {changes.turned_text(change)}  {change.record.case}"), soft_wrap=True)
        if kind in REGRESSIONS and group[0].record.reproduce:
            console.print(Text(group[0].record.reproduce, style="cyan"), soft_wrap=True)
    for one in (*found.moved_together, *found.moved_alone[:MOST]):
        console.print(Text(moved_text(one), style="yellow"), soft_wrap=True)
    if (more := len(found.moved_alone) - MOST) > 0:
        console.print(Text(f"{more:,} more ratios moved", style="dim"))
    console.print(Text(changes.headline(found), style="bold"))


def moved_text(moved: changes.Moved) -> str:
    """A ratio that moved, or those of a result."""
    what = f"{moved.contender.label} {moved.check}/{moved.observable} {moved.dtype}"
    by = f"{wording.share(moved.old)} to {wording.share(moved.new)} of the limit"
    if moved.cases == 1:
        return f"moved: {what}, {by}: {moved.example}"
    return f"moved: {what}, in the median of {moved.cases:,} cases {by}; furthest in {moved.example}"


def _inline(text: str) -> str:
    """Text that shows as it is: on one line, no markup of Markdown or HTML taking effect."""
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
