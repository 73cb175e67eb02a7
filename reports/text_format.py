"""Format numbers, error figures, tensor elements and counts as text, in the same way for every report."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from reports.metrics import Metric, list_metrics
from reports.records import (
    ERROR,
    EXPECTED_FAIL,
    FAIL,
    PASS,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    Record,
    Worst,
)

DASH, MINUS, TIMES = "\N{EN DASH}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
GLYPHS = {
    PASS: "✓",
    FAIL: "✗",
    ERROR: "!",
    EXPECTED_FAIL: "≈",
    UNEXPECTED_PASS: "↑",
    UNSUPPORTED: DASH,
    UNJUDGED: "?",
}
"""The sign shown with each verdict, for readers who cannot see its colour."""
MAX_REASON = 600
"""The most characters of a reason in a report, enough to say what happened. The JSON lines have the whole traceback."""


def format_number(value: float | None, *, digits: int = 3) -> str:
    """Format a number with three significant digits by default, such as `1.5e-7`, `∞` or `NaN`."""
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


def format_share(value: float | None) -> str:
    """Format an error figure as a multiple of its limit, with enough digits to show on which side of 1 it is."""
    if value is None:
        return "no limit"
    if not math.isfinite(value):
        return format_number(value)
    digits = 3
    while digits < 17 and value != 1 and format_number(value, digits=digits) == "1":
        digits += 2
    return f"{format_number(value, digits=digits)}{TIMES}"


def format_multiple(share: float | None) -> str:
    """Format a multiple of a limit for a sentence: with a times sign whatever it is."""
    text = format_share(share)
    return text if share is None or text.endswith(TIMES) else f"{text}{TIMES}"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, or from one minute on in minutes or hours."""
    if not math.isfinite(seconds):
        return format_number(seconds) + " s"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 or seconds == 0 else f"{format_number(seconds, digits=2)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_rough_duration(seconds: float) -> str:
    """Format a duration that is a guess, with as few digits as it deserves."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min"


def format_time(seconds: float) -> str:
    """Format the time of a call in the largest unit (s, ms, µs or ns) in which it is at least 1."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{format_number(seconds * factor)} {unit}"
    return f"{format_number(seconds * 1e9)} ns"


def format_rate(flops_per_second: float | None) -> str:
    """Format floating-point operations per second in TFLOP/s, or in GFLOP/s if they are below 1 TFLOP/s."""
    if flops_per_second is None:
        return DASH
    tera = flops_per_second / 1e12
    return f"{format_number(tera)} TFLOP/s" if tera >= 1 else f"{format_number(tera * 1e3)} GFLOP/s"


def format_factor(factor: float) -> str:
    """Format a speed relative to the baseline as a factor, with a multiplication sign after it."""
    return f"{format_number(factor)}{TIMES}"


def format_size(count: float) -> str:
    """Format a number of bytes in the largest binary unit (up to GiB) in which it is at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{format_number(count)} {unit}"
        count /= 1024
    return f"{format_number(count)} GiB"


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun, such as `1 record` or `2 records`."""
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}s"


def format_figures(values: Sequence[float]) -> str:
    """Format up to three sorted numbers as a list, and more of them as a range."""
    if not values:
        return DASH
    shown = values if len(values) <= 3 else (values[0], values[-1])
    digits = 3
    while digits < 17 and len({format_number(value, digits=digits) for value in shown}) < len(set(shown)):
        digits += 2
    return (", " if len(values) <= 3 else " to ").join(format_number(value, digits=digits) for value in shown)


def format_metric(metric: Metric) -> str:
    """Format a judged error figure and its limit, with enough digits to show that the two differ."""
    name = "max ratio" if metric.name == "max" else "rms ratio"
    if metric.limit is None:
        return f"{name} {format_number(metric.value)}, no limit"
    digits = 3
    while (
        digits < 17
        and metric.value != metric.limit
        and format_number(metric.value, digits=digits) == format_number(metric.limit, digits=digits)
    ):
        digits += 3
    value, limit = (format_number(figure, digits=digits) for figure in (metric.value, metric.limit))
    return f"{name} {value}, limit {limit}"


def format_judged(record: Record) -> str:
    """Format all judged error figures of a record on one line; empty if nothing was compared."""
    return "; ".join(map(format_metric, list_metrics(record)))


def format_worst(record: Record) -> str:
    """Format the worst element of a record; empty where there is none."""
    return "" if record.worst is None else format_element(record.worst)


def format_element(worst: Worst) -> str:
    """Format a tensor element: its index, the computed and the expected value, and the bound."""
    got, expected = _format_distinct(worst.got, worst.expected)
    position = ", ".join(map(str, worst.index))
    return f"at [{position}]: got {got}, expected {expected}, bound {format_number(worst.bound)}"


def format_pattern(record: Record) -> str:
    """Format the pattern of a record's error (where it is, and its form); empty if no known pattern fits."""
    return f"pattern: {shorten_text(record.pattern, longest=300)}" if record.pattern else ""


def shorten_text(text: str, *, longest: int = MAX_REASON) -> str:
    """Cut text to at most `longest` characters; a text that was cut ends with a note that says so."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]} … (cut; all {len(text):,} characters are in the JSON lines)"


def format_value(item: Any) -> str:
    """Format a value of a free-form table, such as coverage or tolerances."""
    if item is None:
        return DASH
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, float):
        return format_number(item)
    if isinstance(item, int):
        return f"{item:,}"
    if isinstance(item, dict):
        return ", ".join(f"{name}: {format_value(inner)}" for name, inner in item.items())
    return ", ".join(map(format_value, item)) if isinstance(item, list | tuple) else str(item)


def _format_distinct(got: float, expected: float) -> tuple[str, str]:
    """Format both numbers with seven digits, or more until rounding changes their difference by at most a tenth."""
    off = abs(got - expected)
    if not 0 < off < math.inf:
        return format_number(got, digits=7), format_number(expected, digits=7)
    digits = 7
    while digits < 17 and max(abs(float(f"{x:.{digits}g}") - x) for x in (got, expected)) > off / 20:
        digits += 1
    return format_number(got, digits=digits), format_number(expected, digits=digits)


def escape_inline(text: str) -> str:
    """Escape text for one line of Markdown, so that no markup of Markdown or HTML in it takes effect."""
    escaped = re.sub(r"([\\`*_|\[\]~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
    return re.sub(r"^(\d+(?=[.)](?:\s|$))|(?=[-+=#:]))", r"\1\\", escaped)


def format_code(text: str) -> str:
    """Format one line of text as code within a line of Markdown or a cell of a table."""
    return escape_inline(text) if {"`", "|"} & set(text) else f"`{text}`"


def format_row(*cells: str) -> str:
    """Format one row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def format_command(command: str) -> str:
    """Format a shell command as a fenced block within a list item."""
    longest = max((len(run) for run in re.findall(r"`+", command)), default=0)
    fence = "`" * max(3, longest + 1)
    body = "\n".join(f"  {line}" for line in command.splitlines())
    return f"  {fence}sh\n{body}\n  {fence}"
