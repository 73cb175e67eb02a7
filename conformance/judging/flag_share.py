"""Limit how many passes of a kernel may depend on the compiler's flags.

The judge compiles under XLA flags that make compiling cheap. A result that is wrong under these flags and right under
JAX's own counts as a pass (`conformance.judging.rejudgement`). XLA causes few such results, if any. A kernel that
detects the flags can cause any number. So above a small share, the kernel counts as the cause, which is a failure.
"""

from __future__ import annotations

from collections.abc import Iterable

from reports.records import FAIL, FLAGS_DIFFER, JUDGED, PASS, Record

CHECK = "flags"
"""The name of the check in the record that says that a kernel is above the limit."""
MAX_SHARE = 0.005
"""The largest share of a kernel's judged results whose verdict may depend on the flags."""
ALLOWED_OF_MANY = 4
"""The number of such results that a kernel may have if at least `MANY` of its results are judged.

A correct kernel of which 530 results were judged had four: gradients of two cases, with logits far beyond a soft cap.
"""
MANY = 50


def is_beyond_limit(decided: int, judged: int) -> bool:
    """Tell whether more of the judged results depend on the flags than XLA is believed to cause."""
    return decided > max(MAX_SHARE * judged, ALLOWED_OF_MANY if judged >= MANY else 0)


def find_excess(records: Iterable[Record]) -> list[Record]:
    """Return a failure for each implementation and platform if too many of its passes depend on the flags."""
    judged: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.verdict in JUDGED and record.check != CHECK:
            judged.setdefault((record.implementation, record.platform), []).append(record)
    decided = {
        key: [x for x in group if x.verdict == PASS and FLAGS_DIFFER in x.figures] for key, group in judged.items()
    }
    return [
        _describe_excess(decided[key], len(group))
        for key, group in sorted(judged.items())
        if is_beyond_limit(len(decided[key]), len(group))
    ]


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
            f"{len(decided):,} of {judged:,} results are wrong under the flags that make compiling cheap, and right "
            f"under JAX's own: above {MAX_SHARE:.1%} the kernel counts as the cause, not the flags. "
            "Set XLA_FLAGS to judge the kernel under a single set of flags"
        ),
        reproduce=first.reproduce,
    )
