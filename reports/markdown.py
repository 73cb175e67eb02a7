"""A short Markdown summary for the page of a CI job: findings first, then verdicts and counts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from conformance.records import VERDICTS, Record, RunInfo
from reports import findings, summary, wording
from reports.causes import roots, words
from reports.causes.finding import Finding, foremost

MOST_FINDINGS = 10
MOST_NOTES = 20


def render(records: Sequence[Record], run: RunInfo) -> str:
    """The summary as Markdown text."""
    standings = summary.standings(records)
    blocks = [f"## Attention conformance\n\n**{_inline(wording.headline(standings, run))}**", _facts(records, run)]
    blocks += _warnings(records, run)
    blocks += _findings(records, run)
    if standings:
        blocks += [_verdicts(standings, run), _counts(standings, summary.count(records))]
    blocks += [f"- {_inline(note)}" for note in run.notes[:MOST_NOTES]]
    blocks += [f"{_inline(x.contender.label)}: {wording.left_out_text(x)}." for x in summary.left_out(records)]
    differ = findings.flags_differ(records)
    blocks += [f"{_inline(x.contender.label)}: {_inline(wording.flags_differ_text(x))}." for x in differ]
    return "\n\n".join(blocks) + "\n"


def _facts(records: Sequence[Record], run: RunInfo) -> str:
    facts = f"{wording.counted(len(records), 'record')}, {wording.duration(run.seconds)}, {wording.state_text(run)}"
    return f"Level {_inline(run.level)}, {facts}."


def _warnings(records: Sequence[Record], run: RunInfo) -> list[str]:
    found = []
    if short := wording.shortfall_text(run):
        found.append(f"> **{_inline(short)}**")
    if not summary.count(records).judged:
        found.append("> **No record was judged**, so nothing here says that anything is right.")
    return found


def _verdicts(standings: Iterable[summary.Standing], run: RunInfo) -> str:
    return "\n".join(
        f"- {wording.GLYPHS[s.conformity]} **{_inline(s.contender.label)}** {wording.standing_text(s, run)}"
        for s in standings
    )


def _counts(standings: Iterable[summary.Standing], total: summary.Counts) -> str:
    rows = [_row("implementation", *VERDICTS, "sum"), _row("---", *["---:"] * (len(VERDICTS) + 1))]
    rows += [_row(_inline(s.contender.label), *_figures(s.counts)) for s in standings]
    return "\n".join([*rows, _row("**all**", *_figures(total))])


def _figures(counts: summary.Counts) -> list[str]:
    return [f"{counts[verdict]:,}" for verdict in VERDICTS] + [f"{counts.total:,}"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _findings(records: Sequence[Record], run: RunInfo) -> list[str]:
    found = roots.of(records, run.probes)
    if not found:
        return []
    shown = foremost(found, MOST_FINDINGS)
    hidden = len(found) - len(shown)
    failures = sum(len(x.records) for x in found) - sum(len(x.records) for _, x in shown)
    more = [f"{hidden:,} more findings, of {failures:,} failures, are in the HTML report."] if hidden else []
    return ["### Findings", *(_finding(number, one) for number, one in shown), *more, *_diagnoses(run)]


def _diagnoses(run: RunInfo) -> list[str]:
    return [
        "\n".join([f"**{_inline(label)}** is {_inline(lines[0])}", *(f"- {_inline(line)}" for line in lines[1:])])
        for label, lines in run.diagnoses.items()
    ]


def _finding(number: int, finding: Finding) -> str:
    smallest = finding.smallest
    lines = [f"{number}. **{_inline(f'{finding.contender.label}: {words.title(finding)}')}**"]
    lines += [f"   - {_inline(fact)}" for fact in words.facts(finding)]
    lines += [f"   - {_inline(f'{smallest.check}/{smallest.observable} {smallest.case}')}"]
    lines += [f"   - {_inline(fact)}" for fact in words.evidence(smallest)]
    return "\n".join(lines) + ("\n\n" + _fenced(smallest.reproduce) if smallest.reproduce else "")


def _fenced(command: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    body = "\n".join(f"  {line}" for line in command.splitlines())
    return f"  {fence}sh\n{body}\n  {fence}"


def _inline(text: str) -> str:
    """Text that shows as it is: on one line, no markup of Markdown or HTML taking effect."""
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
