"""Limit in how many cases the verdict on a kernel may depend on the compiler's flags.

The judge compiles under XLA flags that make compiling cheap. A result that is wrong under these flags and right under
JAX's own counts as a pass (`conformance.judging.rejudgement`). XLA causes few such results, if any. A kernel that
detects the flags can cause any number. So if there are more than chance explains, the kernel counts as the cause, which
is a failure.

Cases are counted, not results: one error of XLA shows in several results of a case, which share a program. Suppose that
XLA errs in a case with the probability `CASE_RATE`. Then the number of such cases among `n` is binomial, and too large
if at least as many had a probability below `MAX_CHANCE`. So one case shows nothing, and neither do two of ten or more.
Two of nine are too many, as are four of 50, and eight of 350.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from reports.records import FAIL, FLAGS_DIFFER, JUDGED, PASS, Record

CHECK = "flags"
"""The name of the check in the record that says that a kernel is above the limit."""
CASE_RATE = 0.005
"""The largest probability that XLA computes a case wrongly under the flags, and rightly under its own.

In 747 cases of two correct kernels, no result needed JAX's own flags (`dot_product` and `block_flash` at `quick`,
jaxlib 0.10.2 on x86). If the probability were larger, none in 747 would have a probability below 3%.
"""
MAX_CHANCE = 0.001
"""The probability of so many cases by chance, below which the kernel counts as the cause."""


def is_beyond_limit(decided: int, judged: int) -> bool:
    """Tell whether the flags decide more of the judged cases than XLA would cause by chance."""
    # The probability of at least `decided` cases is 1 minus that of fewer. Logarithms keep each term from underflowing.
    fewer, log_term = 0.0, judged * math.log1p(-CASE_RATE)
    for count in range(decided):
        fewer += math.exp(log_term)
        log_term += math.log((judged - count) / (count + 1) * CASE_RATE / (1 - CASE_RATE))
    return 1 - fewer < MAX_CHANCE


def find_excess(records: Iterable[Record]) -> list[Record]:
    """Return a failure for each implementation and platform if the flags decide too many of its cases."""
    judged: dict[tuple[str, str], dict[str, Record | None]] = {}
    for record in records:
        if record.verdict in JUDGED and record.check != CHECK:
            first_by_case = judged.setdefault((record.implementation, record.platform), {})
            is_decided = record.verdict == PASS and FLAGS_DIFFER in record.figures
            first_by_case[record.case] = first_by_case.get(record.case) or (record if is_decided else None)
    found = []
    for _, first_by_case in sorted(judged.items()):
        decided = [record for record in first_by_case.values() if record is not None]
        if is_beyond_limit(len(decided), len(first_by_case)):
            found.append(_describe_excess(decided, len(first_by_case)))
    return found


def _describe_excess(decided: list[Record], judged: int) -> Record:
    first = decided[0]
    return Record(
        implementation=first.implementation,
        platform=first.platform,
        case="*",
        check=CHECK,
        observable="all",
        verdict=FAIL,
        reason=(
            f"in {len(decided):,} of {judged:,} cases, results are wrong under the flags that make compiling cheap, "
            f"and right under JAX's own: by chance, XLA causes so many in fewer than {MAX_CHANCE:.1%} of runs, so the "
            "kernel counts as the cause. Set XLA_FLAGS to judge the kernel under a single set of flags"
        ),
        reproduce=first.reproduce,
    )
