"""Diagnose findings at the end of a run: name the planted bugs that each finding resembles.

Each finding is compared by itself. Error profile cases with the levels that it needs show how wrong the kernel is, and
cases that no finding concerns show where it is right. A case that several findings concern tells little of any of them,
so such a case is used only where a finding has no other. One or two cases often suffice: two kernels that compute the
same wrong thing have the same ratios, and a match of several ratios within 1% is no coincidence.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cases.error_profile_cases import ERROR_PROFILE_CASES
from conformance.judging.job import Job
from conformance.sensitivity import diagnosis, error_profiles
from conformance.sensitivity.diagnosis import SAME_SIMILARITY, Similarity
from conformance.sensitivity.error_profiles import CHECK_SEPARATOR, ErrorProfile, KnownBug, Sizes
from impls.contract.implementation import Implementation
from reports.causes import fault_location, root_causes
from reports.causes.case_levels import Level, find_levels
from reports.causes.finding import FORWARD, GRADIENTS, RAISES, Finding, get_result
from reports.causes.sorts import find_covering_declarations
from reports.record_groups import group_by_implementation
from reports.records import ERROR, FAIL, JUDGED, Diagnosis, Record, RunInfo, SimilarBug
from reports.text_format import format_count

if TYPE_CHECKING:  # they load JAX, and a report judges nothing
    from conformance.follow_up.probe_budget import ProbeBudget
    from conformance.judging.journal import Journal

_FAILED_VERDICTS = (FAIL, ERROR)  # an unexpected pass resembles no bug
_COMPARED_KINDS = (FORWARD, GRADIENTS)
"""Findings that are compared. Error profiles have no other checks, and a line that raises says more than a likeness."""
_CLEAR_LEAD = 0.2
"""How much more similar the first bug must be than the second, for no further case to be judged.

Bugs that are less similar than the first by more than this are not named beside it.
"""
_MIN_SIMILARITY = 0.5
"""The least similarity of a bug that is named for a finding.

It is above the minimum for a whole kernel, because a finding is compared on few cases. A bug that is wrong in the same
results of the same cases, and in no others, needs the minimum for a whole kernel only.
"""
_PROFILE_CHECKS = frozenset({"forward", "gradients", "residuals"})


def measure_profiles_of_failed(
    journal: Journal,
    implementations: Sequence[Implementation],
    allowed: ProbeBudget,
    say: Callable[[str], None],
    *,
    option: str = "--diagnose-seconds",
) -> None:
    """Judge error profile cases for the findings of each failing kernel in the `allowed` time; none is counted."""
    if not allowed.left:
        return
    wrong = {record.implementation for record in journal.recorded.records if record.verdict in _FAILED_VERDICTS}
    failed = [one for one in implementations if one.name in wrong and one.accelerator.absent is None]
    if not failed:
        return
    bank, proposals = error_profiles.load_profiles(), journal.recorded.proposals
    found = root_causes.find_root_causes(journal.recorded.records, journal.recorded.probes)
    for number, implementation in enumerate(failed):
        if not allowed.left:  # asking what it supports would start its process again
            return
        findings = [
            finding
            for finding in found
            if finding.implementation.name == implementation.name and finding.kind in _COMPARED_KINDS
        ]
        if not findings:
            continue
        started, mine = time.monotonic(), allowed.left / (len(failed) - number)
        records = [record for record in journal.recorded.records if record.implementation == implementation.name]
        right = list_right_cases(records, [f for f in found if f.implementation.name == implementation.name])
        proposal = next((one for one in proposals if one.implementation == implementation.name), None)
        covered = {number for number, one in enumerate(findings) if find_covering_declarations(one, proposal)}
        if len(covered) == len(findings):
            continue
        comparison = _Comparison(findings, right, bank, covered)
        jobs = list(error_profiles.iter_profile_jobs(implementation))
        cases = 0
        while (job := comparison.choose_next(jobs)) is not None:
            jobs.remove(job)
            judged = allowed.judge(job, mine - (time.monotonic() - started))
            if judged is not None:
                journal.add_probes(judged)
                comparison.add(judged)
                cases += 1
        spent = time.monotonic() - started
        line = f"{implementation.name} compared with planted bugs on {format_count(cases, 'case')} in {spent:.0f} s"
        is_short = allowed.declined and not comparison.is_settled
        say(f"{line} of at most {mine:.0f} ({option}=60 for more)" if is_short else line)


class _Comparison:
    """The comparison of a kernel's findings with planted bugs, as cases are judged."""

    def __init__(
        self,
        findings: Sequence[Finding],
        right: Mapping[str, Sizes],
        bank: Sequence[KnownBug],
        covered: Collection[int] = (),
    ) -> None:
        """Begin a comparison. Findings that declarations cover, given by their places, need no case."""
        self._findings, self._right, self._bank, self._covered = findings, right, bank, frozenset(covered)
        self._probes: list[Record] = []
        self._cases_of = [0] * len(findings)
        self._settled = self._covered

    @property
    def is_settled(self) -> bool:
        """Whether each finding has one bug that is clearly the most similar."""
        return len(self._settled) == len(self._findings)

    def choose_next(self, jobs: Sequence[Job]) -> Job | None:
        """Choose the best case for the unsettled finding that has the fewest so far; None if no case says more."""
        waiting = [number for number in range(len(self._findings)) if number not in self._settled]
        for number in sorted(waiting, key=lambda number: self._cases_of[number]):
            ranked = [(rank, place) for place, job in enumerate(jobs) if (rank := self._rank(number, job)) is not None]
            if ranked:
                self._cases_of[number] += 1
                return jobs[min(ranked)[1]]
        return next((job for job in jobs if self._may_show(waiting, job) and job.case.id not in self._right), None)

    def _may_show(self, numbers: Iterable[int], job: Job) -> bool:
        """Return whether a case judges results of the kind that one of these findings, given by their places, is of."""
        return any(self._findings[number].kind != GRADIENTS or job.case.phase == "train" for number in numbers)

    def _rank(self, number: int, job: Job) -> tuple[bool, bool, int] | None:
        """Rank how much a case says of a finding; None for a case that says nothing."""
        finding, case = self._findings[number], job.case.id
        shared = _count_shared(finding, case)
        if (finding.levels and not shared) or not self._may_show([number], job):
            return None
        others = sum(_concerns(other, case) for other in self._findings if other is not finding)
        if finding.levels is None:  # cases with the features of one that fails say most
            features = _select_features(case) & _select_features(finding.smallest.case)
            return False, others > 0, others - len(features)
        missing = len(finding.levels) - shared
        return missing > 0, others > 0, missing + others

    def add(self, judged: Iterable[Record]) -> None:
        """Add the records of a case, and settle the findings that they decide."""
        self._probes += judged
        similar = find_similar_bugs(self._findings, self._probes, self._right, self._bank)
        self._settled = self._covered | {number for number, bugs in similar.items() if _is_clear(bugs)}


def _is_clear(nearest: Sequence[Similarity] | None) -> bool:
    """Return whether one bug has the same numbers, and no bug of another kind nearly has."""
    if not nearest or not _is_same(nearest):
        return False
    return len(nearest) == 1 or nearest[0].similarity - nearest[1].similarity >= _CLEAR_LEAD


def _is_same(nearest: Sequence[Similarity]) -> bool:
    return bool(nearest) and nearest[0].similarity >= SAME_SIMILARITY


def find_similar_bugs(
    findings: Sequence[Finding], probes: Iterable[Record], right: Mapping[str, Sizes], bank: Sequence[KnownBug]
) -> dict[int, list[Similarity] | None]:
    """Find the planted bugs most similar to each finding of a kernel.

    Args:
      findings: those of the kernel that can be compared.
      probes: its records of error profile cases.
      right: error profile cases that are known to be right, with their results.
      bank: the planted bugs.

    Returns:
      For each finding, by its place: the most similar bugs, none if it is similar to none of them. None stands for a
      finding that shows on none of the judged cases, and a finding without judged cases is left out.
    """
    profile = error_profiles.build_profile(probes)
    owners = {case: _find_owners(case, findings) for case in profile.sizes}
    found: dict[int, list[Similarity] | None] = {}
    for number in range(len(findings)):
        if not any(number in of_case for of_case in owners.values()):
            continue
        own = _select_profile(number, findings, profile, owners, right)
        is_possible = functools.partial(_can_cause, findings[number])
        found[number] = diagnosis.find_nearest(own, bank, is_possible) if own.wrong else None
    return found


def _can_cause(finding: Finding, bug: KnownBug) -> bool:
    """Return whether the levels of a finding also distinguish the cases in which a planted bug is wrong.

    Only the results that are wrong in the finding count. A bug that is never wrong where the finding fails cannot be
    its cause. Nor can one that is as often wrong where the finding passes, however similar its errors are on the few
    cases that were judged. All error profile cases of the bug are used, since they are stored.
    """
    results = {"all", *(name.removesuffix("_with_residuals") for name in finding.results)}
    combinations = [frozenset(levels) for levels in (finding.levels or (), *finding.others)]
    inside = red = green = 0
    for place, (case, sizes) in enumerate(bug.profile.sizes.items()):
        row = 1 << place
        judged = [size for name, size in sizes.items() if _is_result_of(name, results, finding.checks)]
        inside |= row * any(levels <= find_levels(case) for levels in combinations)
        red |= row * any(size is not None for size in judged)
        green |= row * (bool(judged) and all(size is None for size in judged))
    if green and not red:
        return False  # its results of the finding are right
    if not finding.levels or not (inside & (red | green) and ~inside & (red | green)):
        return True  # no error profile case tells
    return fault_location.explains(fault_location.Combination((), inside), fault_location.Signal(red, green))


def _is_result_of(name: str, results: Collection[str], checks: Collection[str]) -> bool:
    """Return whether an entry of an error profile, such as `dk` or `dk@poison`, is of these results and checks."""
    result, _, check = name.partition(CHECK_SEPARATOR)
    return result in results and (not check or check in checks)


def _select_profile(
    number: int,
    findings: Sequence[Finding],
    profile: ErrorProfile,
    owners: Mapping[str, Sequence[int]],
    right: Mapping[str, Sizes],
) -> ErrorProfile:
    """Select what an error profile says of one finding.

    Cases that the finding alone concerns come first. If it shows on none of them, cases that other findings concern too
    are taken.
    """
    is_forward = findings[number].kind == FORWARD
    alone: dict[str, Sizes] = {}
    shared: dict[str, Sizes] = {}
    for case, sizes in profile.sizes.items():
        # Gradients follow from a wrong forward pass, but not the other way round.
        rivals = [other for other in owners[case] if other != number]
        if is_forward and rivals and all(findings[other].kind == GRADIENTS for other in rivals):
            sizes, rivals = {name: size for name, size in sizes.items() if not name.startswith("d")}, []
        is_right = all(size is None for size in sizes.values())
        if (number in owners[case] and not rivals) or (is_right and (is_forward or not rivals)):
            alone[case] = sizes
        elif number in owners[case] and (is_forward or sizes.get("out") is None):
            shared[case] = sizes  # where `out` is wrong for another reason, gradients are wrong as a consequence
    selected = alone if any(size is not None for sizes in alone.values() for size in sizes.values()) else alone | shared
    return ErrorProfile({**{case: sizes for case, sizes in right.items() if case not in profile.sizes}, **selected})


def _find_owners(case: str, findings: Sequence[Finding]) -> list[int]:
    """Find the findings that concern a case: those with all their levels there, or else with most of them."""
    full = [number for number, finding in enumerate(findings) if _concerns(finding, case)]
    if full:
        return full
    shared = [_count_shared(finding, case) for finding in findings]
    most = max(shared, default=0)
    partly = [number for number, count in enumerate(shared) if count and count == most]
    return partly or [number for number, finding in enumerate(findings) if finding.levels is None]


def _concerns(finding: Finding, case: str) -> bool:
    """Return whether a case has all levels that a finding needs."""
    return finding.levels is not None and _find_compared_levels(finding) <= find_levels(case)


def _select_features(case: str) -> frozenset[Level]:
    """Return the levels that a case asks for by itself, without sizes and levels that follow from others."""
    return frozenset(level for level in find_levels(case) if not level.odds)


def _count_shared(finding: Finding, case: str) -> int:
    """Return how many levels of a finding a case has."""
    return len(_find_compared_levels(finding) & find_levels(case))


def _find_compared_levels(finding: Finding) -> frozenset[Level]:
    """Find the levels by which cases are chosen for a finding: its own, if an error profile case has one of them.

    Otherwise they are those of an alternative that no judged case distinguishes, if it has such a case.
    """
    combinations = [frozenset(levels) for levels in (finding.levels or (), *finding.others)]
    present = (levels for levels in combinations if levels & _find_profile_levels())
    return next(present, combinations[0])


@functools.cache
def _find_profile_levels() -> frozenset[Level]:
    """Find the levels that error profile cases have."""
    return frozenset().union(*(find_levels(one.case.id) for one in ERROR_PROFILE_CASES))


def add_diagnoses(info: RunInfo, found: Sequence[Record], *, is_followed_up: bool = False) -> RunInfo:
    """Add to what a report says which planted bugs each finding resembles.

    Args:
      info: what the report says so far, with the probes of the run.
      found: the records of the run.
      is_followed_up: whether the run was to compare every finding, so that one without a case lacked time.
    """
    probes = group_by_implementation(info.probes)
    red = {
        implementation: records
        for implementation, records in group_by_implementation(found).items()
        if any(record.verdict in _FAILED_VERDICTS for record in records)
    }
    bank = error_profiles.load_profiles() if probes and red else []
    diagnoses: dict[tuple[str, ...], Diagnosis] = {}
    for implementation, records in red.items():
        probed = probes.get(implementation, ())
        asked = error_profiles.build_profile(probed)
        if not (bank and asked.sizes) and not is_followed_up:
            continue
        every = root_causes.find_implementation_causes({implementation: records}, {implementation: probed})
        findings = [finding for finding in every if finding.kind in _COMPARED_KINDS]
        right = list_right_cases(records, every)
        nearest = find_similar_bugs(findings, probed, right, bank)
        for number, finding in enumerate(findings):
            if find_covering_declarations(finding, info.proposals.get(finding.implementation.label)):
                continue  # it differs by a declaration, and need not be a mistake
            if number not in nearest:
                is_shown = _has_profile_case(finding)
                diagnoses[finding.key] = Diagnosis(bugs=(), cases=0, known=len(bank), is_shown=is_shown)
                continue
            cases = _count_cases(finding, asked)
            diagnoses[finding.key] = _build_diagnosis(nearest[number], len(bank), cases)
    return dataclasses.replace(info, diagnoses=diagnoses)


def _count_cases(finding: Finding, asked: ErrorProfile) -> int:
    return sum(_count_shared(finding, case) > 0 or not finding.levels for case in asked.sizes)


def _has_profile_case(finding: Finding) -> bool:
    """Return whether a case on which planted bugs are compared has a feature of the finding."""
    return not finding.levels or any(_count_shared(finding, one.case.id) for one in ERROR_PROFILE_CASES)


def _build_diagnosis(nearest: Sequence[Similarity] | None, known: int, cases: int) -> Diagnosis:
    likely = [each for each in nearest or () if each.similarity >= _MIN_SIMILARITY or each.is_wrong_alike]
    least = SAME_SIMILARITY if _is_same(likely) else likely[0].similarity - _CLEAR_LEAD if likely else 0.0
    bugs = tuple(
        SimilarBug(each.bug.name, each.bug.family, each.bug.reference, round(each.similarity, 2))
        for each in likely
        if each.similarity >= least
    )
    return Diagnosis(bugs=bugs, cases=cases, known=known, is_shown=nearest is not None)


def list_right_cases(records: Sequence[Record], findings: Sequence[Finding]) -> Mapping[str, Sizes]:
    """List the error profile cases on which a kernel is right, with their results, by the findings of its run.

    A case is right if the run judged each feature, mask and dtype that it has, and no finding concerns it. A finding
    that does not say which levels it needs may concern any case; then no case is listed.

    Args:
      records: the records of the kernel in the run.
      findings: all findings of the kernel.
    """
    wrong = [finding for finding in findings if finding.kind in (RAISES, FORWARD, GRADIENTS)]
    if not wrong or not all(finding.levels for finding in wrong):
        return {}
    needed = [
        levels for finding in wrong for levels in (frozenset(finding.levels or ()), _find_compared_levels(finding))
    ]
    judged = [record for record in records if record.verdict in JUDGED and record.check in _PROFILE_CHECKS]
    known = {level for case in {record.case for record in judged} for level in _select_features(case)}
    results: Sizes = dict.fromkeys(sorted({get_result(record.observable) for record in judged}))
    right: dict[str, Sizes] = {}
    for asked in ERROR_PROFILE_CASES:
        levels = find_levels(asked.case.id)
        if not any(levels >= one for one in needed) and _select_features(asked.case.id) <= known:
            right[asked.case.id] = results
    return right
