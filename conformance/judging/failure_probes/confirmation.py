"""Confirming what is suspected of a failure: a few cases more, which differ in one thing each.

A suspicion names the levels that a case seems to need to fail. A plain case with them and nothing else should fail, and
the same without one of them should pass. Where the plain case passes, more is needed than is suspected; then the case
that failed is judged without each level. Where no case tells two suspicions apart, plain cases are made that do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cases.case import Case, CaseIdError, parse_case_id
from conformance.check_api.scopes import BASE, GRID, ImplementationGrids
from conformance.checks import CHECKS_BY_NAME
from conformance.contract import Implementation
from conformance.judging.failure_probes.probe_budget import ProbeBudget
from conformance.judging.job import Job
from conformance.records import RED, Record
from conformance.sandbox.sandboxed_executor import SupportQueryFailed

Fields = tuple[str, ...]
"""Names of fields of a case."""

# What a field may need beside it, in the order in which it is tried: a mask is for some lengths and batch rows, a cache
# is not trained from, and the values of a knee need a cap.
_COMPANION_FIELDS: tuple[Fields, ...] = (
    ("q_length", "kv_length"),
    ("phase",),
    ("soft_cap",),
    ("batch",),
    ("num_q_heads", "num_kv_heads"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suspicion:
    """What a failure seems to need.

    Attributes:
      implementation: its name.
      check: the one that fails.
      failing: the id of a case that fails.
      levels: what decides each of the levels that it seems to need.
      counters: for each of them the values by field that take it from a case, where a plain case has it.
      examples: values by field, each in place of all levels: cases that tell suspicions apart.
      others: what decides the levels that it might need as well instead.
    """

    implementation: str
    check: str
    failing: str
    levels: tuple[Fields, ...]
    counters: tuple[Mapping[str, Any], ...]
    examples: tuple[Mapping[str, Any], ...] = ()
    others: tuple[Fields, ...] = ()

    @property
    def is_probeable(self) -> bool:
        """Whether its check is asked of any case."""
        return bool(self.levels) and CHECKS_BY_NAME[self.check].scope is GRID


class Prober:
    """Judges cases that confirm suspicions, until its time is up."""

    def __init__(
        self,
        allowance: ProbeBudget,
        implementations: Sequence[Implementation],
        seconds: float,
        heard: Callable[[list[Record]], None],
    ) -> None:
        """`heard` gets the records of each case as it is judged; after `seconds` none is begun."""
        self._allowance = allowance
        self._implementations = {implementation.name: implementation for implementation in implementations}
        self._until = time.monotonic() + seconds
        self._heard = heard
        self._verdicts: dict[tuple[str, str, str], bool] = {}
        self.judged = 0

    @property
    def is_late(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() >= self._until

    def remember(self, records: Sequence[Record]) -> None:
        """What was judged already is not judged again."""
        for record in records:
            key = record.implementation, record.check, record.case
            self._verdicts[key] = self._verdicts.get(key, False) or record.verdict in RED

    def confirm(self, suspicion: Suspicion) -> None:
        """Judge the cases that confirm a suspicion, or do not."""
        implementation = self._implementations.get(suspicion.implementation)
        base = _find_base_case(implementation) if implementation is not None else None
        if implementation is None or base is None or not suspicion.is_probeable:
            return
        failing = parse_case_id(suspicion.failing)
        every = tuple(dict.fromkeys(name for fields in suspicion.levels for name in fields))
        plain = _transfer_fields(base, failing, every, implementation)
        fails = plain if plain is not None and self._fails(suspicion, plain) else failing
        for case in (
            *_iter_without_levels(fails, base, suspicion),
            *_iter_other_cases(failing, base, suspicion, implementation),
        ):
            if not self.is_late and _is_supported(case, implementation):
                self._fails(suspicion, case)

    def beside(self, suspicion: Suspicion) -> None:
        """Judge the failing case itself without each of the levels, whatever the time."""
        implementation = self._implementations[suspicion.implementation]
        base = _find_base_case(implementation)
        if base is not None and suspicion.is_probeable:
            for case in _iter_without_levels(parse_case_id(suspicion.failing), base, suspicion):
                if _is_supported(case, implementation):
                    self._fails(suspicion, case)

    def _fails(self, suspicion: Suspicion, case: Case) -> bool:
        key = suspicion.implementation, suspicion.check, case.id
        if key not in self._verdicts:
            job = Job(self._implementations[suspicion.implementation], case, (CHECKS_BY_NAME[suspicion.check],))
            found = self._allowance.judge(job)
            if found is None:
                return False  # it would have taken too long, and is not known
            self.judged += 1
            self.remember(found)
            self._heard(found)
        return self._verdicts.get(key, False)


def _find_base_case(implementation: Implementation) -> Case | None:
    return next(iter(BASE.cases(ImplementationGrids(implementation, "quick", 0))), None)


def _iter_without_levels(case: Case, base: Case, suspicion: Suspicion) -> Iterator[Case]:
    """The case without each of the levels."""
    for fields, counter in zip(suspicion.levels, suspicion.counters, strict=True):
        instead = dataclasses.asdict(base) | dict(counter)
        yield from _iter_changed(case, {name: instead[name] for name in fields})


def _iter_other_cases(case: Case, base: Case, suspicion: Suspicion, implementation: Implementation) -> Iterator[Case]:
    """Plain cases with each of the levels that might be what it needs."""
    for fields in suspicion.others:
        if (found := _transfer_fields(base, case, fields, implementation)) is not None:
            yield found
    for example in suspicion.examples:
        yield from _iter_changed(base, example)


def _transfer_fields(to: Case, source: Case, fields: Fields, implementation: Implementation) -> Case | None:
    """A case with some fields of another, and with as few more of it as that takes; none if none is supported."""
    names = dict.fromkeys(fields)
    for more in ((), *_COMPANION_FIELDS):
        names |= dict.fromkeys(more)
        for case in _iter_changed(to, {name: getattr(source, name) for name in names}):
            if _is_supported(case, implementation):
                return case
    return None


def _iter_changed(case: Case, changes: Mapping[str, Any]) -> Iterator[Case]:
    """The case with the changes, if there can be one."""
    with contextlib.suppress(CaseIdError):
        yield dataclasses.replace(case, **changes)


def _is_supported(case: Case, implementation: Implementation) -> bool:
    try:
        return implementation.supports(case) is None
    except SupportQueryFailed:
        return False
