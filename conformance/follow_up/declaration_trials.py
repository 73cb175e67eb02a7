"""Judge failing cases again under declarations, to tell what differs by convention or arithmetic from what is wrong.

Some failures of each finding are judged under each candidate alone, then together with the declarations that explain
other findings. A candidate that explains them must also leave right what is right. Verdicts do not change by it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from reports.causes.finding import UNEXPECTED, UNREPEATABLE, Finding, get_result
from reports.records import ERROR, EXPECTED_FAIL, PASS, RED, DeclarationTrial, Proposal, Record
from reports.text_format import format_count

_MAX_FAILING, _MAX_PASSING = 3, 3  # the most cases of a finding, and of right cases, that are judged under a candidate
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
        right = _list_right(one for one in records if one.implementation == implementation.name)
        trials = _Trials(implementation, allowed, started + seconds, right)
        for finding in own[:_MAX_FINDINGS]:
            trials.explain(finding)
        trials.judge_together(own[:_MAX_FINDINGS])
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
        self, implementation: Implementation, allowed: ProbeBudget, deadline: float, right: Sequence[_Place]
    ) -> None:
        self._implementation, self._allowed, self._deadline, self._right = implementation, allowed, deadline, right
        self._found: dict[str, Any] = {}  # the declarations that explain findings
        self._explained: list[tuple[Finding, dict[str, Any]]] = []
        self._declared: dict[str, Implementation] = {}
        self._wrong: dict[tuple[str, str, str], frozenset[str] | None] = {}
        self._trials: dict[tuple[str, str, str], DeclarationTrial] = {}
        self.judged = 0

    def explain(self, finding: Finding) -> None:
        """Search for declarations under which a finding passes and under which right cases stay right."""
        candidates = list_candidates(finding, self._implementation)
        known = [c for c in candidates if c.declarations.items() <= self._found.items()]
        alone = [c for c in candidates if c not in known]
        together = [
            dataclasses.replace(c, declarations={**self._found, **c.declarations})
            for c in alone
            if self._found and not any(self._found.get(name, value) != value for name, value in c.declarations.items())
        ]
        for candidate in (*known, *alone, *together):
            try:
                if self._passes(finding, candidate) and self._keeps_right(finding, candidate.declarations):
                    self._found |= candidate.declarations
                    self._explained.append((finding, dict(candidate.declarations)))
                    return
            except _OutOfTime:
                return

    def judge_together(self, findings: Sequence[Finding]) -> None:
        """Judge one failing case of each finding under all declarations that explain some finding."""
        for finding, declarations in self._explained:
            if declarations != self._found:
                try:
                    self._passes(finding, Candidate(self._found, declines=True), most=1)
                except _OutOfTime:
                    return

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

    def _passes(self, finding: Finding, candidate: Candidate, most: int = _MAX_FAILING) -> bool:
        """Return whether a finding's failing cases pass under a candidate, at least one of them judged."""
        seen = False
        for check, case in _choose_failing(finding)[:most]:
            wrong = self._judge(candidate.declarations, check, case, declines=candidate.declines)
            if wrong is None:
                continue
            seen = True
            if wrong & {"all", *list_wrong_results(finding, check, case)}:
                return False
        return seen

    def _keeps_right(self, finding: Finding, declarations: Mapping[str, Any]) -> bool:
        """Return whether right cases that the declarations concern stay right under them."""
        checks = {finding.located_by[0], "forward", "residuals"}
        places = [place for place in self._right if place[0] in checks and concerns(declarations, place[1])]
        return not any(
            self._judge(declarations, check, case, declines=True) for check, case in _spread(places, _MAX_PASSING)
        )

    def _judge(
        self, declarations: Mapping[str, Any], check: str, case: str, *, declines: bool
    ) -> frozenset[str] | None:
        """Judge a case under declarations and return what is wrong; None if nothing was judged.

        With `declines`, nothing is wrong if the case is not supported under the declarations.

        Raises:
          _OutOfTime: if there is no time to judge it.
        """
        words = _format_words(declarations)
        key = ", ".join(words), check, case
        if key not in self._wrong:
            if time.monotonic() >= self._deadline:
                raise _OutOfTime
            found = self._run(declarations, ", ".join(words), check, case)
            if found is None:
                raise _OutOfTime
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
        return self._allowed.judge(
            Job(implementation, converted, (CHECKS_BY_NAME[check],)), self._deadline - time.monotonic()
        )


def _format_words(declarations: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        WRAPPERS[name] if name in CALL_CONVENTIONS else format_declaration(name, value)
        for name, value in declarations.items()
    )


def _choose_failing(finding: Finding) -> list[_Place]:
    """Choose few failing cases: the plainest, the one with the largest error of the small ones, and an unlike one."""
    own = [record for record in finding.own if record.check in CHECKS_BY_NAME and "/" in record.case]
    cheap: dict[_Place, float] = {}
    for record in sorted(own, key=lambda record: (estimate_size(record.case), record.key)):
        place = record.check, record.case
        cheap[place] = max(cheap.get(place, 0.0), (record.ratio or 0.0) / (record.limit or 1.0))
    first = (finding.smallest.check, finding.smallest.case)
    places = list(cheap)[:_MAX_CHEAP]
    if first[0] in CHECKS_BY_NAME and first not in places and "/" in first[1]:
        places.insert(0, first)
    places.sort(key=lambda place: (place != first, -cheap.get(place, 0.0)))
    return _spread(places, _MAX_FAILING)


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
