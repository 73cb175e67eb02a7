"""Test which planted bugs are named for each finding of a kernel with several faults."""

from __future__ import annotations

import dataclasses

import pytest

from cases.error_profile_cases import ERROR_PROFILE_CASES
from conformance.execution import implementation_registry
from conformance.follow_up import bug_diagnosis
from conformance.sensitivity import error_profiles
from conformance.sensitivity.error_profiles import ErrorProfile, KnownBug, load_profiles
from reports.causes import finding_text
from reports.causes.case_levels import find_levels
from reports.causes.finding import FORWARD, GRADIENTS
from reports.page_model import build_summary
from reports.records import FAIL, PASS, Diagnosis, Record, RunInfo

FAULTS = ("window-one-key-too-few", "cap-before-bias", "dk-of-last-head-of-group")
"""Planted bugs whose numbers a kernel with three faults has."""
EMPTY_ROWS = "train/bf16/B1.T384.S100.N2.K2.H128.V128/window-l108-r0/heavy/s0"
"""A case in which some queries may attend to no key."""


@pytest.fixture(scope="module")
def bank() -> list[KnownBug]:
    return load_profiles()


def judge(bank: list[KnownBug], names: tuple[str, ...], *, probes: bool) -> list[Record]:
    """Judge error profile cases as a kernel with these faults would be; without `probes`, cases of another seed."""
    known = [bug.profile for bug in bank if bug.name in names]
    found = []
    for case in (one.case.id for one in ERROR_PROFILE_CASES):
        if not case.startswith("train/f32") or not all(case in profile.sizes for profile in known):
            continue
        wrong = [profile.sizes[case] for profile in known if any(profile.sizes[case].values())]
        most = max(wrong or [known[0].sizes[case]], key=lambda sizes: sum(size is not None for size in sizes.values()))
        for name, size in most.items():
            check = "gradients" if name.startswith("d") else "forward" if name == "out" else "residuals"
            record = Record(
                implementation="it",
                platform="cpu",
                case=case if probes else case.replace("/s0", "/s7"),
                check=check,
                observable=name,
                verdict=PASS if size is None else FAIL,
                ratio=0.1 if size is None else 10.0**size,
                limit=4.0,
                dtype="f32",
            )
            found += [record] if "@" not in name else []
    return found


def test_each_of_three_faults_is_named_inside_its_finding(bank: list[KnownBug]) -> None:
    records, probes = judge(bank, FAULTS, probes=False), judge(bank, FAULTS, probes=True)
    info = RunInfo(command="", level="quick", environment={}, tolerances=[], probes=probes)
    summary = build_summary(records, bug_diagnosis.add_diagnoses(info, records))
    named = [text.diagnosis.bugs[0].name for text in summary.findings if text.diagnosis and text.diagnosis.bugs]
    assert set(named) == set(FAULTS)
    for text in summary.findings:
        assert text.diagnosis is not None
        assert any(text.diagnosis.bugs[0].name in line for line in text.resemblance)


def test_numbers_like_no_bug_are_said_to_be_like_none(bank: list[KnownBug]) -> None:
    others = [dataclasses.replace(bug, profile=ErrorProfile({})) for bug in bank]
    probes = judge(bank, ("cap-before-bias",), probes=True)
    records = judge(bank, ("cap-before-bias",), probes=False)
    info = RunInfo(command="", level="quick", environment={}, tolerances=[], probes=probes)
    (text,) = build_summary(records, info).findings
    assert bug_diagnosis.find_similar_bugs([text.finding], probes, {}, others) == {0: []}
    assert bug_diagnosis.find_similar_bugs([text.finding], [], {}, bank) == {}


@pytest.mark.parametrize(("is_followed_up", "says"), [(True, True), (False, False)])
def test_a_finding_without_time_says_how_to_give_more(bank: list[KnownBug], is_followed_up: bool, says: bool) -> None:
    records = judge(bank, ("cap-before-bias",), probes=False)
    info = RunInfo(command="", level="quick", environment={}, tolerances=[])
    info = bug_diagnosis.add_diagnoses(info, records, is_followed_up=is_followed_up)
    (text,) = build_summary(records, info).findings
    assert any("--diagnose-seconds" in line for line in text.resemblance) is says


def test_a_bug_that_is_wrong_where_the_finding_passes_is_not_named(bank: list[KnownBug]) -> None:
    (fault,) = (bug for bug in bank if bug.name == "dk-of-last-head-of-group")
    records, probes = (judge(bank, (fault.name,), probes=probes) for probes in (False, True))
    (text,) = build_summary(records, RunInfo(command="", level="quick", environment={}, tolerances=[])).findings
    assert [level.name for level in text.finding.levels or ()] == ["groups"]
    wrong = {case: sizes for case, sizes in fault.profile.sizes.items() if sizes.get("dk") is not None}
    case, sizes = next(iter(wrong.items()))
    everywhere = {other: {**own, "dk": 3.0} if "dk" in own else own for other, own in fault.profile.sizes.items()}
    careless = dataclasses.replace(
        fault, name="dk-wrong-everywhere", kind="dk.everywhere", profile=ErrorProfile({**everywhere, case: sizes})
    )
    seen = [record for record in probes if record.case == case]
    (nearest,) = bug_diagnosis.find_similar_bugs([text.finding], seen, {}, [careless, fault]).values()
    assert nearest is not None
    assert [each.bug.name for each in nearest] == [fault.name]


def test_gradients_are_not_compared_where_out_is_wrong_for_another_reason(bank: list[KnownBug]) -> None:
    names = ("sinks-ignored", "dk-of-last-head-of-group")
    records, probes = (judge(bank, names, probes=probes) for probes in (False, True))
    summary = build_summary(records, RunInfo(command="", level="quick", environment={}, tolerances=[]))
    findings = [text.finding for text in summary.findings]
    (place,) = (number for number, finding in enumerate(findings) if "dk" in finding.results)
    both = [record for record in probes if "/sinks/" in record.case and ".N4.K2." in record.case]
    assert any(record.observable == "out" and record.verdict == FAIL for record in both)
    assert bug_diagnosis.find_similar_bugs(findings, both, {}, bank)[place] is None


def test_a_bug_that_is_wrong_in_the_same_places_is_named_also_by_other_numbers(bank: list[KnownBug]) -> None:
    (fault,) = (bug for bug in bank if bug.name == "cap-before-bias")
    shifted = {
        case: {name: size if size is None else size + 0.2 for name, size in sizes.items()}
        for case, sizes in fault.profile.sizes.items()
    }
    case, sizes = next((case, sizes) for case, sizes in shifted.items() if "dk" in sizes and not any(sizes.values()))
    elsewhere = {**shifted, case: {**sizes, "dk": 3.0}}
    records, probes = (judge(bank, (fault.name,), probes=probes) for probes in (False, True))
    (text,) = build_summary(records, RunInfo(command="", level="quick", environment={}, tolerances=[])).findings
    for other, is_named in ((shifted, True), (elsewhere, False)):
        alike = dataclasses.replace(fault, name="other-numbers", profile=ErrorProfile(other))
        (nearest,) = bug_diagnosis.find_similar_bugs([text.finding], probes, {}, [alike]).values()
        assert nearest
        assert nearest[0].similarity < 0.5
        assert bool(bug_diagnosis._build_diagnosis(nearest, 1, 1).bugs) == is_named


@pytest.mark.parametrize("levels", [(), None], ids=["every case", "unknown"])
def test_wrong_gradients_are_compared_on_cases_with_gradients_only(
    bank: list[KnownBug], levels: tuple[()] | None
) -> None:
    records = judge(bank, ("dk-of-last-head-of-group",), probes=False)
    (text,) = build_summary(records, RunInfo(command="", level="quick", environment={}, tolerances=[])).findings
    kernel = implementation_registry.find_implementation("dot_product")
    jobs = [job for job in error_profiles.iter_profile_jobs(kernel) if job.case.phase != "train"]
    for kind, is_asked in ((GRADIENTS, False), (FORWARD, True)):
        finding = dataclasses.replace(text.finding, levels=levels, kind=kind)
        assert (bug_diagnosis._Comparison([finding], {}, bank).choose_next(jobs) is not None) == is_asked


@pytest.mark.parametrize("levels", [(), None], ids=["every case", "unknown"])
def test_a_bug_of_the_backward_pass_is_not_named_for_a_wrong_out(
    bank: list[KnownBug], levels: tuple[()] | None
) -> None:
    (fault,) = (bug for bug in bank if bug.name == "cap-before-bias")
    backward = {name: {**sizes, "out": None} for name, sizes in fault.profile.sizes.items()}
    alike = dataclasses.replace(fault, name="wrong-gradients", kind="other.kind", profile=ErrorProfile(backward))
    records, probes = (judge(bank, (fault.name,), probes=probes) for probes in (False, True))
    (text,) = build_summary(records, RunInfo(command="", level="quick", environment={}, tolerances=[])).findings
    everywhere = dataclasses.replace(text.finding, levels=levels)
    (nearest,) = bug_diagnosis.find_similar_bugs([everywhere], probes, {}, [alike]).values()
    assert nearest == []


def test_a_finding_of_a_kind_that_is_never_compared_does_not_ask_for_time(bank: list[KnownBug]) -> None:
    records = judge(bank, ("cap-before-bias",), probes=False)
    info = RunInfo(command="", level="quick", environment={}, tolerances=[])
    (text,) = build_summary(records, info).findings
    (empty,) = (level for level in find_levels(EMPTY_ROWS) if level.name == "empty rows")
    assert bug_diagnosis._has_profile_case(text.finding)
    assert not bug_diagnosis._has_profile_case(dataclasses.replace(text.finding, levels=(empty,)))
    # An alternative that no case distinguishes may have such a case.
    (causal,) = (
        level for level in find_levels("train/f32/B1.T8.S8.N1.K1.H8.V8/causal/normal/s0") if level.name == "causal"
    )
    alternative = dataclasses.replace(text.finding, levels=(empty,), others=((causal,),))
    assert bug_diagnosis._has_profile_case(alternative)
    listed = bug_diagnosis.list_right_cases(records, [alternative])
    assert listed
    assert not [case for case in listed if {empty, causal} & find_levels(case)]
    (line,) = finding_text.format_diagnosis(Diagnosis(bugs=(), cases=0, known=len(bank), is_shown=False))
    assert "--diagnose-seconds" not in line
