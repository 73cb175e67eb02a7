"""A failure is judged again before it is called one.

First as JAX compiles by itself: the flags that make compiling cheap (`conformance.environment`) must never decide. What
comes of the second judgement stands, and the ratio of the first is kept beside it. Then under each declaration that a
careful library might have made: one under which the whole check passes is named, so that nobody looks for a bug where
a declaration is missing.

Both cost, and a wrong kernel has hundreds of failures. So a failure is judged again only until two of its check and
observable have been confirmed. From then on nothing is at stake: the implementation does not conform, for a failure
that the flags have no part in. A failure that is not confirmed never counts, so that a false alarm is never let through
by this, however many there are. What is still red and was not judged again has no `ratio_fast_compile` among its
figures; of declarations, the one that explained a failure of the same check is tried on it, which compiles nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

from conformance import environment, records
from conformance.asking.judgement import Judgement, guarded
from conformance.asking.subject import Subject
from conformance.calling.execution import Executor
from conformance.checks import Check
from conformance.judging.declarations import Remedy, weaker

CONFIRMED = 2
"""Failures of a check and observable that are confirmed, after which no more of them are judged again."""
_WRONG = frozenset({records.FAIL, records.ERROR})


class Again:
    """Judges the failures of one implementation again."""

    def __init__(self, executor: Executor, confirmed: float = CONFIRMED) -> None:
        """For what `executor` runs; `confirmed` failures of a check and observable are enough."""
        options = environment.own_options()
        self._executor = Executor(executor.implementation, options) if options else None
        self._enough = confirmed
        self._confirmed: collections.Counter[tuple[str, str]] = collections.Counter()
        self._remedies: dict[str, Remedy] = {}  # the last one found, by check

    def judged(self, check: Check, subject: Subject, first: list[Judgement]) -> list[Judgement]:
        """What stands of the judgements of a check, once those that are wrong were judged again."""
        wrong = _wrong(first)
        if not wrong or not check.compares:
            return first
        if all(self._confirmed[check.name, j.observable] >= self._enough for j in wrong):
            remedy = self._remedies.get(check.name)
            return first if remedy is None else _with_remedy(first, _tried(check, subject, [remedy]))
        found = first
        if self._executor is not None:
            found = _settled(first, _answers(check, subject.run_by(self._executor)))
        confirmed = _wrong(found)
        self._confirmed.update((check.name, j.observable) for j in confirmed)
        if not any(judgement.verdict == records.FAIL for judgement in confirmed):
            return found
        remedy = _tried(check, subject, weaker(subject.implementation, subject.case))
        if remedy is not None:
            self._remedies[check.name] = remedy
        return _with_remedy(found, remedy)


def _answers(check: Check, subject: Subject) -> list[Judgement]:
    return list(guarded("all", lambda: check.run(subject)))


def _wrong(judgements: Iterable[Judgement]) -> list[Judgement]:
    return [judgement for judgement in judgements if judgement.verdict in _WRONG]


def _settled(first: list[Judgement], second: list[Judgement]) -> list[Judgement]:
    """The second judgements, each with the ratio of the first where one of the two is wrong."""
    before = {judgement.observable: judgement for judgement in first}
    stopped = next((judgement for judgement in first if judgement.verdict == records.ERROR), None)
    return [_with_first(judgement, before.get(judgement.observable, stopped)) for judgement in second]


def _with_first(second: Judgement, first: Judgement | None) -> Judgement:
    if first is None or not ({first.verdict, second.verdict} & _WRONG):
        return second
    ratio = first.ratio if first.ratio is not None else math.inf if first.verdict in _WRONG else 0.0
    figures = {**second.figures, records.RATIO_FAST_COMPILE: ratio}
    if (first.verdict in _WRONG) == (second.verdict in _WRONG):
        return dataclasses.replace(second, figures=figures)
    wrong, flags, other = (
        (first, "those that make compiling cheap", "JAX's own")
        if first.verdict in _WRONG
        else (second, "JAX's own", "those that make compiling cheap")
    )
    reason = f"differs by the compiler's flags: {wrong.reason} under {flags}, right under {other}"
    return dataclasses.replace(second, figures={**figures, records.FLAGS_DIFFER: 1.0}, reason=reason)


def _tried(check: Check, subject: Subject, declarations: Iterable[Remedy]) -> Remedy | None:
    """The first declaration under which nothing is wrong."""
    for remedy in declarations:
        if not _wrong(_answers(check, subject.declaring(remedy.implementation))):
            return remedy
    return None


def _with_remedy(found: list[Judgement], remedy: Remedy | None) -> list[Judgement]:
    if remedy is None:
        return found
    wrong = _wrong(found)
    return [dataclasses.replace(j, remedy=remedy.declaration) if j in wrong else j for j in found]
