"""Check `branches`: which branches of the kernel's own source no case reaches, and which cases reach further ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cases.case import CaseIdError
from cases.case_id import parse_case_id
from conformance.check_api.branch_search_request import FurtherCase
from conformance.check_api.judgement import Judgement, build_unsupported
from conformance.check_api.subject import Subject
from conformance.execution.executor import Executor
from conformance.executor_tasks.branch_search import search_branches
from reports import records
from reports.unreached_branches import REACHES

_TRACES_PER_CASE, _MORE_TRACES = 2, 60
"""The search may trace each planned case, and as many cases again, and some more."""
_SECONDS = 20.0
"""After so many seconds of processor time the search is cut off. As a rule, the number of traces ends it before."""
_MAX_FOUND = 24
"""The most cases that are added to a run."""

_Text = Annotated[str, Meta(max_length=400)]
_Index = Annotated[int, Meta(ge=0)]
_Branch = tuple[_Index, bool]


class FoundBranches(msgspec.Struct, forbid_unknown_fields=True):
    """The result of a search as the kernel's process sends it, which the kernel could have forged."""

    conditions: dict[str, tuple[_Text, _Index, _Text, bool]]
    unreached: Annotated[list[tuple[_Index, bool, _Text]], Meta(max_length=1000)]
    found: Annotated[list[tuple[_Text, list[_Branch]]], Meta(max_length=1000)]
    refused: Annotated[list[tuple[_Index, bool, _Text, _Text]], Meta(max_length=1000)]
    beyond: Annotated[list[tuple[_Text, _Index]], Meta(max_length=100)]
    absent: list[_Text]
    reached: _Index
    traces: _Index
    is_cut_off: bool

    def describe(self, index: int, outcome: bool, adverb: str = "") -> tuple[str, str]:
        """Return where a branch is, and its condition with the outcome in words, after the adverb."""
        file, line, text, is_loop = self.conditions[str(index)]
        if is_loop:
            return f"{file}:{line}", f"the body of `{text}` {adverb}runs"
        return f"{file}:{line}", f"`{text}` is {adverb}{'true' if outcome else 'false'}"

    def list_cases(self) -> list[FurtherCase]:
        """List the cases that reach further branches, and those that are longer than numbers in the source.

        Raises:
          CaseIdError, ValueError, KeyError: if a case or a branch that was sent does not exist.
        """
        reached = [FurtherCase(parse_case_id(text), self._describe_reached(branches)) for text, branches in self.found]
        return reached + [
            FurtherCase(parse_case_id(text), f"the case is longer than {number}, a number in the kernel's source")
            for text, number in self.beyond
        ]

    def _describe_reached(self, branches: list[_Branch]) -> str:
        described = [" ".join(self.describe(*branch)) for branch in branches]
        return f"{REACHES}{', '.join(dict.fromkeys(described))}"


def search_from(
    executor: Executor, planned: Sequence[str], packages: Sequence[str] = (), *, beyond_numbers: bool
) -> FoundBranches:
    """Search for the branches that the planned cases, given by their ids, do not reach.

    Raises:
      msgspec.ValidationError: if the kernel's process sends no valid result.
    """
    budget = _TRACES_PER_CASE * len(planned) + _MORE_TRACES
    sent = executor.run(search_branches, planned, packages, budget, _SECONDS, beyond_numbers=beyond_numbers)
    return msgspec.convert(sent, FoundBranches)


def check_branches(subject: Subject) -> Iterator[Judgement]:
    """Check that the cases reach every branch of the kernel's source; further cases are searched for, and judged too.

    A branch that no case reaches is reported as unjudged.
    """
    search = subject.branch_search
    planned = search.cases or (subject.case.id,)
    try:
        found = search_from(subject.executor, planned, search.packages, beyond_numbers=search.beyond_numbers)
        cases = found.list_cases()
        yield from _judge(found)
        for package in found.absent:
            reason = f"the kernel does not import {package}, so none of its branches were searched"
            yield Judgement(observable=f"package.{package}", verdict=records.UNJUDGED, reason=reason)
    except (msgspec.ValidationError, CaseIdError, KeyError, ValueError) as error:
        reason = f"the kernel's process sent no valid result of the search: {error}"
        yield Judgement(observable="search", verdict=records.ERROR, reason=reason)
        return
    further = [each for each in cases if each.case.id not in search.cases]
    subject.further_cases.extend(further[:_MAX_FOUND])
    if (left := len(further) - _MAX_FOUND) > 0:
        reason = f"{left} more cases reach other branches, and are not judged: a run adds {_MAX_FOUND} at most"
        yield Judgement(observable="further_cases", verdict=records.UNJUDGED, reason=reason)


def _judge(found: FoundBranches) -> Iterator[Judgement]:
    """Judge the branches that no case reaches, and those that only refused calls reach."""
    if not found.reached:
        yield build_unsupported("reached", "no source of the kernel was read, or it has no branches")
        return
    named: dict[str, int] = {}

    def build(where: str, reason: str) -> Judgement:
        named[where] = named.get(where, 0) + 1
        observable = where if named[where] == 1 else f"{where}.{named[where]}"
        return Judgement(observable=observable, verdict=records.UNJUDGED, reason=reason)

    for index, outcome, nearest in found.unreached:
        where, words = found.describe(index, outcome, "never ")
        yield build(where, f"{words}{f' (nearest: {nearest})' if nearest else ''}")
    for index, outcome, case, error in found.refused:
        where, words = found.describe(index, outcome)
        yield build(where, f"{words} only in calls that raise what no declaration announces: {error} ({case})")
    cut_off = ", and was cut off" if found.is_cut_off else ""
    reason = f"{found.reached} branches were reached in {found.traces} traces{cut_off}"
    figures: dict[str, Any] = {"branches": float(found.reached), "traces": float(found.traces)}
    yield Judgement(observable="reached", verdict=records.PASS, reason=reason, figures=figures)
