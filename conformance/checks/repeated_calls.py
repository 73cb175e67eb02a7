"""Repeat a call, for checks that compare two calls of a kernel.

A result may change from call to call, for example because atomic additions come in any order. Then two calls differ
whatever else is different between them. So a check repeats the same call before it blames anything else. Changes from
call to call are a finding of their own, and the check goes on to compare results within their bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from conformance.check_api.judgement import Judgement
from conformance.execution.executor import Values
from reports import records
from reports.records import Worst

TRIES_BEFORE_BLAME = 8
"""The number of repetitions of a call before a difference of two calls is blamed on their operands."""


def find_changes(first: Values, repeat: Callable[[], Values], names: Iterable[str], *, tries: int = 1) -> Values:
    """Repeat a call up to `tries` times, and return the results that once had other bits than those of `first`."""
    for _ in range(tries):
        again = repeat()
        changed = {name: again[name] for name in names if not find_equal(first[name], again[name]).all()}
        if changed:
            return changed
    return {}


def find_equal(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return where two results are equal; NaN equals NaN."""
    equal: np.ndarray = (before == after) | (np.isnan(before) & np.isnan(after))
    return equal


def judge_repetition(name: str, before: np.ndarray, changes: Mapping[str, np.ndarray], bound: np.ndarray) -> Judgement:
    """Judge whether a repeated call returns the same result; the report gives changes in units of `bound`."""
    label = f"{name}.repeated"
    if name not in changes:
        return Judgement(observable=label, verdict=records.PASS)
    once, again = before.astype(np.float64), changes[name].astype(np.float64)
    differ = ~find_equal(once, again)
    with np.errstate(invalid="ignore", divide="ignore"):
        change = np.where(differ, np.abs(again - once), 0.0)
        ratio = np.where(differ, change / np.broadcast_to(bound, change.shape), 0.0)
    index = np.unravel_index(int(np.argmax(np.where(np.isnan(change), np.inf, change))), change.shape)
    most = float(np.max(np.where(np.isnan(ratio), np.inf, ratio)))
    counted = f"{int(differ.sum()):,} of {differ.size:,} values of {name} change"
    largest = f"by up to {float(change[index]):.3g} ({most:.2g} of the bound)"
    is_gradient = name.startswith("d")
    return Judgement(
        observable=label,
        verdict=records.FAIL,
        worst=Worst(tuple(int(n) for n in index), float(again[index]), float(once[index]), 0.0),
        reason=f"the same call gives other numbers when it is made again: {counted}, {largest}",
        remedy=f'unordered_sums=("{name}",)' if is_gradient and most <= 2 else "",
    )
