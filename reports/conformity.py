"""Decide whether each implementation conforms on its platform, and put that verdict into words.

Records and the run record go in. Every report shows the resulting summaries, so all reports use the same words.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cases.parameter_names import find_operand, name_parameters
from reports.metrics import Counts, Metric, count_verdicts, find_worst_metric
from reports.record_groups import JudgedImplementation
from reports.records import (
    DEFAULT_PRECISION,
    EARLY_END,
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
IN_PART = "conforms in what was called"
DOES_NOT_CONFORM = "does not conform"
NOT_JUDGED = "could not be judged"
CONFORMITY_GLYPHS = {
    CONFORMS: GLYPHS[PASS],
    KNOWN_FAILURES: GLYPHS[EXPECTED_FAIL],
    IN_PART: GLYPHS[FAIL],
    DOES_NOT_CONFORM: GLYPHS[FAIL],
    NOT_JUDGED: GLYPHS[UNJUDGED],
}
"""The sign shown with each verdict on an implementation, for readers who cannot see its colour."""
WRONG = frozenset({IN_PART, DOES_NOT_CONFORM})
"""The verdicts with which a run exits with 1.

With `IN_PART`, a parameter that is probably an operand got nothing, or questions about declarations are open.
"""

Entry = TypeVar("Entry")
_MAX_REASONS = 3


@dataclasses.dataclass(frozen=True)
class VerdictText:
    """The words of a verdict on an implementation, which follow its name.

    Attributes:
      verdict: the verdict itself, such as "conforms as declared".
      declined: in how many cases it was judged, and how many it declines; empty if it declines none.
      qualifications: what limits the verdict further: what was refused, left out or judged in another way.
      uncalled: the parameters that are probably operands, and got nothing.
      open_questions: what has to be answered before the declarations count as meant.
    """

    verdict: str
    declined: str = ""
    qualifications: tuple[str, ...] = ()
    uncalled: str = ""
    open_questions: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = ", ".join(filter(None, (self.verdict, self.declined, *self.qualifications)))
        return f"{text}; never called: {self.uncalled}" if self.uncalled else text


@dataclasses.dataclass(frozen=True)
class ImplementationSummary:
    """The verdict on one implementation, with the counts and words that reports show.

    Attributes:
      implementation: the implementation and its platform.
      conformity: `CONFORMS`, `KNOWN_FAILURES`, `IN_PART`, `DOES_NOT_CONFORM` or `NOT_JUDGED`.
      counts: the number of its records by verdict.
      worst: the judged error figure that is closest to its limit, or furthest beyond it.
      extent: how many of its planned jobs were judged, and whether that is the whole level.
      words: the verdict with its qualifications, as phrases that follow the implementation's name.
      declared: its declarations that lower the requirements below the defaults; empty if something is wrong in it.
      reason: why it could not be judged; empty if it was judged.
    """

    implementation: JudgedImplementation
    conformity: str
    counts: Counts
    worst: Metric | None
    extent: Extent
    words: VerdictText
    declared: str
    reason: str

    @property
    def text(self) -> str:
        """The verdict with its qualifications, as one phrase that follows the implementation's name."""
        return str(self.words)


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The verdict on each implementation of a run, and the sentences at the top of its reports.

    Attributes:
      implementations: the verdict on each implementation.
      headline: one sentence about the whole run.
      heading: the headline without the details of a single implementation, which stand below it on the page.
      state: whether the run is complete, and to which part of its level it was narrowed.
      shortfall: a warning that planned jobs were not judged; empty if all were judged.
    """

    implementations: tuple[ImplementationSummary, ...]
    headline: str
    heading: str
    state: str
    shortfall: str


def compute_conformity(
    records: Iterable[Record], unasked: Collection[str] = (), open_questions: Collection[str] = ()
) -> str:
    """Return the verdict on an implementation from its records, such as `CONFORMS` or `DOES_NOT_CONFORM`.

    With any red record, the implementation does not conform. If no record was judged, the verdict is `NOT_JUDGED` and
    never `CONFORMS`. `unasked` are its parameters to which nothing was passed: with an operand among them, or with open
    questions, it is `IN_PART` at best.
    """
    records = tuple(records)
    return _compute_conformity(records, count_verdicts(records), unasked, open_questions)


def _compute_conformity(
    records: Iterable[Record], counts: Counts, unasked: Iterable[str], open_questions: Collection[str]
) -> str:
    if counts.red:
        return DOES_NOT_CONFORM
    # If this platform refuses the products of every call, what passes was judged without running the kernel.
    refused = any(REFUSED_PRECISION in record.figures for record in records)
    if not counts.judged or (refused and all(record.ratio is None for record in records)):
        return NOT_JUDGED
    if open_questions or any(map(find_operand, unasked)):
        return IN_PART
    return KNOWN_FAILURES if counts[EXPECTED_FAIL] else CONFORMS


def summarize_run(groups: Mapping[JudgedImplementation, Sequence[Record]], run: RunInfo) -> RunSummary:
    """Summarize the records of a run, grouped by implementation."""
    implementations = summarize_implementations(groups, run)
    ends = _list_early_ends(groups, implementations)
    is_explained = not run.interrupted and len(ends) == sum(extent.is_partial for extent in run.extents.values())
    return RunSummary(
        implementations,
        format_headline(implementations),
        format_heading(implementations),
        format_state(run),
        " ".join([*([] if ends and is_explained else filter(None, [format_shortfall(run)])), *ends]),
    )


def summarize_implementations(
    groups: Mapping[JudgedImplementation, Sequence[Record]], run: RunInfo
) -> tuple[ImplementationSummary, ...]:
    """Summarize the records of each implementation. Their order is kept, since reports do not rank implementations."""
    return tuple(_summarize_implementation(implementation, records, run) for implementation, records in groups.items())


def _summarize_implementation(
    implementation: JudgedImplementation, records: Sequence[Record], run: RunInfo
) -> ImplementationSummary:
    counts = count_verdicts(records)
    unasked, questions = (_find_entry(found, implementation) or () for found in (run.unasked, run.open_questions))
    conformity = _compute_conformity(records, counts, unasked, questions)
    extent = _find_entry(run.extents, implementation)
    extent = extent or Extent(level=run.level, narrowed=run.narrowed, stopped=run.interrupted)
    conforms = conformity in (CONFORMS, KNOWN_FAILURES, IN_PART)
    return ImplementationSummary(
        implementation=implementation,
        conformity=conformity,
        counts=counts,
        worst=find_worst_metric(records),
        extent=extent,
        words=_format_conformity(implementation, conformity, records, counts, extent, run),
        declared=", ".join(_find_entry(run.declared, implementation) or ()) if conforms else "",
        reason=_explain_no_judgement(records) if conformity == NOT_JUDGED else "",
    )


def format_headline(implementations: Sequence[ImplementationSummary]) -> str:
    """Format the whole run as one sentence that does not compare implementations with each other."""
    if not implementations:
        return "Could not be judged: the run left no records."
    if len(implementations) == 1:
        (one,) = implementations
        return f"{one.implementation.label} {one.text}{f': {one.declared}' if one.declared else ''}."
    return format_heading(implementations)


def format_heading(implementations: Sequence[ImplementationSummary]) -> str:
    """Format the verdicts of a run as one short sentence, without what each implementation declines and declares."""
    if not implementations:
        return format_headline(implementations)
    by_verdict: dict[str, list[ImplementationSummary]] = {}
    for one in implementations:
        by_verdict.setdefault(one.words.verdict, []).append(one)
    if len(implementations) == 1:
        (one,) = implementations
        return f"{one.implementation.label} {_format_equal_verdicts(one.words.verdict, [one])}."
    parts = []
    for verdict, ones in sorted(by_verdict.items()):
        all_of_them = "both" if len(ones) == 2 else "all"
        count = all_of_them if len(by_verdict) == 1 else str(len(ones))
        parts.append(f"{count} {_format_equal_verdicts(verdict, ones)}")
    return f"{len(implementations)} implementations: {', '.join(parts)}."


def _format_equal_verdicts(verdict: str, ones: Sequence[ImplementationSummary]) -> str:
    """Format the verdict that implementations share, and that some have qualifications if they have.

    What an implementation declines to compute is no qualification: nothing that it offers was left out.
    """
    text = _make_plural(verdict) if len(ones) > 1 else verdict
    return f"{text}, with qualifications" if any(one.words.qualifications for one in ones) else text


def format_state(run: RunInfo) -> str:
    """Format whether a run is complete, partial or interrupted, and to which part of its level it was narrowed.

    Runs that were merged into one report count as complete only if each of them is complete.
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


def _list_early_ends(
    groups: Mapping[JudgedImplementation, Sequence[Record]], implementations: Iterable[ImplementationSummary]
) -> list[str]:
    """List a sentence for each implementation whose jobs ended early, unless another run judged all of them."""
    return [
        f"{one.implementation.label}: {record.reason}."
        for one in implementations
        if one.extent.is_partial
        for record in groups[one.implementation]
        if record.check == EARLY_END
    ]


def count_reasons(reasons: Iterable[str]) -> str:
    """List the commonest of the reasons why cases are unsupported, each with the number of cases; empty without any."""
    counted = Counter(reasons).most_common()
    parts = [f"{reason} ({format_count(count, 'case')})" for reason, count in counted[:_MAX_REASONS]]
    others = sum(count for _, count in counted[_MAX_REASONS:])
    return "; ".join([*parts, *([f"other reasons ({format_count(others, 'case')})"] if others else [])])


def _explain_no_judgement(records: Sequence[Record]) -> str:
    """Return the commonest reason of unjudged records, or of unsupported ones if none is unjudged.

    If no case is supported at all, the text has the reasons with their numbers.
    """
    if all(record.check == "support" for record in records):
        return f"supports no case that was to be judged: {count_reasons(record.reason for record in records)}"
    for verdict in (UNJUDGED, UNSUPPORTED):
        reasons = Counter(record.reason for record in records if record.verdict == verdict and record.reason)
        if reasons:
            return reasons.most_common(1)[0][0]
    return ""


def _format_conformity(
    implementation: JudgedImplementation,
    conformity: str,
    records: Sequence[Record],
    counts: Counts,
    extent: Extent,
    run: RunInfo,
) -> VerdictText:
    """Format the verdict on an implementation with its qualifications.

    The text says "conforms" only if the run record shows that every job of the level was judged.
    """
    narrowing = _format_narrowing(extent)
    if conformity in (DOES_NOT_CONFORM, NOT_JUDGED):
        return VerdictText(f"{conformity} ({narrowing})" if extent.narrowed else conformity)
    checks = sorted({record.check for record in records if record.verdict in JUDGED})
    coverage = _find_coverage(implementation, run)
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
    unasked, questions = (_find_entry(found, implementation) or () for found in (run.unasked, run.open_questions))
    uncalled = name_parameters(filter(find_operand, unasked))
    if uncalled:
        text += " in what was called"
    if _find_entry(run.declared, implementation):
        text += " as declared"
    if extent.stopped:
        text += " so far"
        text += f" ({extent.done:,} of {extent.planned:,} jobs)" if extent.is_partial else ""
    if questions:
        text += f" if {format_count(len(questions), 'open question')} can be answered with yes"
    return VerdictText(
        KNOWN_FAILURES.replace(CONFORMS, text) if counts[EXPECTED_FAIL] else text,
        _format_declined_cases(coverage),
        tuple(filter(None, _list_qualifications(implementation, records, counts, coverage, run, unasked))),
        uncalled,
        questions,
    )


def _list_qualifications(
    implementation: JudgedImplementation,
    records: Sequence[Record],
    counts: Counts,
    coverage: Mapping[str, Any],
    run: RunInfo,
    unasked: Sequence[str],
) -> Iterator[str]:
    """Yield what limits a verdict of "conforms", as phrases; some may be empty."""
    if few := _find_entry(run.few_blocks, implementation):
        yield f"checked on {few} only"
    yield _format_declined_pairs(coverage)
    yield _format_refused(records, counts)
    if _find_entry(run.unsandboxed, implementation):
        yield "judged without a sandbox"
    if count := sum(REFUSED_PRECISION in record.figures for record in records):
        yield f"with {format_count(count, 'comparison')} unjudged, as this platform refuses the products' precision"
    if any(DEFAULT_PRECISION in record.figures for record in records):
        yield "whose f32 products request no precision (bf16 on a TPU, tf32 on a GPU)"
    if others := [name for name in unasked if not find_operand(name)]:
        yield f"with nothing passed to {name_parameters(others)}"


def describe_uncalled(implementations: Iterable[ImplementationSummary]) -> dict[str, str]:
    """Return the verdict on each implementation that is `IN_PART` as a clause, by the name of a failure of the run."""
    parts = [(one.implementation.label, one.text) for one in implementations if one.conformity == IN_PART]
    return {f"never_called[{label}]": f"{label} {text}" for label, text in parts}


def _format_narrowing(extent: Extent) -> str:
    """Format to which part of its level a run was narrowed.

    The text is empty if the run was not narrowed. A run that was only stopped early does not count as narrowed.
    """
    parts = ["smoke"] if extent.level == "smoke" else []
    if extent.narrowed:
        is_part = extent.planned is not None and extent.whole is not None and extent.planned < extent.whole
        of_all = f": {extent.planned:,} of {extent.whole:,} jobs" if is_part else ""
        parts.append(f"narrowed to {extent.narrowed}{of_all}")
    if extent.is_partial and not extent.stopped:
        parts.append(f"{'' if extent.narrowed else 'narrowed to '}{extent.done:,} of {extent.planned:,} jobs")
    return ", ".join(parts)


def _format_small_share(coverage: Mapping[str, Any]) -> str:
    """Format the share of an implementation's cases that were judged; the text is empty if it is at least a half."""
    judged, declined = _count_cases(coverage)
    if judged >= declined:
        return ""
    percent = 100 * judged / (judged + declined)
    return f" in the {f'{percent:.1g}' if percent < 1 else int(percent)}% of cases that it takes"


def _format_declined_cases(coverage: Mapping[str, Any]) -> str:
    """Format the number of cases in which an implementation was judged, and the number of cases that it declines.

    The text is empty if the implementation declines no case.
    """
    judged, declined = _count_cases(coverage)
    return f"judged in {format_count(judged, 'case')} and declining {declined:,}" if declined else ""


def _count_cases(coverage: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of cases in which an implementation was judged, and that it declines; zeros if unknown."""
    judged, declined = coverage.get("cases judged"), coverage.get("declined")
    return (judged, declined) if isinstance(judged, int) and isinstance(declined, int) else (0, 0)


def _format_declined_pairs(coverage: Mapping[str, Any]) -> str:
    """Format how many pairs of an operand and a mask an implementation declines although it takes each separately.

    The coverage table has these numbers only if most pairs are declined. Otherwise the text is empty.
    """
    declined, pairs = coverage.get("pairs declined"), coverage.get("pairs")
    if not (isinstance(declined, int) and isinstance(pairs, int)):
        return ""
    return f"declining {declined:,} of {pairs:,} pairs of operands and masks"


def _format_refused(records: Sequence[Record], counts: Counts) -> str:
    """Format how many judgements are missing because the call refused a case that its declarations support."""
    undeclared = sum(REFUSED in record.figures for record in records)
    if not undeclared:
        return ""
    comparisons = format_count(undeclared + counts.judged, "comparison")
    text = f"refusing {undeclared:,} of {comparisons} without declaring them unsupported"
    refused = _list_refused_checks(records)
    if refused:
        text += f", most of those of {refused[0]}"
    return f"{text} and {format_count(len(refused) - 1, 'other check')}" if len(refused) > 1 else text


def _list_refused_checks(records: Iterable[Record]) -> list[str]:
    """List the checks that the call refused in more than half of the supported cases.

    A check counts as refused in a case if the call raised `NotImplementedError` for the whole check.
    """
    cases: dict[str, dict[str, bool]] = {}
    for record in records:
        refused = REFUSED in record.figures and record.observable == "all"
        if record.verdict in JUDGED or refused:
            asked = cases.setdefault(record.check, {})
            asked[record.case] = asked.get(record.case, True) and refused
    return [check for check, asked in cases.items() if 2 * sum(asked.values()) > len(asked)]


def _find_coverage(implementation: JudgedImplementation, run: RunInfo) -> Mapping[str, Any]:
    names = (implementation.label, implementation.name)
    return next((row for row in run.coverage if row.get("implementation") in names), {})


def _find_entry(entries: Mapping[str, Entry], implementation: JudgedImplementation) -> Entry | None:
    """Return an implementation's entry in a table whose keys are labels or names of implementations, or None."""
    return entries.get(implementation.label, entries.get(implementation.name))


def _make_plural(text: str) -> str:
    return text.replace("conforms", "conform").replace("passes", "pass").replace("does not", "do not")
