"""A short Markdown summary for the page of a CI job: findings first, then verdicts and counts."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from conformance.records import VERDICTS, Record, RunInfo
from reports import conformity, shared_evidence, text_format
from reports.causes import finding_text, root_causes
from reports.causes.finding import Finding, choose_foremost

MAX_FINDINGS = 10
MAX_NOTES = 20


def format_markdown(records: Sequence[Record], run: RunInfo) -> str:
    """The summary as Markdown text."""
    standings = conformity.build_standings(records)
    blocks = [
        f"## Attention conformance\n\n**{_escape_inline(text_format.format_headline(standings, run))}**",
        _format_facts(records, run),
    ]
    blocks += _format_warnings(records, run)
    blocks += _format_findings(records, run)
    if standings:
        blocks += [_format_verdicts(standings, run), _format_counts(standings, conformity.count_verdicts(records))]
    blocks += [f"- {_escape_inline(note)}" for note in run.notes[:MAX_NOTES]]
    blocks += [
        f"{_escape_inline(x.contender.label)}: {text_format.format_undecided_rows(x)}."
        for x in conformity.find_undecided_rows(records)
    ]
    differ = shared_evidence.find_flag_differences(records)
    blocks += [
        f"{_escape_inline(x.contender.label)}: {_escape_inline(text_format.format_flag_differences(x))}."
        for x in differ
    ]
    return "\n\n".join(blocks) + "\n"


def _format_facts(records: Sequence[Record], run: RunInfo) -> str:
    facts = f"{text_format.format_count(len(records), 'record')}, {text_format.duration(run.seconds)}, {text_format.format_state(run)}"
    return f"Level {_escape_inline(run.level)}, {facts}."


def _format_warnings(records: Sequence[Record], run: RunInfo) -> list[str]:
    found = []
    if short := text_format.format_shortfall(run):
        found.append(f"> **{_escape_inline(short)}**")
    if not conformity.count_verdicts(records).judged:
        found.append("> **No record was judged**, so nothing here says that anything is right.")
    return found


def _format_verdicts(standings: Iterable[conformity.Standing], run: RunInfo) -> str:
    return "\n".join(
        f"- {text_format.GLYPHS[s.conformity]} **{_escape_inline(s.contender.label)}** {text_format.format_standing(s, run)}"
        for s in standings
    )


def _format_counts(standings: Iterable[conformity.Standing], total: conformity.Counts) -> str:
    rows = [_format_row("implementation", *VERDICTS, "sum"), _format_row("---", *["---:"] * (len(VERDICTS) + 1))]
    rows += [_format_row(_escape_inline(s.contender.label), *_format_figures(s.counts)) for s in standings]
    return "\n".join([*rows, _format_row("**all**", *_format_figures(total))])


def _format_figures(counts: conformity.Counts) -> list[str]:
    return [f"{counts[verdict]:,}" for verdict in VERDICTS] + [f"{counts.total:,}"]


def _format_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _format_findings(records: Sequence[Record], run: RunInfo) -> list[str]:
    found = root_causes.find_root_causes(records, run.probes)
    if not found:
        return []
    shown = choose_foremost(found, MAX_FINDINGS)
    hidden = len(found) - len(shown)
    failures = sum(len(x.records) for x in found) - sum(len(x.records) for _, x in shown)
    more = [f"{hidden:,} more findings, of {failures:,} failures, are in the HTML report."] if hidden else []
    return ["### Findings", *(_format_finding(number, one) for number, one in shown), *more, *_format_diagnoses(run)]


def _format_diagnoses(run: RunInfo) -> list[str]:
    return [
        "\n".join(
            [
                f"**{_escape_inline(label)}** is {_escape_inline(lines[0])}",
                *(f"- {_escape_inline(line)}" for line in lines[1:]),
            ]
        )
        for label, lines in run.diagnoses.items()
    ]


def _format_finding(number: int, finding: Finding) -> str:
    smallest = finding.smallest
    lines = [f"{number}. **{_escape_inline(f'{finding.contender.label}: {finding_text.format_title(finding)}')}**"]
    lines += [f"   - {_escape_inline(fact)}" for fact in finding_text.list_facts(finding)]
    lines += [f"   - {_escape_inline(f'{smallest.check}/{smallest.observable} {smallest.case}')}"]
    lines += [f"   - {_escape_inline(fact)}" for fact in finding_text.list_evidence(smallest)]
    return "\n".join(lines) + ("\n\n" + _format_command(smallest.reproduce) if smallest.reproduce else "")


def _format_command(command: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    body = "\n".join(f"  {line}" for line in command.splitlines())
    return f"  {fence}sh\n{body}\n  {fence}"


def _escape_inline(text: str) -> str:
    """Text that shows as it is: on one line, no markup of Markdown or HTML taking effect."""
    return re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
