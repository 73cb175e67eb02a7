"""How verdicts, figures and failures are put into words, the same in every report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from conformance.records import (
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    PASS,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    Extent,
    Record,
    RunInfo,
    Worst,
)
from reports.conformity import (
    CONFORMS,
    DOES_NOT_CONFORM,
    KNOWN_FAILURES,
    NOT_JUDGED,
    Metric,
    Standing,
    UndecidedRows,
    list_metrics,
)
from reports.shared_evidence import FlagDifference, MaskLeak, Remedy

Entry = TypeVar("Entry")

DASH, MINUS, TIMES = "\N{EN DASH}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
GLYPHS = {
    PASS: "✓",
    FAIL: "✗",
    ERROR: "!",
    EXPECTED_FAIL: "≈",
    UNEXPECTED_PASS: "↑",
    UNSUPPORTED: DASH,
    UNJUDGED: "?",
    CONFORMS: "✓",
    KNOWN_FAILURES: "≈",
    DOES_NOT_CONFORM: "✗",
    NOT_JUDGED: "?",
}
"""A sign beside every colour, for those who do not see the colour."""
MAX_REASON = 600
"""A traceback belongs into the JSON lines; a reason this long still says what happened."""


def number(value: float | None, *, digits: int = 3) -> str:
    """A figure for people: three digits, no padded exponent, infinities and NaN spelt out."""
    if value is None:
        return DASH
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.0f}"


def share(value: float | None) -> str:
    """A multiple of the limit, with as many digits as it takes to see on which side of 1 it is."""
    if value is None:
        return "no limit"
    if not math.isfinite(value):
        return number(value)
    digits = 3
    while digits < 17 and value != 1 and number(value, digits=digits) == "1":
        digits += 2
    return f"{number(value, digits=digits)}{TIMES}"


def duration(seconds: float) -> str:
    """Seconds, or minutes and hours where those are easier to grasp."""
    if not math.isfinite(seconds):
        return number(seconds) + " s"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 or seconds == 0 else f"{number(seconds, digits=2)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def brief(seconds: float) -> str:
    """The time of a call, in the unit of which there is at least one."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{number(seconds * factor)} {unit}"
    return f"{number(seconds * 1e9)} ns"


def rate(flops_per_second: float | None) -> str:
    """Floating-point operations a second, in TFLOP/s, or GFLOP/s below one of them."""
    if flops_per_second is None:
        return DASH
    tera = flops_per_second / 1e12
    return f"{number(tera)} TFLOP/s" if tera >= 1 else f"{number(tera * 1e3)} GFLOP/s"


def times(factor: float) -> str:
    """A factor of speed."""
    return f"{number(factor)}{TIMES}"


def size(count: float) -> str:
    """Bytes, in the largest binary unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{number(count)} {unit}"
        count /= 1024
    return f"{number(count)} GiB"


def format_undecided_rows(left_out: UndecidedRows) -> str:
    """What was not judged of cases that were."""
    cases = "1 case" if left_out.cases == 1 else f"{left_out.cases:,} cases"
    return (
        f"{left_out.rows:,} of {left_out.of_rows:,} rows of {cases} not judged: rounding could change which keys they "
        "choose"
    )


def figures(values: Sequence[float]) -> str:
    """A few figures as a list, many as a range."""
    if not values:
        return DASH
    shown = values if len(values) <= 3 else (values[0], values[-1])
    digits = 3
    while digits < 17 and len({number(value, digits=digits) for value in shown}) < len(set(shown)):
        digits += 2
    return (", " if len(values) <= 3 else " to ").join(number(value, digits=digits) for value in shown)


def metric_text(metric: Metric) -> str:
    """What was judged and against what, with enough digits to tell the two apart."""
    name = "max ratio" if metric.name == "max" else "rms ratio"
    if metric.limit is None:
        return f"{name} {number(metric.value)}, no limit"
    digits = 3
    while digits < 17 and metric.value != metric.limit and _is_same_text(metric, digits):
        digits += 3
    return f"{name} {number(metric.value, digits=digits)}, limit {number(metric.limit, digits=digits)}"


def format_judged(record: Record) -> str:
    """All judged figures of a record on one line; empty where nothing was compared."""
    return "; ".join(metric_text(metric) for metric in list_metrics(record))


def worst_text(record: Record) -> str:
    """The worst element: where it is, what came, what was expected, and the bound there."""
    return "" if record.worst is None else format_worst(record.worst)


def format_worst(worst: Worst) -> str:
    """An element: where it is, what came, what was expected, and the bound there."""
    got, expected = _format_distinct(worst.got, worst.expected)
    return f"at {format_index(worst.index)}: got {got}, expected {expected}, bound {number(worst.bound)}"


def pattern_text(record: Record) -> str:
    """Where the error is and what form it has; empty where no pattern fits."""
    return f"pattern: {shorten(record.pattern, longest=300)}" if record.pattern else ""


def format_index(position: Sequence[int]) -> str:
    """An array index as Python writes it."""
    return f"[{', '.join(str(i) for i in position)}]"


def shorten(text: str, *, longest: int = MAX_REASON) -> str:
    """Text cut to a length that a report can hold, saying so."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]} … (cut; all {len(text):,} characters are in the JSON lines)"


def format_standing(standing: Standing, run: RunInfo) -> str:
    """The verdict of a contender in words: "conforms" only where all was asked that a level asks, as is recorded."""
    extent = find_extent(standing, run)
    asked = _format_narrowing(extent)
    if standing.conformity not in (CONFORMS, KNOWN_FAILURES):
        return f"{standing.conformity} ({asked})" if extent.narrowed else standing.conformity
    words = CONFORMS
    if not extent.known:
        words = "passes as far as is known (no run record)"
    elif asked:
        words = f"passes as far as asked ({asked})"
    elif standing.one_check and not extent.stopped:
        words = f"passes in what {standing.one_check} alone judged ({format_count(standing.counts.judged, 'record')})"
    elif extent.stopped:
        words = "passes"
    if _find_entry(run.declared, standing):
        words += " as declared"
    if few := _find_entry(run.few_blocks, standing):
        words += f", asked about {few} only"
    if declined := _format_declined(standing, run):
        words += f", {declined}"
    if pairs := _format_pairs_declined(standing, run):
        words += f", {pairs}"
    if standing.undeclared:
        words += f", {_format_refused(standing)}"
    if _find_entry(run.unsandboxed, standing):
        words += ", judged without a sandbox"
    if extent.stopped:
        words += " so far"
        words += f" ({extent.done:,} of {extent.planned:,} jobs)" if extent.is_partial else ""
    return standing.conformity.replace(CONFORMS, words)


def _format_declined(standing: Standing, run: RunInfo) -> str:
    """How many cases a contender was judged in, and how many it declines; empty if it declines none."""
    row = _find_coverage(standing, run)
    judged, declined = row.get("cases judged"), row.get("declined")
    if not (isinstance(judged, int) and isinstance(declined, int) and declined):
        return ""
    return f"judged in {format_count(judged, 'case')} and declining {declined:,}"


def _format_refused(standing: Standing) -> str:
    """What a contender refuses of cases that it takes by what it declares: how much, and whether most of a check."""
    asked = standing.undeclared + standing.counts.judged
    words = f"refusing {standing.undeclared:,} of {format_count(asked, 'question')} undeclared"
    if not standing.refused:
        return words
    words += f", most of what {standing.refused[0]} asks"
    return (
        f"{words} and {format_count(len(standing.refused) - 1, 'other check')}" if len(standing.refused) > 1 else words
    )


def _format_pairs_declined(standing: Standing, run: RunInfo) -> str:
    """How many pairs of operands a contender declines that takes each of both; empty where most pairs are asked."""
    row = _find_coverage(standing, run)
    declined, pairs = row.get("pairs declined"), row.get("pairs")
    if not (isinstance(declined, int) and isinstance(pairs, int)):
        return ""
    return f"declining {declined:,} of {pairs:,} pairs of operands and masks"


def _find_coverage(standing: Standing, run: RunInfo) -> Mapping[str, Any]:
    names = (standing.contender.label, standing.contender.implementation)
    return next((row for row in run.coverage if row.get("implementation") in names), {})


def find_extent(standing: Standing, run: RunInfo) -> Extent:
    """How much a contender was asked, as far as `run` says."""
    found = _find_entry(run.extents, standing)
    return found or Extent(level=run.level, narrowed=run.narrowed, stopped=run.interrupted)


def _format_narrowing(extent: Extent) -> str:
    """What a contender was asked where that is not all; empty if it is, or if only a stop is why it is not."""
    parts = ["smoke"] if extent.level == "smoke" else []
    if extent.narrowed:
        whole = extent.planned is not None and extent.whole is not None and extent.planned < extent.whole
        of_all = f": {extent.planned:,} of {extent.whole:,} jobs" if whole else ""
        parts.append(f"narrowed to {extent.narrowed}{of_all}")
    if extent.is_partial and not extent.stopped:
        parts.append(f"{'' if extent.narrowed else 'narrowed to '}{extent.done:,} of {extent.planned:,} jobs")
    return ", ".join(parts)


def format_state(run: RunInfo) -> str:
    """Whether the run, or all that are merged, came to an end with all that was planned, and if that is not all."""
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
    """What a reader must know before all else where not all that was planned was judged; empty if it was."""
    if run.interrupted:
        return "The run was interrupted. This page covers only the records written before it stopped."
    if any(not extent.known for extent in run.extents.values()):
        return "There are records without a run record: whether they are all that was planned is unknown."
    partly = [extent for extent in run.extents.values() if extent.is_partial]
    if not partly:
        return ""
    done, planned = sum(extent.done for extent in partly), sum(extent.planned or 0 for extent in partly)
    return f"Not all that was planned was judged: {done:,} of {planned:,} jobs."


def _find_entry(kept: Mapping[str, Entry], standing: Standing) -> Entry | None:
    """What is kept of a contender: by its label, or by the name of its implementation."""
    return kept.get(standing.contender.label, kept.get(standing.contender.implementation))


def format_declared(standing: Standing, run: RunInfo) -> str:
    """What a contender that conforms declares that asks less of it than the defaults; empty if nothing."""
    if standing.conformity not in (CONFORMS, KNOWN_FAILURES):
        return ""
    return ", ".join(_find_entry(run.declared, standing) or ())


def format_mask_leak(found: MaskLeak) -> str:
    """One sentence for all failures of a contender that NaN and infinity behind the mask make."""
    what = f"{format_count(found.count, 'failure')} in {format_count(found.cases, 'case')} ({', '.join(found.checks)})"
    text = f"NaN or infinity behind the mask reaches the results: {what}"
    if not found.remedy:
        return text
    tried = "all" if found.tried == found.count else f"{found.tried:,}"
    return f"{text}; {tried} would pass as declared {found.remedy}"


def format_remedy(found: Remedy) -> str:
    """What a declaration would explain."""
    of = f" of {found.tried:,} on which it was tried" if found.tried > found.count else ""
    failures = f"{format_count(found.count, 'failure')}{of}"
    return f"{failures} in {', '.join(found.checks)} would pass as declared {found.remedy}"


def format_several_remedies(found: Sequence[Remedy]) -> str:
    """What declarations would explain most failures, where none of them explains most alone."""
    often = sorted(found, key=lambda one: (-one.count, one.remedy))
    mended, tried = sum(one.count for one in often), max(one.tried for one in often)
    each = "; ".join(f"{one.count} as {one.remedy}" for one in often)
    return f"{mended:,} of {tried:,} failures would pass as declared: {each}. Declare them together to see if all do"


def format_flag_differences(found: FlagDifference) -> str:
    """What the compiler's flags would have decided."""
    differ = "1 judgement differs" if found.count == 1 else f"{found.count:,} judgements differ"
    return f"{differ} by the compiler's flags, and JAX's own stand: the smallest is {found.smallest.case}"


def format_headline(standings: Sequence[Standing], run: RunInfo) -> str:
    """The whole run in one sentence, without comparing the contenders with each other."""
    if not standings:
        return "Could not be judged: the run left no records."
    if len(standings) == 1:
        less = format_declared(standings[0], run)
        return f"{standings[0].contender.label} {format_standing(standings[0], run)}{f': {less}' if less else ''}."
    tally = Counter(format_standing(standing, run) for standing in standings)
    parts = [f"{count} {_make_plural(words) if count > 1 else words}" for words, count in sorted(tally.items())]
    return f"{len(standings)} implementations: {', '.join(parts)}."


def value(item: Any) -> str:
    """A value of a free-form table (coverage, tolerances) as text."""
    if item is None:
        return DASH
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, float):
        return number(item)
    if isinstance(item, int):
        return f"{item:,}"
    if isinstance(item, dict):
        return ", ".join(f"{name}: {value(inner)}" for name, inner in item.items())
    return ", ".join(value(inner) for inner in item) if isinstance(item, list | tuple) else str(item)


def _format_distinct(got: float, expected: float) -> tuple[str, str]:
    """Both with seven digits, or as many as it takes for their difference to be read off to a tenth."""
    off = abs(got - expected)
    if not 0 < off < math.inf:
        return number(got, digits=7), number(expected, digits=7)
    digits = 7
    while digits < 17 and max(abs(float(f"{x:.{digits}g}") - x) for x in (got, expected)) > off / 20:
        digits += 1
    return number(got, digits=digits), number(expected, digits=digits)


def _is_same_text(metric: Metric, digits: int) -> bool:
    return number(metric.value, digits=digits) == number(metric.limit, digits=digits)


def format_count(number_of: int, noun: str) -> str:
    """How many there are of something."""
    return f"1 {noun}" if number_of == 1 else f"{number_of:,} {noun}s"


def _make_plural(words: str) -> str:
    return words.replace("conforms", "conform").replace("passes", "pass").replace("does not", "do not")
