"""Judge each failure a second time before it counts.

The flags that make compiling cheap (`conformance.environment`) must never decide. So a failure is judged once more
under JAX's own flags, and what comes of that stands. The record keeps the ratio of the first judgement beside it.

What is right then was wrong because of the flags, or because of the kernel. A kernel may depend on the calls before,
or recognise that it is judged a second time. To tell, the check is asked of fresh processes that differ by the flags
alone: some under the first flags and as many under JAX's own, in an order that nobody can foresee. The flags are to
blame only for what is wrong in all of the first and right in all of the others. All else stays a failure. A kernel can
still find out under which flags XLA compiles, by looking at its own programs. So the flags may be to blame for a small
share of its results only (`conformance.judging.flag_share`).

Then each declaration is tried that a careful library might have made. One under which the whole check passes is named,
so that nobody looks for a bug where a declaration is missing. It is not named where zeros would pass under it too.

All this costs time, and a wrong kernel has hundreds of failures. So a failure is judged again only until two of its
check and result (`out`, `dq`, ...) are confirmed, or two of that result in checks of the plain call (`_PLAIN`). From
then on that result does not conform whatever comes. Failures that are not confirmed do not count, so that each false
alarm is found out. A red record that was not judged again has no `ratio_fast_compile` among its figures.

Declarations are tried on the first confirmed failure of a check in each dtype, by checks that keep their programs, so
that nothing is compiled. If what lies behind the mask explained the first, it is tried on all later ones too: nearly
every published kernel has hundreds of these, and they are one finding.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import secrets
from collections.abc import Collection, Iterable, Iterator

from conformance import records
from conformance.check_api.judgement import Judgement, catch_errors
from conformance.check_api.scopes import DECODED, ENSEMBLE, GRID, INTERPRETED
from conformance.check_api.subject import Subject
from conformance.checks import Check
from conformance.execution.executor import Executor
from conformance.judging import discrimination, flag_share
from conformance.judging.declarations import Remedy, iter_weaker_declarations

ENOUGH_CONFIRMED = 2
"""Failures of a check and result that are confirmed, after which no more of them are judged again."""
FRESH_PROCESSES = 2
"""Fresh processes that are asked under each of the two sets of flags before the flags are blamed."""
# Results that the flags may decide before their share of all results is looked at: the first ones are a large share.
_MIN_DECIDED = 8
# Checks that compare what the plain call, with residuals or without, gives on the case's own operands.
_PLAIN_CHECKS = frozenset({"forward", "residuals", "primal", "gradients", "gradients_lse", "gradients_part"})
# The scopes of checks that run programs which the executor keeps.
_CACHING_SCOPES = (GRID, DECODED, ENSEMBLE)
_WRONG = frozenset({records.FAIL, records.ERROR})
_UNSTEADY = "right when it was called again in the same way: what it returns depends on the calls before"
_TOO_MANY = "not judged again: the compiler's flags have decided more results of this kernel than XLA accounts for"


class Rejudger:
    """Judges the failures of one implementation again."""

    def __init__(self, executor: Executor, confirmed: float = ENOUGH_CONFIRMED) -> None:
        """For what `executor` runs; `confirmed` failures of a check and result are enough, and 0 are never made."""
        self._executor = executor.with_default_flags()
        self._enough = confirmed
        self._confirmed: collections.Counter[tuple[str, str]] = collections.Counter()
        self._judged = self._decided = 0  # results in all, and those that the flags decided
        self._remedies: dict[tuple[str, str], Remedy | None] = {}  # by check and dtype

    @property
    def is_disabled(self) -> bool:
        """Whether nothing is judged again."""
        return not self._enough

    def judge(self, check: Check, subject: Subject, first: list[Judgement]) -> list[Judgement]:
        """Return what stands of the first judgements of a check, once those that are wrong were judged again."""
        self._judged += sum(judgement.verdict in records.JUDGED for judgement in first)
        wrong = _select_wrong(first)
        # No flag of a compiler changes what JAX's interpreters of kernels see: they compute step by step, and look for
        # races. Under XLA's own flags their callbacks also wait for each other for ever.
        if not wrong or self.is_disabled or not check.compares or check.scope is INTERPRETED:
            return first
        found = first
        if self._executor is not None and not all(self._is_settled(check, judgement) for judgement in wrong):
            found = self._judge_by_default_flags(check, subject, self._executor, first)
        confirmed = _select_wrong(found)
        self._confirmed.update({(_classify_check(check), _get_result_name(judgement)) for judgement in confirmed})
        if check.scope not in _CACHING_SCOPES or not any(judgement.verdict == records.FAIL for judgement in confirmed):
            return found
        return self._explained(check, subject, found)

    def _judge_by_default_flags(
        self, check: Check, subject: Subject, executor: Executor, first: list[Judgement]
    ) -> list[Judgement]:
        """Return the judgements under JAX's own flags; where the flags are not to blame, the first ones."""
        if self._decided >= _MIN_DECIDED and flag_share.is_beyond_limit(self._decided, self._judged):
            return [_add_reason(x, _TOO_MANY) if x.verdict in _WRONG else x for x in first]
        second = _run_check(check, subject.with_executor(executor))
        found = _merge_ratios(first, second)
        changed = {judgement.observable for judgement in _select_wrong(first)} - {
            x.observable for x in _select_wrong(second)
        }
        if not changed:
            return found
        blamed = _find_blamed(check, subject, executor, changed)
        self._decided += len(blamed)
        return _restore_unsteady(found, first, changed - blamed)

    def _is_settled(self, check: Check, judgement: Judgement) -> bool:
        result = _get_result_name(judgement)
        return max(self._confirmed[kind, result] for kind in (_classify_check(check), "plain")) >= self._enough

    def _explained(self, check: Check, subject: Subject, found: list[Judgement]) -> list[Judgement]:
        """The judgements, those that are wrong with the declaration that explains them, if any was tried."""
        key = check.name, subject.case.dtype
        if key not in self._remedies:
            self._remedies[key] = _find_remedy(
                check, subject, iter_weaker_declarations(subject.implementation, subject.case)
            )
            return _add_remedy(found, self._remedies[key])
        known = self._remedies[key]
        if known is None or not known.keeps_expectation:
            return found
        return _add_remedy(found, _find_remedy(check, subject, [known]))


def _find_blamed(check: Check, subject: Subject, executor: Executor, changed: Collection[str]) -> set[str]:
    """Return those of the `changed` results that fresh processes get wrong because of the flags.

    The order of the processes is random, by numbers that the kernel cannot know. What survives outside of a process
    tells it at most how many were before it, and not under which flags it is itself.

    Args:
      check: what is asked.
      subject: of the executor under the first flags.
      executor: the one under JAX's own flags.
      changed: results that were wrong under the first flags, and then right under JAX's own.
    """
    blamed = set(changed)
    looks = [(subject.executor, True), (executor, False)] * FRESH_PROCESSES
    secrets.SystemRandom().shuffle(looks)
    for asked, should_be_wrong in looks:
        answers = _run_check(check, subject.with_executor(asked.create_fresh()))
        wrong = {judgement.observable for judgement in _select_wrong(answers)}
        blamed = blamed & wrong if should_be_wrong else blamed - wrong
        if not blamed:
            break
    return blamed


def _classify_check(check: Check) -> str:
    return "plain" if check.name in _PLAIN_CHECKS else check.name


def _get_result_name(judgement: Judgement) -> str:
    """`dq` of `dq.row.nan`."""
    return judgement.observable.partition(".")[0]


def _run_check(check: Check, subject: Subject) -> list[Judgement]:
    return list(catch_errors("all", lambda: check.run(subject)))


def _select_wrong(judgements: Iterable[Judgement]) -> list[Judgement]:
    return [judgement for judgement in judgements if judgement.verdict in _WRONG]


def _merge_ratios(first: list[Judgement], second: list[Judgement]) -> list[Judgement]:
    """The second judgements, each with the ratio of the first where one of the two is wrong."""
    before = dict(_iter_numbered(first))
    stopped = next((judgement for judgement in first if judgement.verdict == records.ERROR), None)
    return [_add_first_ratio(judgement, before.get(turn, stopped)) for turn, judgement in _iter_numbered(second)]


def _iter_numbered(judgements: Iterable[Judgement]) -> Iterator[tuple[tuple[str, int], Judgement]]:
    """The judgements by observable, and how many of that name came before: calls in a row have one name."""
    seen: collections.Counter[str] = collections.Counter()
    for judgement in judgements:
        yield (judgement.observable, seen[judgement.observable]), judgement
        seen[judgement.observable] += 1


def _add_first_ratio(second: Judgement, first: Judgement | None) -> Judgement:
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


def _restore_unsteady(found: list[Judgement], first: list[Judgement], names: Collection[str]) -> list[Judgement]:
    """Return the judgements, the first ones in place of those `names` that were wrong at one call and then right."""
    wrong = [judgement for judgement in _select_wrong(first) if judgement.observable in names]
    once = {judgement.observable: _add_reason(judgement, _UNSTEADY) for judgement in wrong}
    there = {judgement.observable for judgement in found}
    stopped = [judgement for name, judgement in once.items() if name not in there]
    return [once.get(judgement.observable, judgement) for judgement in found] + stopped


def _add_reason(wrong: Judgement, more: str) -> Judgement:
    return dataclasses.replace(wrong, reason=f"{wrong.reason}; {more}")


def _find_remedy(check: Check, subject: Subject, declarations: Iterable[Remedy]) -> Remedy | None:
    """The first declaration under which nothing is wrong, and under which the case still tells right from wrong."""
    for remedy in declarations:
        declaring = subject.declaring(remedy.implementation)
        if not _select_wrong(_run_check(check, declaring)) and (
            remedy.keeps_expectation or discrimination.discriminates(declaring)
        ):
            return remedy
    return None


def _add_remedy(found: list[Judgement], remedy: Remedy | None) -> list[Judgement]:
    declaration = "" if remedy is None else remedy.declaration
    return [_add_declaration(j, declaration) if j.verdict in _WRONG else j for j in found]


def _add_declaration(wrong: Judgement, declaration: str) -> Judgement:
    figures = {**wrong.figures, records.DECLARATIONS_TRIED: 1.0}
    return dataclasses.replace(wrong, remedy=declaration, figures=figures)
