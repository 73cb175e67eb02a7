"""Decide whether contenders conform, and say so in words, the same in every report."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from conformance.records import (
    EXPECTED_FAIL,
    FAIL,
    JUDGED,
    PASS,
    REFUSED,
    UNJUDGED,
    UNSUPPORTED,
    Extent,
    Record,
    RunInfo,
)
from reports.metrics import Counts, Metric, count_verdicts, find_worst_metric
from reports.record_groups import Contender
from reports.text_format import GLYPHS, format_count

CONFORMS = "conforms"
KNOWN_FAILURES = "conforms but for known failures"
DOES_NOT_CONFORM = "does not conform"
NOT_JUDGED = "could not be judged"
CONFORMITY_GLYPHS = {
    CONFORMS: GLYPHS[PASS],
    KNOWN_FAILURES: GLYPHS[EXPECTED_FAIL],
    DOES_NOT_CONFORM: GLYPHS[FAIL],
    NOT_JUDGED: GLYPHS[UNJUDGED],
}
"""A sign beside every colour of a conformity, for readers who do not see the colour."""

Entry = TypeVar("Entry")


@dataclasses.dataclass(frozen=True)
class ContenderSummary:
    """Whether a contender conforms, and the counts and words that say so.

    Attributes:
      contender: the implementation and its platform.
      conformity: `CONFORMS`, `KNOWN_FAILURES`, `DOES_NOT_CONFORM` or `NOT_JUDGED`.
      counts: its records by verdict.
      worst: the judged figure closest to its limit or furthest beyond it.
      seconds: what judging took, all processes together.
      checks: those that judged something.
      extent: how much of what was planned was asked.
      text: the conformity as a sentence goes on, with all that qualifies it.
      declared: what it declares that asks less of it than the defaults; empty unless it conforms.
      reason: the commonest reason why it could not be judged; empty if it was.
    """

    contender: Contender
    conformity: str
    counts: Counts
    worst: Metric | None
    seconds: float
    checks: tuple[str, ...]
    extent: Extent
    text: str
    declared: str
    reason: str

    @property
    def is_of_one_check(self) -> bool:
        """Whether a single check judged something: one question answered is no conformity."""
        return len(self.checks) == 1


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """What the records of a run say as a whole.

    Attributes:
      contenders: whether each contender conforms.
      headline: the whole run in one sentence.
      state: whether the run is complete, and to what it was narrowed.
      shortfall: a warning that not all that was planned was judged; empty if it was.
    """

    contenders: tuple[ContenderSummary, ...]
    headline: str
    state: str
    shortfall: str


def compute_conformity(records: Iterable[Record]) -> str:
    """Return whether these records say that a contender conforms.

    Any red record means that it does not conform. Without a single judged record there is nothing to conform by, which
    is never the same as clean.
    """
    return _compute_conformity(count_verdicts(records))


def _compute_conformity(counts: Counts) -> str:
    if counts.red:
        return DOES_NOT_CONFORM
    if not counts.judged:
        return NOT_JUDGED
    return KNOWN_FAILURES if counts[EXPECTED_FAIL] else CONFORMS


def summarize_run(groups: Mapping[Contender, Sequence[Record]], run: RunInfo) -> RunSummary:
    """Summarize the records of a run, grouped by contender."""
    contenders = summarize_contenders(groups, run)
    return RunSummary(contenders, format_headline(contenders), format_state(run), format_shortfall(run))


def summarize_contenders(groups: Mapping[Contender, Sequence[Record]], run: RunInfo) -> tuple[ContenderSummary, ...]:
    """Summarize the records of each contender, in the order given: nothing here ranks contenders."""
    return tuple(_summarize_contender(contender, records, run) for contender, records in groups.items())


def _summarize_contender(contender: Contender, records: Sequence[Record], run: RunInfo) -> ContenderSummary:
    counts = count_verdicts(records)
    conformity = _compute_conformity(counts)
    extent = _find_entry(run.extents, contender)
    extent = extent or Extent(level=run.level, narrowed=run.narrowed, stopped=run.interrupted)
    conforms = conformity in (CONFORMS, KNOWN_FAILURES)
    return ContenderSummary(
        contender=contender,
        conformity=conformity,
        counts=counts,
        worst=find_worst_metric(records),
        seconds=math.fsum(record.seconds for record in records),
        checks=(checks := tuple(dict.fromkeys(record.check for record in records if record.verdict in JUDGED))),
        extent=extent,
        text=_format_conformity(contender, conformity, records, counts, checks, extent, run),
        declared=", ".join(_find_entry(run.declared, contender) or ()) if conforms else "",
        reason=_find_commonest_reason(records) if conformity == NOT_JUDGED else "",
    )


def format_headline(contenders: Sequence[ContenderSummary]) -> str:
    """Format the whole run as one sentence that does not compare contenders with each other."""
    if not contenders:
        return "Could not be judged: the run left no records."
    if len(contenders) == 1:
        (one,) = contenders
        return f"{one.contender.label} {one.text}{f': {one.declared}' if one.declared else ''}."
    tally = Counter(one.text for one in contenders)
    parts = [f"{count} {_make_plural(text) if count > 1 else text}" for text, count in sorted(tally.items())]
    return f"{len(contenders)} implementations: {', '.join(parts)}."


def format_state(run: RunInfo) -> str:
    """Format whether a run is complete, and to what it was narrowed.

    Merged runs are complete if all of them are.
    """
    extents = run.extents.values() or (Extent(level=run.level, narrowed=run.narrowed),)
    if run.interrupted:
        return "interrupted"
    if any(not extent.known for extent in extents):
        return "not known to be complete"
    if any(extent.is_partial for extent in extents):
        return "partial"
    narrowed = list(dict.fromkeys(extent.narrowed for extent in extents))
    smoke = " at smoke" if any(extent.level == "smoke" for extent in extents) else ""
    if not any(narrowed):
        return f"complete{smoke}"
    return f"complete{smoke}, narrowed {f'to {narrowed[0]}' if len(narrowed) == 1 else 'in part'}"


def format_shortfall(run: RunInfo) -> str:
    """Format a warning that not all that was planned was judged; empty if it was."""
    if run.interrupted:
        return "The run was interrupted. This page covers only the records written before it stopped."
    if any(not extent.known for extent in run.extents.values()):
        return "There are records without a run record: whether they are all that was planned is unknown."
    partly = [extent for extent in run.extents.values() if extent.is_partial]
    if not partly:
        return ""
    done, planned = sum(extent.done for extent in partly), sum(extent.planned or 0 for extent in partly)
    return f"Not all that was planned was judged: {done:,} of {planned:,} jobs."


def _find_commonest_reason(records: Sequence[Record]) -> str:
    """Return the commonest reason of unjudged records, or of unsupported ones if none is unjudged."""
    for verdict in (UNJUDGED, UNSUPPORTED):
        reasons = Counter(record.reason for record in records if record.verdict == verdict and record.reason)
        if reasons:
            return reasons.most_common(1)[0][0]
    return ""


def _format_conformity(
    contender: Contender,
    conformity: str,
    records: Sequence[Record],
    counts: Counts,
    checks: Sequence[str],
    extent: Extent,
    run: RunInfo,
) -> str:
    """Format a verdict; it says "conforms" only where the run record shows that all of a level was asked."""
    narrowing = _format_narrowing(extent)
    if conformity not in (CONFORMS, KNOWN_FAILURES):
        return f"{conformity} ({narrowing})" if extent.narrowed else conformity
    text = CONFORMS
    if not extent.known:
        text = "passes as far as is known (no run record)"
    elif narrowing:
        text = f"passes as far as checked ({narrowing})"
    elif len(checks) == 1 and not extent.stopped:
        text = f"passes {checks[0]}, the only check that judged anything ({format_count(counts.judged, 'record')})"
    elif extent.stopped:
        text = "passes"
    if _find_entry(run.declared, contender):
        text += " as declared"
    if few := _find_entry(run.few_blocks, contender):
        text += f", checked on {few} only"
    coverage = _find_coverage(contender, run)
    text += _format_declined_cases(coverage) + _format_declined_pairs(coverage) + _format_refused(records, counts)
    if _find_entry(run.unsandboxed, contender):
        text += ", judged without a sandbox"
    if extent.stopped:
        text += " so far"
        text += f" ({extent.done:,} of {extent.planned:,} jobs)" if extent.is_partial else ""
    return conformity.replace(CONFORMS, text)


def _format_narrowing(extent: Extent) -> str:
    """Format to what the run was narrowed.

    The text is empty if the run was not narrowed. A stop alone is no narrowing.
    """
    parts = ["smoke"] if extent.level == "smoke" else []
    if extent.narrowed:
        is_part = extent.planned is not None and extent.whole is not None and extent.planned < extent.whole
        of_all = f": {extent.planned:,} of {extent.whole:,} jobs" if is_part else ""
        parts.append(f"narrowed to {extent.narrowed}{of_all}")
    if extent.is_partial and not extent.stopped:
        parts.append(f"{'' if extent.narrowed else 'narrowed to '}{extent.done:,} of {extent.planned:,} jobs")
    return ", ".join(parts)


def _format_declined_cases(coverage: Mapping[str, Any]) -> str:
    """Format in how many cases a contender was judged, and how many it declines.

    The text is empty if it declines none.
    """
    judged, declined = coverage.get("cases judged"), coverage.get("declined")
    if not (isinstance(judged, int) and isinstance(declined, int) and declined):
        return ""
    return f", judged in {format_count(judged, 'case')} and declining {declined:,}"


def _format_declined_pairs(coverage: Mapping[str, Any]) -> str:
    """Format how many pairs of operands and masks a contender declines.

    The contender takes each of them alone.

    The coverage states the pairs only where most of them are declined.
    """
    declined, pairs = coverage.get("pairs declined"), coverage.get("pairs")
    if not (isinstance(declined, int) and isinstance(pairs, int)):
        return ""
    return f", declining {declined:,} of {pairs:,} pairs of operands and masks"


def _format_refused(records: Sequence[Record], counts: Counts) -> str:
    """Format how many questions calls refused in cases that are supported by what is declared."""
    undeclared = sum(REFUSED in record.figures for record in records)
    if not undeclared:
        return ""
    questions = format_count(undeclared + counts.judged, "question")
    text = f", refusing {undeclared:,} of {questions} without declaring them unsupported"
    refused = _list_refused_checks(records)
    if refused:
        text += f", most of those of {refused[0]}"
    return f"{text} and {format_count(len(refused) - 1, 'other check')}" if len(refused) > 1 else text


def _list_refused_checks(records: Iterable[Record]) -> list[str]:
    """List the checks that the call refused in most of the supported cases.

    It refused them as a whole, by raising `NotImplementedError`.
    """
    cases: dict[str, dict[str, bool]] = {}
    for record in records:
        refused = REFUSED in record.figures and record.observable == "all"
        if record.verdict in JUDGED or refused:
            asked = cases.setdefault(record.check, {})
            asked[record.case] = asked.get(record.case, True) and refused
    return [check for check, asked in cases.items() if 2 * sum(asked.values()) > len(asked)]


def _find_coverage(contender: Contender, run: RunInfo) -> Mapping[str, Any]:
    names = (contender.label, contender.implementation)
    return next((row for row in run.coverage if row.get("implementation") in names), {})


def _find_entry(entries: Mapping[str, Entry], contender: Contender) -> Entry | None:
    """Return the entry of a contender: by its label, or by the name of its implementation."""
    return entries.get(contender.label, entries.get(contender.implementation))


def _make_plural(text: str) -> str:
    return text.replace("conforms", "conform").replace("passes", "pass").replace("does not", "do not")
