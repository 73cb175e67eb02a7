"""Format the summary of a run as short Markdown, to be shown on the page of a CI job.

The headline and warnings come first, then the findings, then the verdict and the counts of each implementation.
"""

from __future__ import annotations

from reports.causes.finding_text import FindingText, choose_foremost
from reports.causes.proposal_text import ProposalText
from reports.conformity import CONFORMITY_GLYPHS
from reports.metrics import Counts
from reports.page_model import Summary
from reports.records import VERDICTS
from reports.text_format import escape_inline, format_command, format_count, format_duration, format_row

MAX_FINDINGS = 10
MAX_NOTES = 20


def format_markdown(summary: Summary) -> str:
    """Format the summary of a run as Markdown."""
    blocks = [f"## Attention conformance\n\n**{escape_inline(summary.headline)}**", _format_facts(summary)]
    blocks += _format_warnings(summary)
    blocks += _format_findings(summary)
    if summary.implementations:
        blocks += [_format_verdicts(summary), _format_counts(summary)]
    blocks += [f"- {escape_inline(note)}" for note in summary.run.notes[:MAX_NOTES]]
    blocks += [f"{escape_inline(r.implementation.label)}: {escape_inline(r.text)}." for r in summary.undecided_rows]
    blocks += [f"{escape_inline(u.implementation.label)}: {escape_inline(u.heading)}." for u in summary.unreached]
    blocks += [f"{escape_inline(d.implementation.label)}: {escape_inline(d.text)}." for d in summary.flag_differences]
    return "\n\n".join(blocks) + "\n"


def _format_facts(summary: Summary) -> str:
    facts = (
        format_count(summary.total.total, "record"),
        format_duration(summary.run.seconds),
        escape_inline(summary.state),
    )
    return f"Level {escape_inline(summary.run.level)}, {', '.join(facts)}."


def _format_warnings(summary: Summary) -> list[str]:
    found = []
    if summary.shortfall:
        found.append(f"> **{escape_inline(summary.shortfall)}**")
    if not summary.total.judged:
        found.append("> **No record was judged**, so nothing here says that anything is right.")
    return found


def _format_verdicts(summary: Summary) -> str:
    return "\n".join(
        f"- {CONFORMITY_GLYPHS[one.conformity]} **{escape_inline(one.implementation.label)}** {escape_inline(one.text)}"
        for one in summary.implementations
    )


def _format_counts(summary: Summary) -> str:
    rows = [
        format_row("implementation", *VERDICTS, "sum"),
        format_row("---", *["---:"] * (len(VERDICTS) + 1)),
    ]
    rows += [
        format_row(escape_inline(one.implementation.label), *_format_verdict_counts(one.counts))
        for one in summary.implementations
    ]
    return "\n".join([*rows, format_row("**all**", *_format_verdict_counts(summary.total))])


def _format_verdict_counts(counts: Counts) -> list[str]:
    return [f"{counts[verdict]:,}" for verdict in VERDICTS] + [f"{counts.total:,}"]


def _format_findings(summary: Summary) -> list[str]:
    if not summary.findings:
        return []
    shown, hidden, failures = choose_foremost(summary.findings, MAX_FINDINGS)
    more = [f"{hidden:,} more findings, of {failures:,} failures, are in the HTML report."] if hidden else []
    return ["### Findings", *map(_format_finding, shown), *more, *map(_format_proposal, summary.proposals)]


def _format_proposal(text: ProposalText) -> str:
    heading, left = escape_inline(text.heading), escape_inline(text.left)
    return "\n\n".join([f"**{heading}**", *map(format_command, text.code), left])


def _format_finding(text: FindingText) -> str:
    finding, smallest = text.finding, text.finding.smallest
    lines = [f"{text.number}. **{escape_inline(f'{finding.implementation.label}: {text.title}')}**"]
    lines += [f"   - {escape_inline(fact)}" for fact in (*text.facts, *text.resemblance)]
    lines += [f"   - {escape_inline(f'{smallest.check}/{smallest.observable} {smallest.case}')}"]
    lines += [f"   - {escape_inline(line)}" for line in text.evidence]
    return "\n".join(lines) + ("\n\n" + format_command(smallest.reproduce) if smallest.reproduce else "")
