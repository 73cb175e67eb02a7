"""Decide whether each contender (an implementation on a platform) conforms, and put that verdict into words.

Records and the run record go in. Every report shows the resulting summaries, so all reports use the same words.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from reports.metrics import Counts, Metric, count_verdicts, find_worst_metric
from reports.record_groups import Contender
from reports.records import (
    DEFAULT_PRECISION,
    EXPECTED_FAIL,
    FAIL,
    JUDGED,
    PASS,
    REFUSED,
    REFUSED_PRECISION,
    UNJUDGED,
    UNSUPPORTED,
    Extent,
    Record,
    RunInfo,
)
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
"""The sign shown with each verdict on a contender, for readers who cannot see its colour."""

Entry = TypeVar("Entry")
_UNQUALIFIED = re.compile(r"(?:\([^()]*\)|[^,(])+")


@dataclasses.dataclass(frozen=True)
class ContenderSummary:
    """The verdict on one contender, with the counts and words that reports show.

    Attributes:
      contender: the implementation and its platform.
      conformity: `CONFORMS`, `KNOWN_FAILURES`, `DOES_NOT_CONFORM` or `NOT_JUDGED`.
      counts: the number of its records by verdict.
      worst: the judged error figure that is closest to its limit, or furthest beyond it.
      extent: how many of its planned jobs were judged, and whether that is the whole level.
      text: the verdict with its qualifications, as a phrase that follows the contender's name.
      declared: its declarations that lower the requirements below the defaults; empty unless it conforms.
      reason: the most frequent reason why it could not be judged; empty if it was judged.
    """

    contender: Contender
    conformity: str
    counts: Counts
    worst: Metric | None
    extent: Extent
    text: str
    declared: str
    reason: str


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The verdict on each contender of a run, and the sentences at the top of its reports.

    Attributes:
      contenders: the verdict on each contender.
      state: whether the run is complete, and to which part of its level it was narrowed.
      shortfall: a warning that planned jobs were not judged; empty if all were judged.
    """

    contenders: tuple[ContenderSummary, ...]
    headline: str
    state: str
    shortfall: str


def compute_conformity(records: Iterable[Record]) -> str:
    """Return the verdict from a contender's records: any red one does not conform, and none is `NOT_JUDGED`."""
    records = tuple(records)
    return _compute_conformity(records, count_verdicts(records))


def _compute_conformity(records: Iterable[Record], counts: Counts) -> str:
    if counts.red:
        return DOES_NOT_CONFORM
    # If this platform refuses the products of every call, what passes was judged without running the kernel.
    refused = any(REFUSED_PRECISION in record.figures for record in records)
    if not counts.judged or (refused and all(record.ratio is None for record in records)):
        return NOT_JUDGED
    return KNOWN_FAILURES if counts[EXPECTED_FAIL] else CONFORMS


def summarize_run(groups: Mapping[Contender, Sequence[Record]], run: RunInfo) -> RunSummary:
    """Summarize the records of a run, grouped by contender."""
    contenders = summarize_contenders(groups, run)
    return RunSummary(contenders, format_headline(contenders), format_state(run), format_shortfall(run))


def summarize_contenders(groups: Mapping[Contender, Sequence[Record]], run: RunInfo) -> tuple[ContenderSummary, ...]:
    """Summarize the records of each contender. Their order is kept, since reports do not rank contenders."""
    return tuple(_summarize_contender(contender, records, run) for contender, records in groups.items())


def _summarize_contender(contender: Contender, records: Sequence[Record], run: RunInfo) -> ContenderSummary:
    counts = count_verdicts(records)
    conformity = _compute_conformity(records, counts)
    extent = _find_entry(run.extents, contender)
    extent = extent or Extent(level=run.level, narrowed=run.narrowed, stopped=run.interrupted)
    conforms = conformity in (CONFORMS, KNOWN_FAILURES)
    return ContenderSummary(
        contender=contender,
        conformity=conformity,
        counts=counts,
        worst=find_worst_metric(records),
        extent=extent,
        text=_format_conformity(contender, conformity, records, counts, extent, run),
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
    by_verdict: dict[str, list[str]] = {}
    for one in contenders:
        by_verdict.setdefault(_strip_qualifications(one.text), []).append(one.text)
    parts = [_format_equal_verdicts(verdict, texts) for verdict, texts in sorted(by_verdict.items())]
    return f"{len(contenders)} implementations: {', '.join(parts)}."


def _strip_qualifications(text: str) -> str:
    """Return a verdict without what follows its first comma, apart from commas in parentheses."""
    match = _UNQUALIFIED.match(text)
    return match[0] if match else text


def _format_equal_verdicts(verdict: str, texts: Sequence[str]) -> str:
    """Format how many contenders have a verdict; if their qualifications differ, the reader is sent to them."""
    text = texts[0] if len(set(texts)) == 1 else f"{verdict} with qualifications (see the verdict of each)"
    return f"{len(texts)} {_make_plural(text) if len(texts) > 1 else text}"


def format_state(run: RunInfo) -> str:
    """Format whether a run, or each of several merged ones, is complete, and how its level was narrowed."""
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
    """Format a warning that planned jobs were not judged; return an empty text if all were judged."""
    if run.interrupted:
        return "The run was interrupted. This page covers only the records written before it stopped."
    if any(not extent.known for extent in run.extents.values()):
        return "Some records have no run record, so it is unknown whether all that was planned was judged."
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
    extent: Extent,
    run: RunInfo,
) -> str:
    """Format the verdict with its qualifications; "conforms" only if the run record shows a whole level."""
    narrowing = _format_narrowing(extent)
    if conformity not in (CONFORMS, KNOWN_FAILURES):
        return f"{conformity} ({narrowing})" if extent.narrowed else conformity
    checks = sorted({record.check for record in records if record.verdict in JUDGED})
    coverage = _find_coverage(contender, run)
    share = "" if extent.narrowed or extent.is_partial else _format_small_share(coverage)
    comma = "," if share else ""
    text = f"{CONFORMS}{share}"
    if not extent.known:
        text = f"passes{share}{comma} as far as is known (no run record)"
    elif narrowing:
        text = f"passes{share}{comma} as far as checked ({narrowing})"
    elif len(checks) == 1 and not extent.stopped:
        only = f"{checks[0]}, the only check that judged anything ({format_count(counts.judged, 'record')})"
        text = f"passes{share}{comma} {only}"
    elif extent.stopped:
        text = f"passes{share}"
    if _find_entry(run.declared, contender):
        text += " as declared"
    if few := _find_entry(run.few_blocks, contender):
        text += f", checked on {few} only"
    text += _format_declined_cases(coverage) + _format_declined_pairs(coverage) + _format_refused(records, counts)
    if _find_entry(run.unsandboxed, contender):
        text += ", judged without a sandbox"
    if count := sum(REFUSED_PRECISION in record.figures for record in records):
        text += f", with {format_count(count, 'question')} unjudged, as this platform refuses the products' precision"
    if any(DEFAULT_PRECISION in record.figures for record in records):
        text += ", whose f32 products request no precision (bf16 on a TPU, tf32 on a GPU)"
    if extent.stopped:
        text += " so far"
        text += f" ({extent.done:,} of {extent.planned:,} jobs)" if extent.is_partial else ""
    return conformity.replace(CONFORMS, text)


def _format_narrowing(extent: Extent) -> str:
    """Format to which part of its level a run was narrowed; empty if it was not, or only stopped early."""
    parts = ["smoke"] if extent.level == "smoke" else []
    if extent.narrowed:
        is_part = extent.planned is not None and extent.whole is not None and extent.planned < extent.whole
        of_all = f": {extent.planned:,} of {extent.whole:,} jobs" if is_part else ""
        parts.append(f"narrowed to {extent.narrowed}{of_all}")
    if extent.is_partial and not extent.stopped:
        parts.append(f"{'' if extent.narrowed else 'narrowed to '}{extent.done:,} of {extent.planned:,} jobs")
    return ", ".join(parts)


def _format_small_share(coverage: Mapping[str, Any]) -> str:
    """Format the share of cases in which a contender was judged if it is below a half; otherwise the text is empty."""
    judged, declined = _count_cases(coverage)
    if judged >= declined:
        return ""
    percent = 100 * judged / (judged + declined)
    return f" in the {f'{percent:.1g}' if percent < 1 else int(percent)}% of cases that it takes"


def _format_declined_cases(coverage: Mapping[str, Any]) -> str:
    """Format how many cases a contender was judged in and declines; empty if it declines none."""
    judged, declined = _count_cases(coverage)
    return f", judged in {format_count(judged, 'case')} and declining {declined:,}" if declined else ""


def _count_cases(coverage: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of cases in which a contender was judged, and of those that it declines; zeros if unknown."""
    judged, declined = coverage.get("cases judged"), coverage.get("declined")
    return (judged, declined) if isinstance(judged, int) and isinstance(declined, int) else (0, 0)


def _format_declined_pairs(coverage: Mapping[str, Any]) -> str:
    """Format how many pairs of operand and mask are declined together; empty unless most pairs are."""
    declined, pairs = coverage.get("pairs declined"), coverage.get("pairs")
    if not (isinstance(declined, int) and isinstance(pairs, int)):
        return ""
    return f", declining {declined:,} of {pairs:,} pairs of operands and masks"


def _format_refused(records: Sequence[Record], counts: Counts) -> str:
    """Format how many judgements are missing because the call refused a case that its declarations support."""
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
    """List the checks that the call refused, by `NotImplementedError`, in more than half of the supported cases."""
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
    """Return a contender's entry in a table whose keys are contender labels or implementation names, or None."""
    return entries.get(contender.label, entries.get(contender.implementation))


def _make_plural(text: str) -> str:
    return text.replace("conforms", "conform").replace("passes", "pass").replace("does not", "do not")
