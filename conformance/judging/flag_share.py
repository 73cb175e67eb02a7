"""Limit how many passes of a kernel may depend on the compiler's flags.

A result that is wrong under the flags that make compiling cheap, and right under JAX's own, counts as a pass
(`conformance.judging.rejudgement`). XLA makes few such results, if any. A kernel that can tell which flags it is
compiled under can make as many as it likes. So above a small share, the kernel counts as the cause.
"""

from __future__ import annotations

from collections.abc import Iterable

from conformance.records import FAIL, FLAGS_DIFFER, JUDGED, PASS, Record

CHECK = "flags"
"""The check name in the record of a kernel above the limit."""
MAX_SHARE = 0.005
"""The largest share of a kernel's judged results that the flags may decide."""


def is_beyond_limit(decided: int, judged: int) -> bool:
    """Tell whether the flags decided more of the judged results than XLA is believed to."""
    return decided > MAX_SHARE * judged


def find_excess(records: Iterable[Record]) -> list[Record]:
    """Return a failure for each implementation and platform with more passes by the flags than the limit allows."""
    judged: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.verdict in JUDGED and record.check != CHECK:
            judged.setdefault((record.implementation, record.platform), []).append(record)
    decided = {key: [record for record in group if is_decided_by_flags(record)] for key, group in judged.items()}
    return [
        _describe_excess(decided[key], len(group))
        for key, group in sorted(judged.items())
        if is_beyond_limit(len(decided[key]), len(group))
    ]


def is_decided_by_flags(record: Record) -> bool:
    """Tell whether the record is a pass that is a failure under the flags that make compiling cheap."""
    return record.verdict == PASS and FLAGS_DIFFER in record.figures


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
            "Set XLA_FLAGS to have it judged under one set of flags alone"
        ),
        reproduce=first.reproduce,
    )
