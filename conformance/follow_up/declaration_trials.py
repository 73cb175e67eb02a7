"""Judge failing cases again under declarations, to tell what differs by convention or arithmetic from what is wrong.

Some failures of each finding are judged under each candidate alone, then together with the declarations that explain
other findings. A candidate that explains them must also leave right what is right. Verdicts do not change by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from cases.case_id import parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.call_conventions import CALL_CONVENTIONS
from conformance.execution.plain_support import PlainSupport
from conformance.follow_up.candidate_declarations import (
    WRAPPERS,
    Candidate,
    concerns,
    convert_case,
    estimate_size,
    list_candidates,
    list_wrong_results,
)
from conformance.follow_up.probe_budget import ProbeBudget
from conformance.judging.declarations import list_declarations, redeclare_implementation
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.judging.runner import ABANDONED_CASE
from conformance.sandbox.sandboxed_executor import SupportQueryFailed
from impls.contract.declarations import Declaration, format_declaration, list_fields
from impls.contract.implementation import Implementation
from reports.causes import root_causes
from reports.causes.case_levels import find_levels
from reports.causes.finding import FORWARD, UNEXPECTED, UNREPEATABLE, Finding, get_result
from reports.records import ERROR, EXPECTED_FAIL, JUDGED, PASS, RED, DeclarationTrial, Proposal, Record
from reports.text_format import format_count

_MAX_FAILING, _MAX_PASSING = 3, 3  # the most cases of a finding, and of right cases, that are judged under a candidate
_GRADIENT_CHECKS = ("gradients", "gradients_lse")
_MAX_FINDINGS = 10  # the most findings of an implementation that are tried
_MAX_CHEAP = 8  # cases are chosen among so many of the smallest
_Place = tuple[str, str]
"""A check, and the id of a case."""


def try_declarations(
    journal: Journal,
    implementations: Sequence[Implementation],
    allowed: ProbeBudget,
    seconds: float,
    say: Callable[[str], None],
) -> None:
    """Judge failures of all findings under candidate declarations, and add what explains them to the journal.

    No case starts after `seconds`.
    """
    started, judged = time.monotonic(), 0
    records, probes = journal.recorded.records, journal.recorded.probes
    findings = root_causes.find_root_causes(records, probes)
    for implementation in implementations:
        own = [f for f in findings if f.implementation.name == implementation.name and _may_be_explained(f)]
        if not own or implementation.accelerator.absent is not None:
            continue
        its_records = [one for one in records if one.implementation == implementation.name]
        trials = _Trials(implementation, own[:_MAX_FINDINGS], allowed, started + seconds, its_records)
        with contextlib.suppress(_OutOfTime):
            trials.explain_findings()
        judged += trials.judged
        if trials.judged:
            journal.add_proposal(trials.build_proposal(own[0].implementation.platform))
    if judged:
        cases = format_count(judged, "case")
        say(f"{cases} judged again under other declarations in {time.monotonic() - started:.0f} s")


def _may_be_explained(finding: Finding) -> bool:
    return finding.kind not in (UNREPEATABLE, UNEXPECTED) and not finding.smallest.reason.endswith(ABANDONED_CASE)


def _list_right(records: Iterable[Record]) -> list[_Place]:
    """List the checks and cases all of whose results are right, the smallest cases first."""
    verdicts: dict[_Place, set[str]] = {}
    for record in records:
        verdicts.setdefault((record.check, record.case), set()).add(record.verdict)
    wrong = {*RED, EXPECTED_FAIL}
    found = [place for place, of in verdicts.items() if PASS in of and not of & wrong and place[0] in CHECKS_BY_NAME]
    return sorted(found, key=lambda place: (estimate_size(place[1]), place))


class _OutOfTime(Exception):
    """No time is left to judge a case."""


class _Trials:
    """The cases of one implementation that are judged under declarations."""

    def __init__(
        self,
        implementation: Implementation,
        findings: Sequence[Finding],
        allowed: ProbeBudget,
        deadline: float,
        records: Sequence[Record],
    ) -> None:
        judged = {(record.check, record.case) for record in records if record.verdict in JUDGED}
        self._implementation, self._allowed, self._deadline = implementation, allowed, deadline
        self._right = _list_right(records)
        self._candidates = [(finding, list_candidates(finding, implementation)) for finding in findings]
        self._failing = {id(finding): _choose_failing(finding, findings) for finding in findings}
        self._following = {id(finding): _choose_following(finding, findings, judged) for finding in findings}
        self._found: dict[str, Any] = {}  # the declarations that explain findings
        self._declared: dict[str, Implementation] = {}
        self._wrong: dict[tuple[str, str, str], frozenset[str] | None] = {}
        self._trials: dict[tuple[str, str, str], DeclarationTrial] = {}
        self.judged = 0

    def explain_findings(self) -> None:
        """Search for declarations under which findings pass, alone and then together, while right cases stay right.

        Raises:
          _OutOfTime: if there is no time for all cases.
        """
        explained: list[tuple[Finding, Mapping[str, Any]]] = []
        for finding, candidates in self._candidates:
            known = [c for c in candidates if c.declarations.items() <= self._found.items()]
            if found := self._find_first(finding, [*known, *(c for c in candidates if c not in known)]):
                explained.append((finding, found))
        for finding, candidates in self._candidates if self._found else ():
            if all(other is not finding for other, _ in explained):
                joined = [c for c in map(self._join_found, candidates) if c.declarations != self._found]
                if found := self._find_first(finding, joined):
                    explained.append((finding, found))
        for finding, declarations in explained:
            if declarations != self._found:
                self._judge(self._found, *self._failing[id(finding)][0], declines=True)

    def _join_found(self, candidate: Candidate) -> Candidate:
        return dataclasses.replace(candidate, declarations={**candidate.declarations, **self._found})

    def _find_first(self, finding: Finding, candidates: Iterable[Candidate]) -> Mapping[str, Any]:
        """Find the first candidate that explains a finding, and keep its declarations; empty if there is none.

        If a candidate explains the finding's own results and not the gradients that follow, the backward pass has a
        mistake. Then no weaker candidate is tried, under which the mistake could pass.
        """
        for candidate in candidates:
            if not self._explains(finding, candidate, self._failing[id(finding)]):
                continue
            if not self._explains(finding, candidate, self._following[id(finding)]):
                return {}
            self._found |= candidate.declarations
            return candidate.declarations
        return {}

    def build_proposal(self, platform: str) -> Proposal:
        """Build the line of the file that says what explains findings, and which cases were judged for it."""
        names = [name for name in self._found if name not in CALL_CONVENTIONS]
        loosens = {field.name: field.metadata["loosens"] for field in list_fields(Declaration)}
        return Proposal(
            implementation=self._implementation.name,
            platform=platform,
            declarations=tuple(format_declaration(name, self._found[name]) for name in names),
            wrappers=tuple(WRAPPERS[name] for name in self._found if name in CALL_CONVENTIONS),
            loosens={
                format_declaration(name, self._found[name]): loosens[name]
                for name in names
                if loosens[name] != "nothing"
            },
            is_function=isinstance(self._implementation.supports_case, PlainSupport),
            declares=bool(list_declarations(self._implementation)),
            trials=tuple(self._trials.values()),
        )

    def _explains(self, finding: Finding, candidate: Candidate, failing: Sequence[_Place]) -> bool:
        """Return whether failing cases of a finding pass under a candidate, and right cases stay right.

        If the time runs out, one of each suffices.
        """
        checks, declarations = {finding.located_by[0], "forward", "residuals"}, candidate.declarations
        concerned = [place for place in self._right if place[0] in checks and concerns(declarations, place[1])]
        right = _spread(concerned, _MAX_PASSING)
        passed: set[bool] = set()  # whether a failing case passed, and whether a right case did
        for place in (*failing[:1], *right[:1], *failing[1:], *right[1:]):
            is_failing = place in failing
            try:
                wrong = self._judge(declarations, *place, declines=candidate.declines or not is_failing)
            except _OutOfTime:
                return passed >= ({True, False} if right else {True})
            if wrong is None:
                continue
            own = list_wrong_results(finding, *place)  # other results may be wrong by another finding
            if wrong & {"all", *own} if own else wrong:
                return False
            passed.add(is_failing)
        return True in passed or not failing

    def _judge(
        self, declarations: Mapping[str, Any], check: str, case: str, *, declines: bool
    ) -> frozenset[str] | None:
        """Judge a case under declarations and return what is wrong; None if nothing was judged or it takes too long.

        With `declines`, nothing is wrong if the case is not supported under the declarations.

        Raises:
          _OutOfTime: if no case may start any more.
        """
        words = _format_words(declarations)
        key = ", ".join(words), check, case
        if key not in self._wrong:
            if time.monotonic() >= self._deadline:
                raise _OutOfTime
            found = self._run(declarations, ", ".join(words), check, case)
            if found is None:
                return None
            red = [one for one in found if one.verdict in (*RED, EXPECTED_FAIL)]
            wrong = frozenset("all" if one.verdict == ERROR else get_result(one.observable) for one in red)
            self._wrong[key] = wrong if red or any(one.verdict == PASS for one in found) else None
            if self._wrong[key] is not None or declines:
                self._trials[key] = DeclarationTrial(
                    check=check, case=case, declarations=words, wrong=tuple(sorted(wrong))
                )
        wrong_results = self._wrong[key]
        return frozenset() if wrong_results is None and declines else wrong_results

    def _run(self, declarations: Mapping[str, Any], words: str, check: str, case: str) -> list[Record] | None:
        if words not in self._declared:
            self._declared[words] = redeclare_implementation(self._implementation, declarations)
        implementation = self._declared[words]
        converted = convert_case(parse_case_id(case), declarations)
        try:
            if implementation.supports(converted) is not None:
                return []
        except SupportQueryFailed:
            return []
        self.judged += 1
        job = Job(implementation, converted, (CHECKS_BY_NAME[check],))
        return self._allowed.judge(job, self._deadline - time.monotonic(), is_known=True)


def _format_words(declarations: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        WRAPPERS[name] if name in CALL_CONVENTIONS else format_declaration(name, value)
        for name, value in declarations.items()
    )


def _choose_failing(finding: Finding, findings: Sequence[Finding]) -> list[_Place]:
    """Choose few failing cases: the plainest, the one with the largest error of the small ones, and an unlike one.

    Cases that another finding concerns too are not chosen if there are others, since they may fail for two reasons.
    """
    rivals = [set(other.levels) for other in findings if other is not finding and other.levels]
    own = [record for record in finding.own if record.check in CHECKS_BY_NAME and "/" in record.case]
    own.sort(key=lambda r: (any(one <= find_levels(r.case) for one in rivals), estimate_size(r.case), r.key))
    errors: dict[_Place, float] = {}
    for record in own:
        place = record.check, record.case
        errors[place] = max(errors.get(place, 0.0), (record.ratio or 0.0) / (record.limit or 1.0))
    first = (finding.smallest.check, finding.smallest.case)
    alone = [place for place in errors if not any(one <= find_levels(place[1]) for one in rivals)]
    places = (alone or list(errors))[:_MAX_CHEAP]
    if first[0] in CHECKS_BY_NAME and first not in places and "/" in first[1]:
        places.insert(0, first)
    return _spread(sorted(places, key=lambda place: (place != first, -errors.get(place, 0.0))), _MAX_FAILING)


def _choose_following(finding: Finding, findings: Sequence[Finding], judged: Collection[_Place]) -> list[_Place]:
    """Choose the smallest failing case of a wrong forward pass whose gradients were judged, and that is of no other.

    The gradients may be right under the contract's convention although `out` is not.
    """
    if finding.kind != FORWARD:
        return []
    rivals = [set(other.levels) for other in findings if other is not finding and other.levels is not None]
    cases = {record.case for record in finding.own}
    places = [(check, case) for check in _GRADIENT_CHECKS for case in cases if (check, case) in judged]
    alone = [place for place in places if not any(one <= find_levels(place[1]) for one in rivals)]
    return sorted(alone, key=lambda place: (estimate_size(place[1]), place))[:1]


def _spread(places: Sequence[_Place], most: int) -> list[_Place]:
    """Choose places in their order, but first one of each check and mask."""
    chosen: list[_Place] = []
    seen: set[tuple[str, str]] = set()
    for place in places:
        kind = place[0], place[1].split("/")[3] if place[1].count("/") > 3 else ""
        if kind not in seen:
            seen.add(kind)
            chosen.append(place)
    return [*chosen, *(place for place in places if place not in chosen)][:most]
