"""A short Markdown summary for the page of a CI job: verdicts, counts and the first failures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from conformance.records import VERDICTS, Record, RunInfo
from reports import findings, summary, wording

MOST_FAILURES = 20
MOST_NOTES = 20


def render(records: Sequence[Record], run: RunInfo) -> str:
    """The summary as Markdown text."""
    standings = summary.standings(records)
    blocks = [f"## Attention conformance\n\n**{_inline(wording.headline(standings, run))}**", _facts(records, run)]
    blocks += _warnings(records, run)
    if standings:
        blocks += [_verdicts(standings, run), _counts(standings, summary.count(records))]
    blocks += [f"- {_inline(note)}" for note in run.notes[:MOST_NOTES]]
    blocks += [f"{_inline(x.contender.label)}: {wording.left_out_text(x)}." for x in summary.left_out(records)]
    differ = findings.flags_differ(records)
    blocks += [f"{_inline(x.contender.label)}: {_inline(wording.flags_differ_text(x))}." for x in differ]
    blocks += _failures(records)
    return "\n\n".join(blocks) + "\n"


def _facts(records: Sequence[Record], run: RunInfo) -> str:
    facts = f"{len(records):,} records, {wording.duration(run.seconds)}, {wording.state_text(run)}"
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


def _failures(records: Sequence[Record]) -> list[str]:
    leaks, others = findings.behind_mask(records)
    shown, hidden = summary.first_failures(others, cap=MOST_FAILURES)
    if not shown and not leaks:
        return []
    more = [f"{hidden:,} more are in the JSON lines and the HTML report."] if hidden else []
    more += [f"{_inline(x.contender.label)}: {_inline(wording.explained_text(x))}." for x in findings.explained(others)]
    return ["### Failures", *(_leak(leak) for leak in leaks), *(_failure(record) for record in shown), *more]


def _leak(leak: findings.BehindMask) -> str:
    lines = [f"- **{_inline(f'{leak.contender.label}, {wording.behind_mask_text(leak)}')}**"]
    lines += [f"  {_inline(f'smallest: {leak.smallest.case}')}"]
    return "\n".join(lines) + ("\n\n" + _fenced(leak.smallest.reproduce) if leak.smallest.reproduce else "")


def _failure(record: Record) -> str:
    contender = summary.contender_of(record).label
    facts = [wording.judged_text(record), wording.worst_text(record), wording.shorten(record.reason, longest=200)]
    facts.insert(2, wording.pattern_text(record))
    what = f"{record.verdict}: {contender}, {record.check} / {record.observable}"
    lines = [f"- **{_inline(what)}** {_inline(record.case)}"]
    lines += [f"  {_inline('; '.join(fact for fact in facts if fact))}"] if any(facts) else []
    return "\n".join(lines) + ("\n\n" + _fenced(record.reproduce) if record.reproduce else "")


def _fenced(command: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    body = "\n".join(f"  {line}" for line in command.splitlines())
    return f"  {fence}sh\n{body}\n  {fence}"


def _inline(text: str) -> str:
    """Text that shows as it is: on one line, no markup of Markdown or HTML taking effect."""
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
