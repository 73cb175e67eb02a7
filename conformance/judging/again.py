"""A failure is judged again before it is called one.

First as JAX compiles by itself: the flags that make compiling cheap (`conformance.environment`) must never decide. What
comes of the second judgement stands, and the ratio of the first is kept beside it. What is right then is judged anew
under both, by a process that was asked nothing before where the kernel has one of its own. Only what is wrong under the
flags of the first and right under the others is the flags' doing; else it depends on the calls before it, and stays
wrong. Then under each declaration that a careful library might have made: one under which the whole check passes
is named, so that nobody looks for a bug where a declaration is missing. Where zeros would pass too, the case would not
be judged under that declaration, and says nothing of it.

Both cost, and a wrong kernel has hundreds of failures. So a failure is judged again only until two of its check and
result (`out`, `dq`, ...) have been confirmed, or two of that result as the plain call gives it (`_PLAIN`): what is
wrong there is wrong wherever else it is looked at. From then on nothing is at stake: that result does not conform, for
failures that the flags have no part in. A failure that is not confirmed never counts, so that a false alarm is never
let through by this, however many there are. What is still red and was not judged again has no `ratio_fast_compile`
among its figures.

Declarations are tried on the first confirmed failure of a check in each dtype, by checks that keep their programs, so
that nothing is compiled. What lies behind the mask is tried on all later ones too, if it explained the first: nearly
every published kernel has hundreds of these, and they are one finding.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator

from conformance import records
from conformance.asking.judgement import Judgement, guarded
from conformance.asking.scopes import DECODED, ENSEMBLE, GRID, INTERPRETED
from conformance.asking.subject import Subject
from conformance.calling.execution import Executor
from conformance.checks import Check
from conformance.judging import discrimination
from conformance.judging.declarations import Remedy, weaker

CONFIRMED = 2
"""Failures of a check and result that are confirmed, after which no more of them are judged again."""
# Checks that compare what the plain call, with residuals or without, gives on the case's own operands.
_PLAIN = frozenset({"forward", "residuals", "primal", "gradients", "gradients_lse", "gradients_part"})
# The scopes of checks that run programs which the executor keeps.
_KEPT = (GRID, DECODED, ENSEMBLE)
_WRONG = frozenset({records.FAIL, records.ERROR})


class Again:
    """Judges the failures of one implementation again."""

    def __init__(self, executor: Executor, confirmed: float = CONFIRMED) -> None:
        """For what `executor` runs; `confirmed` failures of a check and result are enough, and 0 are never made."""
        self._executor = executor.as_jax_compiles()
        self._enough = confirmed
        self._confirmed: collections.Counter[tuple[str, str]] = collections.Counter()
        self._remedies: dict[tuple[str, str], Remedy | None] = {}  # by check and dtype

    @property
    def never(self) -> bool:
        """Whether nothing is judged again."""
        return not self._enough

    def judged(self, check: Check, subject: Subject, first: list[Judgement]) -> list[Judgement]:
        """What stands of the judgements of a check, once those that are wrong were judged again."""
        wrong = _wrong(first)
        # No flag of a compiler changes what JAX's interpreters of kernels see: they compute step by step, and look for
        # races. Under XLA's own flags their callbacks also wait for each other for ever.
        if not wrong or self.never or not check.compares or check.scope is INTERPRETED:
            return first
        found = first
        if self._executor is not None and not all(self._is_settled(check, judgement) for judgement in wrong):
            second = _answers(check, subject.run_by(self._executor))
            found = _settled(first, second)
            if changed := {judgement.observable for judgement in wrong} - {x.observable for x in _wrong(second)}:
                # The flags are to blame only for what is wrong under the same ones again, and right under JAX's own,
                # where nothing else is otherwise: a process may be asked what it was never asked before.
                blamed = changed & self._wrong_anew(check, subject, subject.executor)
                blamed -= self._wrong_anew(check, subject, self._executor) if blamed else set()
                found = _unsteady(found, first, changed - blamed)
        confirmed = _wrong(found)
        self._confirmed.update({(_kind(check), _result(judgement)) for judgement in confirmed})
        if check.scope not in _KEPT or not any(judgement.verdict == records.FAIL for judgement in confirmed):
            return found
        return self._explained(check, subject, found)

    @staticmethod
    def _wrong_anew(check: Check, subject: Subject, executor: Executor) -> set[str]:
        """What is wrong where the check is the first thing that is asked."""
        return {judgement.observable for judgement in _wrong(_answers(check, subject.run_by(executor.anew())))}

    def _is_settled(self, check: Check, judgement: Judgement) -> bool:
        result = _result(judgement)
        return max(self._confirmed[kind, result] for kind in (_kind(check), "plain")) >= self._enough

    def _explained(self, check: Check, subject: Subject, found: list[Judgement]) -> list[Judgement]:
        """The judgements, those that are wrong with the declaration that explains them, if any was tried."""
        key = check.name, subject.case.dtype
        if key not in self._remedies:
            self._remedies[key] = _tried(check, subject, weaker(subject.implementation, subject.case))
            return _with_remedy(found, self._remedies[key])
        known = self._remedies[key]
        if known is None or not known.costs_little:
            return found
        return _with_remedy(found, _tried(check, subject, [known]))


def _kind(check: Check) -> str:
    return "plain" if check.name in _PLAIN else check.name


def _result(judgement: Judgement) -> str:
    """`dq` of `dq.row.nan`."""
    return judgement.observable.partition(".")[0]


def _answers(check: Check, subject: Subject) -> list[Judgement]:
    return list(guarded("all", lambda: check.run(subject)))


def _wrong(judgements: Iterable[Judgement]) -> list[Judgement]:
    return [judgement for judgement in judgements if judgement.verdict in _WRONG]


def _settled(first: list[Judgement], second: list[Judgement]) -> list[Judgement]:
    """The second judgements, each with the ratio of the first where one of the two is wrong."""
    before = dict(_in_turn(first))
    stopped = next((judgement for judgement in first if judgement.verdict == records.ERROR), None)
    return [_with_first(judgement, before.get(turn, stopped)) for turn, judgement in _in_turn(second)]


def _in_turn(judgements: Iterable[Judgement]) -> Iterator[tuple[tuple[str, int], Judgement]]:
    """The judgements by observable, and how many of that name came before: calls in a row have one name."""
    seen: collections.Counter[str] = collections.Counter()
    for judgement in judgements:
        yield (judgement.observable, seen[judgement.observable]), judgement
        seen[judgement.observable] += 1


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


def _unsteady(found: list[Judgement], first: list[Judgement], names: Collection[str]) -> list[Judgement]:
    """The judgements, those of `names` as they were first: what is wrong once and then right depends on the call."""
    why = "right when it was called again in the same way: what it returns depends on the calls before"
    wrong = [judgement for judgement in _wrong(first) if judgement.observable in names]
    once = {x.observable: dataclasses.replace(x, reason=f"{x.reason}; {why}") for x in wrong}
    there = {judgement.observable for judgement in found}
    stopped = [judgement for name, judgement in once.items() if name not in there]
    return [once.get(judgement.observable, judgement) for judgement in found] + stopped


def _tried(check: Check, subject: Subject, declarations: Iterable[Remedy]) -> Remedy | None:
    """The first declaration under which nothing is wrong, and under which the case still tells right from wrong."""
    for remedy in declarations:
        declaring = subject.declaring(remedy.implementation)
        if not _wrong(_answers(check, declaring)) and (remedy.costs_little or discrimination.tells(declaring)):
            return remedy
    return None


def _with_remedy(found: list[Judgement], remedy: Remedy | None) -> list[Judgement]:
    declaration = "" if remedy is None else remedy.declaration
    return [_with_declaration(j, declaration) if j.verdict in _WRONG else j for j in found]


def _with_declaration(wrong: Judgement, declaration: str) -> Judgement:
    figures = {**wrong.figures, records.DECLARATIONS_TRIED: 1.0}
    return dataclasses.replace(wrong, remedy=declaration, figures=figures)
