"""Confirm at the end of a run which properties of a case each failure depends on, by judging a few more cases.

A report suspects that a failure needs certain *levels*: properties of a case, such as a causal mask or dtype bf16.
A `Suspicion` names them. If it is right, a plain case with these levels alone fails, and the same case without any one
of them passes. If the plain case passes, the failure needs more than is suspected. Then the case that failed is judged
without each level in turn. If two suspicions fit all judged cases, plain cases that distinguish them are judged too.

`confirm_findings` chooses the findings and keeps to a time limit. `Prober` chooses and judges the cases of one finding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cases.case import Case, CaseIdError
from cases.case_id import parse_case_id
from conformance.check_api.scopes import BASE, GRID, ImplementationGrids
from conformance.checks import CHECKS_BY_NAME
from conformance.follow_up.probe_budget import ProbeBudget
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.judging.runner import ABANDONED_CASE
from conformance.sandbox.sandboxed_executor import SupportQueryFailed
from impls.contract.implementation import Implementation
from reports.causes import root_causes
from reports.causes.case_levels import FIELD_GROUPS
from reports.causes.finding import RAISES, Finding
from reports.records import RED, Record
from reports.text_format import format_count

Fields = tuple[str, ...]
"""Names of fields of a case."""

# Fields to copy along if a plain case with another field alone is not supported, in the order in which they are tried.
# A mask needs certain lengths and batch rows, a cache needs another phase than training, and a distribution of values
# around the bend of a soft cap needs the soft cap.
_COMPANION_FIELDS: tuple[Fields, ...] = (
    ("q_length", "kv_length"),
    ("phase",),
    ("soft_cap",),
    ("batch",),
    ("num_q_heads", "num_kv_heads"),
)
_MAX_ALTERNATIVES = 3  # the number of other explanations of a finding that are tested by cases
_MAX_ROUNDS = 2  # probes of the first round may change what findings suspect, which the second round probes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suspicion:
    """The properties of a case (levels) that a failure seems to depend on."""

    implementation: str
    check: str
    failing: str  # the id of a case that fails
    # For each level that the failure seems to need, the fields of a case that decide the level.
    levels: tuple[Fields, ...]
    # For each level, values by field that remove the level from a case. Needed if the plain case has the level.
    counters: tuple[Mapping[str, Any], ...]
    # Changes of the plain case, as values by field. Each makes a case that distinguishes suspicions.
    examples: tuple[Mapping[str, Any], ...] = ()
    # For each level that the failure might need instead, the fields that decide the level.
    others: tuple[Fields, ...] = ()

    @property
    def is_probeable(self) -> bool:
        """Whether levels are suspected and the failing check can be run on any case."""
        return bool(self.levels) and CHECKS_BY_NAME[self.check].scope is GRID


class Prober:
    """Judge cases that confirm or refute suspicions, until the time is up."""

    def __init__(
        self,
        allowance: ProbeBudget,
        implementations: Sequence[Implementation],
        seconds: float,
        on_records: Callable[[list[Record]], None],
    ) -> None:
        self._allowance = allowance
        self._implementations = {implementation.name: implementation for implementation in implementations}
        self._deadline = time.monotonic() + seconds
        self._on_records = on_records
        self._verdicts: dict[tuple[str, str, str], bool] = {}
        self.judged = 0

    @property
    def is_late(self) -> bool:
        """Whether the prober's time is up."""
        return time.monotonic() >= self._deadline

    def remember(self, records: Sequence[Record]) -> None:
        """Remember the verdicts of records, so that no check judges the same case again."""
        for record in records:
            key = record.implementation, record.check, record.case
            self._verdicts[key] = self._verdicts.get(key, False) or record.verdict in RED

    def confirm(self, suspicion: Suspicion) -> None:
        """Judge the cases that confirm or refute a suspicion."""
        implementation = self._implementations.get(suspicion.implementation)
        base = _find_base_case(implementation) if implementation is not None else None
        if implementation is None or base is None or not suspicion.is_probeable:
            return
        failing = parse_case_id(suspicion.failing)
        all_fields = tuple(dict.fromkeys(name for fields in suspicion.levels for name in fields))
        plain = _transfer_fields(base, failing, all_fields, implementation)
        failing_case = plain if plain is not None and self._fails(suspicion, plain) else failing
        for case in (
            *_iter_without_levels(failing_case, base, suspicion),
            *_iter_other_cases(failing, base, suspicion, implementation),
        ):
            if not self.is_late and _is_supported(case, implementation):
                self._fails(suspicion, case)

    def confirm_failing_case(self, suspicion: Suspicion) -> None:
        """Judge the failing case itself without each of the suspected levels, even if the prober's time is up."""
        implementation = self._implementations[suspicion.implementation]
        base = _find_base_case(implementation)
        if base is not None and suspicion.is_probeable:
            for case in _iter_without_levels(parse_case_id(suspicion.failing), base, suspicion):
                if _is_supported(case, implementation):
                    self._fails(suspicion, case)

    def isolate(self, implementation: str, check: str, failing: str, groups: Sequence[Fields]) -> None:
        """Judge a failing case again, each time with one group of fields as in the plainest case."""
        nothing: tuple[Mapping[str, Any], ...] = ({},) * len(groups)
        suspicion = Suspicion(
            implementation=implementation, check=check, failing=failing, levels=tuple(groups), counters=nothing
        )
        found = self._implementations.get(implementation)
        base = _find_base_case(found) if found is not None else None
        if found is None or base is None or not suspicion.is_probeable:
            return
        for case in _iter_without_levels(parse_case_id(failing), base, suspicion):
            if not self.is_late and case.id != failing and _is_supported(case, found):
                self._fails(suspicion, case)

    def _fails(self, suspicion: Suspicion, case: Case) -> bool:
        """Tell whether a case fails the suspicion's check. Judge the case unless its verdict is known."""
        key = suspicion.implementation, suspicion.check, case.id
        if key not in self._verdicts:
            job = Job(self._implementations[suspicion.implementation], case, (CHECKS_BY_NAME[suspicion.check],))
            judged = self._allowance.judge(job)
            if judged is None:
                return False  # there was no time for it, so the verdict is unknown
            self.judged += 1
            self.remember(judged)
            self._on_records(judged)
        return self._verdicts.get(key, False)


def _find_base_case(implementation: Implementation) -> Case | None:
    """Return the plainest supported case; None if there is none."""
    return next(iter(BASE.cases(ImplementationGrids(implementation, "quick", 0))), None)


def _iter_without_levels(case: Case, base: Case, suspicion: Suspicion) -> Iterator[Case]:
    """Yield, for each suspected level, the case without this level: its fields get the values of the plain case."""
    for fields, counter in zip(suspicion.levels, suspicion.counters, strict=True):
        replacements = dataclasses.asdict(base) | dict(counter)
        yield from _iter_changed(case, {name: replacements[name] for name in fields})


def _iter_other_cases(case: Case, base: Case, suspicion: Suspicion, implementation: Implementation) -> Iterator[Case]:
    """Yield plain cases that show whether the failure needs other levels than the suspected ones."""
    for fields in suspicion.others:
        if (moved := _transfer_fields(base, case, fields, implementation)) is not None:
            yield moved
    for example in suspicion.examples:
        yield from _iter_changed(base, example)


def _transfer_fields(to: Case, source: Case, fields: Fields, implementation: Implementation) -> Case | None:
    """Return `to` with `fields` of `source`, and `_COMPANION_FIELDS` if needed; None if no such case is supported."""
    names = dict.fromkeys(fields)
    for more in ((), *_COMPANION_FIELDS):
        names |= dict.fromkeys(more)
        for case in _iter_changed(to, {name: getattr(source, name) for name in names}):
            if _is_supported(case, implementation):
                return case
    return None


def _iter_changed(case: Case, changes: Mapping[str, Any]) -> Iterator[Case]:
    """Yield the case with the changed fields, or nothing if the fields contradict each other."""
    with contextlib.suppress(CaseIdError):
        yield dataclasses.replace(case, **changes)


def _is_supported(case: Case, implementation: Implementation) -> bool:
    """Tell whether the implementation supports a case; False if its process cannot answer."""
    try:
        return implementation.supports(case) is None
    except SupportQueryFailed:
        return False


def confirm_findings(
    journal: Journal,
    implementations: Sequence[Implementation],
    allowed: ProbeBudget,
    seconds: float,
    say: Callable[[str], None],
) -> None:
    """Judge cases that confirm or refute the findings so far, and record them in the journal as probes.

    Probes count neither as passes nor as failures. `allowed` cuts off long cases; no case starts after `seconds`.
    """
    started = time.monotonic()
    prober = Prober(allowed, implementations, seconds, journal.add_probes)
    for _ in range(_MAX_ROUNDS):
        before = prober.judged
        prober.remember([*journal.recorded.records, *journal.recorded.probes])
        for finding in root_causes.find_root_causes(journal.recorded.records, journal.recorded.probes):
            if prober.is_late:
                break
            if _is_worth_probing(finding):
                prober.confirm(build_suspicion(finding))
            if finding.is_vague:
                prober.isolate(
                    finding.smallest.implementation, finding.located_by[0], finding.smallest.case, FIELD_GROUPS
                )
        if prober.judged == before or prober.is_late:
            break
    if prober.judged:
        cases, spent = format_count(prober.judged, "further case"), time.monotonic() - started
        found = root_causes.find_root_causes(journal.recorded.records, journal.recorded.probes)
        say(f"{cases} judged in {spent:.0f} s, {_describe_confirmed(found)}")


def _describe_confirmed(findings: Sequence[Finding]) -> str:
    """Describe how many findings the cases confirm, among those that name what a case needs to fail."""
    named = [finding for finding in findings if finding.levels]
    confirmed = sum(finding.is_confirmed for finding in named)
    return f"confirming {confirmed or 'none'} of {format_count(len(named), 'finding')}"


def _is_worth_probing(finding: Finding) -> bool:
    """Tell whether probes could still confirm or change the cause that a finding names."""
    settled = not finding.others and (finding.is_confirmed or finding.passes)
    # If the failing case killed the kernel's process, judging similar cases would kill further processes.
    lost = finding.kind == RAISES and finding.smallest.reason.endswith(ABANDONED_CASE)
    return bool(finding.levels) and not settled and not lost


def build_suspicion(finding: Finding) -> Suspicion:
    """Build the suspicion to probe: the levels that a finding needs, and the levels of alternative explanations."""
    levels, others = finding.levels or (), finding.others[:_MAX_ALTERNATIVES]
    record: Record = finding.smallest
    with_examples = [x for combination in (levels, *others) for x in combination if others and x.example]
    return Suspicion(
        implementation=record.implementation,
        check=finding.located_by[0],
        failing=record.case,
        levels=tuple(level.fields for level in levels),
        counters=tuple(dict(level.counter) for level in levels),
        examples=tuple(dict(level.example) for level in with_examples),
        others=tuple(tuple(name for level in other for name in level.fields) for other in others if not with_examples),
    )
