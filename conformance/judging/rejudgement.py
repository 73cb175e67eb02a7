"""Judge each failure a second time before it counts.

First judgements use XLA flags that make compiling cheap (`conformance.environment`). These flags must never decide a
verdict. So a failure is judged once more under JAX's own flags, and that result stands. The record keeps the ratio of
the first judgement.

If a result is right the second time, either the flags or the kernel caused the first failure: a kernel's results may
depend on earlier calls, or the kernel may recognise a second judgement. To find the cause, the check runs in fresh
processes that differ only in their flags. Some have the first flags and as many have JAX's own, in an unpredictable
order. The flags count as the cause only if the result is wrong in all of the first and right in all of the others. In
all other cases the failure stands. A kernel can still detect the flags by looking at its own compiled programs. So only
a few of its cases may depend on the flags (`conformance.judging.flag_share`).

Then declarations are tried that the kernel's author may have forgotten to make. If the whole check passes under one,
the record names it, so that nobody looks for a bug where a declaration is missing. A declaration is not named if simple
wrong results, such as zeros, would pass under it too.

All this takes time, and a wrong kernel has hundreds of failures. So failures of one result (`out`, `dq`, ...) in one
check are judged again only until two of them are confirmed. For this count, all checks that compare the plain call
(`_PLAIN_CHECKS`) are one check. From then on the result does not conform, whatever later judgements say. A failure that
is not confirmed does not count, so every false alarm is found until then. A red record that was not judged again has no
`ratio_fast_compile` among its measured numbers (`figures`).

Declarations are tried on the first confirmed failure of a check in each dtype, and only by checks whose programs are
cached, so nothing is compiled. If `behind_mask` explains the first failure, it is tried on all later ones: nearly every
published kernel has hundreds of such failures, and a report shows them as one finding.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import secrets
from collections.abc import Collection, Iterable, Iterator

from conformance.check_api.judgement import Judgement, catch_errors
from conformance.check_api.scopes import DECODED, ENSEMBLE, GRID, INTERPRETED
from conformance.check_api.subject import Subject
from conformance.checks import Check
from conformance.execution.executor import Executor
from conformance.judging import discrimination, flag_share
from conformance.judging.declarations import Remedy, iter_weaker_declarations
from conformance.sandbox.kernel_process import LoadFailed
from reports import records

ENOUGH_CONFIRMED = 2
"""The number of confirmed failures of a result in a check, after which its failures are not judged again."""
UNSTEADY = "right when called again in the same way: the result depends on earlier calls"
"""The end of the reason of a failure that did not occur a second time."""
FRESH_PROCESSES = 2
"""The number of fresh processes for each of the two sets of flags that must agree that the flags are the cause."""
# The number of cases that may depend on the flags before no further failure is judged again. The limit is tested after
# each case, so chance has many opportunities to exceed it early in a run.
_MIN_DECIDED = 8
# Checks that compare results of the plain call: one call on the case's own operands, with or without residuals.
_PLAIN_CHECKS = frozenset({"forward", "residuals", "primal", "gradients", "gradients_lse", "gradients_part"})
# The scopes of checks whose compiled programs are cached by the executor, so that running a check again is cheap.
_CACHING_SCOPES = (GRID, DECODED, ENSEMBLE)
_WRONG = frozenset({records.FAIL, records.ERROR})
_TOO_MANY = "not judged again: more cases of this kernel depend on the compiler's flags than XLA causes by chance"


class Rejudger:
    """Judge the failures of one implementation again."""

    def __init__(self, executor: Executor, confirmed: float = ENOUGH_CONFIRMED) -> None:
        """Create a rejudger that skips a result in a check after `confirmed` confirmed failures; 0 skips all."""
        self._executor = executor.with_default_flags()
        self._enough = confirmed
        self._confirmed: collections.Counter[tuple[str, str]] = collections.Counter()
        self._judged: set[str] = set()  # the cases that were judged
        self._decided: set[str] = set()  # the cases of which a result depends on the flags
        self._remedies: dict[tuple[str, str], Remedy | None] = {}  # by check and dtype: what explains failures

    @property
    def is_disabled(self) -> bool:
        """Whether no failure is judged again."""
        return not self._enough

    def judge(self, check: Check, subject: Subject, first: list[Judgement]) -> list[Judgement]:
        """Judge the failures and errors of a check again, and return the judgements that count.

        `first` has the judgements of the check under the flags that make compiling cheap.
        """
        if any(judgement.verdict in records.JUDGED for judgement in first):
            self._judged.add(subject.case.id)
        wrong = _select_wrong(first)
        # Checks that interpret a kernel are not judged again. JAX's kernel interpreters go step by step and look for
        # races, so no compiler flag changes their results. Under JAX's own flags, their callbacks would deadlock.
        if not wrong or self.is_disabled or not check.compares or check.scope is INTERPRETED:
            return first
        standing = first
        if self._executor is not None and not all(self._is_settled(check, judgement) for judgement in wrong):
            standing = self._judge_by_default_flags(check, subject, self._executor, first)
        confirmed = _select_wrong(standing)
        self._confirmed.update({(_classify_check(check), _get_result_name(judgement)) for judgement in confirmed})
        if check.scope not in _CACHING_SCOPES or not any(judgement.verdict == records.FAIL for judgement in confirmed):
            return standing
        return self._explain_by_declarations(check, subject, standing)

    def _judge_by_default_flags(
        self, check: Check, subject: Subject, executor: Executor, first: list[Judgement]
    ) -> list[Judgement]:
        """Return the judgements under JAX's own flags. A result whose first failure flags did not cause stays wrong."""
        if len(self._decided) >= _MIN_DECIDED and flag_share.is_beyond_limit(len(self._decided), len(self._judged)):
            return [_add_reason(x, _TOO_MANY) if x.verdict in _WRONG else x for x in first]
        try:
            _start(executor)
            second = _run_check(check, subject.with_executor(executor))
            merged = _merge_ratios(first, second)
            changed = {judgement.observable for judgement in _select_wrong(first)} - {
                x.observable for x in _select_wrong(second)
            }
            blamed = _find_blamed(check, subject, executor, changed) if changed else set()
        except LoadFailed as error:
            return [_add_reason(x, f"not judged again: {error}") if x.verdict in _WRONG else x for x in first]
        if blamed:
            self._decided.add(subject.case.id)
        return _restore_unsteady(merged, first, changed - blamed)

    def _is_settled(self, check: Check, judgement: Judgement) -> bool:
        """Tell whether enough failures of a judgement's result are confirmed, so that it need not be judged again."""
        result = _get_result_name(judgement)
        return max(self._confirmed[kind, result] for kind in (_classify_check(check), "plain")) >= self._enough

    def _explain_by_declarations(self, check: Check, subject: Subject, judgements: list[Judgement]) -> list[Judgement]:
        """Return the judgements, with the declaration that explains the failures, if one was tried and does."""
        key = check.name, subject.case.dtype
        if key not in self._remedies:
            self._remedies[key] = _find_remedy(
                check, subject, iter_weaker_declarations(subject.implementation, subject.case)
            )
            return _add_remedy(judgements, self._remedies[key])
        remedy = self._remedies[key]
        if remedy is None or not remedy.keeps_expectation:
            return judgements
        return _add_remedy(judgements, _find_remedy(check, subject, [remedy]))


def _find_blamed(check: Check, subject: Subject, executor: Executor, changed: Collection[str]) -> set[str]:
    """Return the results among `changed` whose failures the flags cause, according to fresh processes.

    The order of the processes is random, so the kernel cannot know it. A kernel that leaves data for the next process
    can at most tell it how many processes came before, but not which flags it has.

    Args:
      executor: the executor under JAX's own flags.
      changed: names of results that were wrong under the first flags, and then right under JAX's own.

    Raises:
      LoadFailed: if a process cannot load the kernel.
    """
    blamed = set(changed)
    runs = [(subject.executor, True), (executor, False)] * FRESH_PROCESSES
    secrets.SystemRandom().shuffle(runs)
    for next_executor, should_be_wrong in runs:
        fresh = next_executor.create_fresh()
        _start(fresh)
        judgements = _run_check(check, subject.with_executor(fresh))
        wrong = {judgement.observable for judgement in _select_wrong(judgements)}
        blamed = blamed & wrong if should_be_wrong else blamed - wrong
        if not blamed:
            break
    return blamed


def _start(executor: Executor) -> None:
    """Start the kernel's process, if it has one. Raises `LoadFailed`, for example if a file of the kernel was edited.

    A check would report that as its error, and its results would seem to be no longer wrong.
    """
    _ = executor.backend


def _classify_check(check: Check) -> str:
    """Return the check's name, or `plain` for checks of the plain call."""
    return "plain" if check.name in _PLAIN_CHECKS else check.name


def _get_result_name(judgement: Judgement) -> str:
    """Return the name of the result: `dq` of `dq.row.nan`."""
    return judgement.observable.partition(".")[0]


def _run_check(check: Check, subject: Subject) -> list[Judgement]:
    """Run a check and return its judgements; an exception becomes a judgement."""
    return list(catch_errors("all", lambda: check.run(subject)))


def _select_wrong(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Return the judgements that are failures or errors."""
    return [judgement for judgement in judgements if judgement.verdict in _WRONG]


def _merge_ratios(first: list[Judgement], second: list[Judgement]) -> list[Judgement]:
    """Return the second judgements. If one of a pair is wrong, the ratio of the first one is added to the second."""
    by_number = dict(_iter_numbered(first))
    first_error = next((judgement for judgement in first if judgement.verdict == records.ERROR), None)
    return [
        _add_first_ratio(judgement, by_number.get(number, first_error)) for number, judgement in _iter_numbered(second)
    ]


def _iter_numbered(judgements: Iterable[Judgement]) -> Iterator[tuple[tuple[str, int], Judgement]]:
    """Yield judgements keyed by observable and occurrence, since a check may judge an observable in several calls."""
    seen: collections.Counter[str] = collections.Counter()
    for judgement in judgements:
        yield (judgement.observable, seen[judgement.observable]), judgement
        seen[judgement.observable] += 1


def _add_first_ratio(second: Judgement, first: Judgement | None) -> Judgement:
    """Return the second judgement with the ratio of the first. The reason says if only one of them is wrong."""
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


def _restore_unsteady(judgements: list[Judgement], first: list[Judgement], names: Collection[str]) -> list[Judgement]:
    """Return the judgements, with the first, wrong one in place of each result in `names`.

    These results were right when judged again, but the flags are not the cause.
    """
    wrong = [judgement for judgement in _select_wrong(first) if judgement.observable in names]
    unsteady = {judgement.observable: _add_reason(judgement, UNSTEADY) for judgement in wrong}
    present = {judgement.observable for judgement in judgements}
    missing = [judgement for name, judgement in unsteady.items() if name not in present]
    return [unsteady.get(judgement.observable, judgement) for judgement in judgements] + missing


def _add_reason(wrong: Judgement, more: str) -> Judgement:
    """Return the judgement with a sentence added to its reason."""
    return dataclasses.replace(wrong, reason=f"{wrong.reason}; {more}")


def _find_remedy(check: Check, subject: Subject, declarations: Iterable[Remedy]) -> Remedy | None:
    """Return the first declaration under which the whole check passes and the case still discriminates, or None."""
    for remedy in declarations:
        declaring = subject.with_declarations(remedy.implementation)
        if not _select_wrong(_run_check(check, declaring)) and (
            remedy.keeps_expectation or discrimination.discriminates(declaring)
        ):
            return remedy
    return None


def _add_remedy(judgements: list[Judgement], remedy: Remedy | None) -> list[Judgement]:
    """Return the judgements, with the declaration added to wrong ones, or the fact that none was found."""
    declaration = "" if remedy is None else remedy.declaration
    return [_add_declaration(j, declaration) if j.verdict in _WRONG else j for j in judgements]


def _add_declaration(wrong: Judgement, declaration: str) -> Judgement:
    """Return the wrong judgement with the declaration, and mark in its figures that declarations were tried."""
    figures = {**wrong.figures, records.DECLARATIONS_TRIED: 1.0}
    return dataclasses.replace(wrong, remedy=declaration, figures=figures)
