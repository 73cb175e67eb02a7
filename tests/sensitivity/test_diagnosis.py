"""Test error profiles of kernels, and which planted bugs are named as most similar."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.error_profile_cases import ERROR_PROFILE_CASES
from cases.storage_forms.form_registry import FORMS
from conformance.execution import implementation_registry
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sensitivity import diagnosis, error_profiles
from conformance.sensitivity.error_profiles import ErrorProfile, KnownBug
from reports.records import ERROR, FAIL, PASS, UNSUPPORTED, Record
from tests.bank import confusions, error_profiles_command, parallel_examination
from tests.planted.bank import BANK

IDS = [asked.case.id for asked in ERROR_PROFILE_CASES]
SIZES = st.one_of(st.none(), st.integers(0, 2000).map(lambda n: round(n * 0.005, 3)))
PROFILES = st.dictionaries(
    st.sampled_from(IDS), st.dictionaries(st.sampled_from(["out", "dq", "dk", "logsumexp"]), SIZES, min_size=1)
).map(ErrorProfile)


def build_bug(found: ErrorProfile, name: str = "bug", kind: str = "a.kind") -> KnownBug:
    return KnownBug(name=name, family="family", kind=kind, reference="inferred from a test", profile=found)


def build_record(case: str, check: str, observable: str, verdict: str, ratio: float | None = None) -> Record:
    return Record(
        implementation="it", platform="cpu", case=case, check=check, observable=observable, verdict=verdict, ratio=ratio
    )


def test_no_case_is_there_twice_and_every_one_is_asked_forward() -> None:
    assert len(set(IDS)) == len(IDS)
    assert all("forward" in asked.checks for asked in ERROR_PROFILE_CASES)


def test_records_say_what_is_right_and_by_how_much_the_rest_is_wrong() -> None:
    first, second, third, _ = IDS[:4]
    found = error_profiles.build_profile(
        [
            build_record(first, "forward", "out", PASS, 0.1),
            build_record(first, "gradients", "dq", FAIL, 1e3),
            build_record(first, "residuals", "out", FAIL, 10.0),  # wrong where `forward` was right
            build_record(second, "gradients", "dq", FAIL, 100.0),
            build_record(second, "gradients_lse", "dq", FAIL, 101.0),  # the same fault again
            build_record(second, "transforms", "out.vmap", FAIL, 100.0),  # not judged here
            build_record(third, "forward", "out", UNSUPPORTED),
            build_record("train/f32/B1.T8.S8.N1.K1.H8.V8/full/normal/s0", "forward", "out", FAIL, 9.0),
        ]
    )
    assert found.sizes == {first: {"out": None, "dq": 3.0, "out@residuals": 1.0}, second: {"dq": 2.0}}
    assert found.wrong == {(first, "dq"): 3.0, (first, "out@residuals"): 1.0, (second, "dq"): 2.0}


@pytest.mark.parametrize("ratio", [None, float("inf")])
def test_what_raises_or_is_no_number_is_larger_than_anything(ratio: float | None) -> None:
    found = error_profiles.build_profile([build_record(IDS[0], "forward", "all", ERROR, ratio)])
    assert found.wrong[IDS[0], "all"] > 30


@given(one=PROFILES, two=PROFILES)
def test_a_file_keeps_them(one: ErrorProfile, two: ErrorProfile, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "error_profiles.json"
    error_profiles_command.save_profiles([build_bug(two, "b"), build_bug(one, "a")], path)
    assert [(each.name, each.profile) for each in error_profiles.load_profiles(path)] == [
        ("a", one),
        ("b", two),
    ]


@given(PROFILES, PROFILES)
def test_likeness_is_between_none_and_the_same(one: ErrorProfile, two: ErrorProfile) -> None:
    alike = diagnosis.compare_profiles(one, build_bug(two))
    assert 0 <= alike.similarity <= 1 + 1e-9
    assert set(alike.shared) <= set(one.wrong)
    assert alike.rest == len(one.wrong) - len(alike.shared)
    if one.wrong:
        assert diagnosis.compare_profiles(one, build_bug(one)).similarity == 1.0


@given(PROFILES, st.lists(PROFILES, max_size=6), st.randoms())
def test_at_most_three_of_different_kinds_are_named_whatever_the_order(
    found: ErrorProfile, others: list[ErrorProfile], random: object
) -> None:
    bank = [build_bug(other, f"bug-{n}", f"kind.{n % 4}") for n, other in enumerate(others)]
    named = diagnosis.find_nearest(found, bank)
    assert len(named) <= diagnosis.MAX_NAMED
    assert len({each.bug.kind for each in named}) == len(named)
    assert all(each.similarity >= diagnosis.MIN_SIMILARITY for each in named)
    assert [each.similarity for each in named] == sorted((each.similarity for each in named), reverse=True)
    assert diagnosis.find_nearest(found, list(reversed(bank))) == named


def test_what_a_bug_would_show_and_the_kernel_does_not_speaks_against_it() -> None:
    shown: dict[str, error_profiles.Sizes] = {IDS[0]: {"out": 3.0, "dq": None}}
    both = build_bug(ErrorProfile({IDS[0]: {"out": 3.0, "dq": 3.0}}))
    one = build_bug(ErrorProfile({IDS[0]: {"out": 3.0, "dq": None}}))
    kernel = ErrorProfile(shown)
    assert diagnosis.compare_profiles(kernel, one).similarity > diagnosis.compare_profiles(kernel, both).similarity
    # A kernel with a second fault is still similar to the first.
    worse = ErrorProfile({**shown, IDS[1]: {"out": 3.0}})
    assert diagnosis.find_nearest(worse, [build_bug(ErrorProfile({**one.profile.sizes, IDS[1]: {"out": None}}))])


def test_a_mistake_in_one_gradient_alone_is_like_the_same_in_all_results() -> None:
    every = build_bug(
        ErrorProfile({IDS[0]: {"out": 4.0, "dq": 3.0, "dk": 3.0}, IDS[1]: {"out": None, "dq": None, "dk": None}})
    )
    one = ErrorProfile({IDS[0]: {"out": None, "dq": None, "dk": 3.0}, IDS[1]: {"out": None, "dq": None, "dk": None}})
    assert diagnosis.compare_profiles(one, every).similarity == 0.75
    # Other numbers are less similar. A right result of the same gradient speaks against the bug.
    louder = ErrorProfile({**one.sizes, IDS[0]: {"out": None, "dq": None, "dk": 5.0}})
    assert 0.25 < diagnosis.compare_profiles(louder, every).similarity < 0.3
    elsewhere = build_bug(ErrorProfile({**every.profile.sizes, IDS[1]: {"out": 4.0, "dq": 3.0, "dk": 3.0}}))
    assert diagnosis.compare_profiles(one, elsewhere).similarity < 0.5
    # Where the forward pass is wrong, the gradients follow, and nothing is left out.
    forward = ErrorProfile({**one.sizes, IDS[0]: {"out": 4.0, "dq": None, "dk": 3.0}})
    assert 0.66 < diagnosis.compare_profiles(forward, every).similarity < 0.67  # two of three


def test_a_mistake_in_fewer_cases_is_like_a_bug_with_its_numbers_there() -> None:
    right: error_profiles.Sizes = dict.fromkeys(("out", "dq", "dk"))
    here, there = {"out": 4.0, "dq": 3.0, "dk": 3.5}, {"out": 6.0, "dq": 6.5, "dk": 7.0}
    everywhere = build_bug(ErrorProfile({IDS[0]: here, IDS[1]: there, IDS[2]: there, IDS[3]: there}))
    kernel = ErrorProfile({IDS[0]: here, IDS[1]: right, IDS[2]: right, IDS[3]: right})
    assert diagnosis.compare_profiles(kernel, everywhere).similarity == 0.5
    # One other number, or a wrong result that the bug lacks, says that the mistake is another one. So do few numbers.
    for own in ({**here, "dk": 5.0}, {**here, "dk": 40.0}, {"out": 4.0, "dq": 3.0, "dk": None}):
        other = ErrorProfile({**kernel.sizes, IDS[0]: own})
        assert diagnosis.compare_profiles(other, everywhere).similarity < 0.4
    further = ErrorProfile({**kernel.sizes, IDS[4]: {"out": 3.0}})
    partly = build_bug(ErrorProfile({**everywhere.profile.sizes, IDS[4]: {"out": None}}))
    assert diagnosis.compare_profiles(further, partly).similarity < 0.4


def test_a_kernel_with_two_faults_is_like_two_bugs() -> None:
    right: error_profiles.Sizes = {"out": None}
    one = build_bug(ErrorProfile({IDS[0]: {"out": 3.0}, IDS[1]: {"out": 4.0}, IDS[2]: right}), "one", "kind.one")
    two = build_bug(ErrorProfile({IDS[0]: right, IDS[1]: right, IDS[2]: {"out": 5.0}}), "two", "kind.two")
    both = ErrorProfile({IDS[0]: {"out": 3.0}, IDS[1]: {"out": 4.0}, IDS[2]: {"out": 5.0}})
    first, second = diagnosis.diagnose(both, [two, one])
    assert first[0].bug.name == "one"
    assert [each.bug.name for each in second] == ["two"]
    assert first[0].rest == 1
    assert second[0].similarity == 1.0


def test_being_wrong_everywhere_by_other_numbers_is_like_nothing() -> None:
    sizes = ({"out": 3.0}, {"out": 4.0}, {"out": 5.0}, {"out": 3.5})
    everywhere = ErrorProfile(dict(zip(IDS, sizes, strict=False)))
    other = build_bug(ErrorProfile({case: {"out": 6.0} for case in IDS[:4]}))
    assert 0.35 <= diagnosis.compare_profiles(everywhere, other).similarity < 0.4
    assert diagnosis.find_nearest(everywhere, [other]) == []
    # A mistake in one of several places still says where to look.
    somewhere = ErrorProfile({IDS[0]: {"out": 3.0}, **{case: {"out": None} for case in IDS[1:4]}})
    there = build_bug(ErrorProfile({IDS[0]: {"out": 6.0}, **{case: {"out": None} for case in IDS[1:4]}}))
    assert len(diagnosis.find_nearest(somewhere, [there])) == 1
    assert len(diagnosis.find_nearest(everywhere, [build_bug(everywhere)])) == 1


def test_how_operands_lie_is_no_class_of_what_is_wrong() -> None:
    sizes: dict[str, error_profiles.Sizes] = {IDS[0]: {"out": 3.0}, IDS[1]: {"out": None}}
    known = [build_bug(ErrorProfile({**sizes, IDS[0]: {"out": 3.0 + n}}), f"bug-{n}", f"kind {n}") for n in range(3)]
    paged = [dataclasses.replace(each, family="paged") for each in known]
    (row,) = confusions.measure_confusions(paged)
    assert (row.bugs, row.named, row.alone) == (3, 0, 3)
    (row,) = confusions.measure_confusions([dataclasses.replace(each, kind=f"scales.{each.kind}") for each in paged])
    assert (row.bugs, row.named, row.alone) == (3, 3, 0)
    (row,) = confusions.measure_confusions(known)
    assert (row.bugs, row.named, row.alone) == (3, 3, 0)


def test_what_only_one_of_them_was_asked_says_nothing() -> None:
    kernel = ErrorProfile({IDS[0]: {"out": 3.0}})
    more = build_bug(ErrorProfile({IDS[0]: {"out": 3.0, "logsumexp": 4.0}, IDS[1]: {"out": 5.0}}))
    assert diagnosis.compare_profiles(kernel, more).similarity == 1.0


@pytest.mark.long
def test_a_right_kernel_has_nothing_wrong() -> None:
    implementation = implementation_registry.find_implementation("dot_product")
    runner = Runner(Settings())
    few = itertools.islice(error_profiles.iter_profile_jobs(implementation), 0, None, 5)
    found = error_profiles.build_profile(record for job in few for record in runner.judge(job))
    assert found.sizes
    assert found.wrong == {}
    assert diagnosis.find_nearest(found, error_profiles.load_profiles()) == []


DOCUMENTED = Path(__file__).parents[2] / "docs" / "measurements" / "data" / "diagnosis.json"


@pytest.mark.nightly
def test_the_documented_confusions_are_those_of_the_kept_profiles() -> None:
    bank = error_profiles.load_profiles()
    found = confusions.measure_confusions(bank)
    documented = json.loads(DOCUMENTED.read_text(encoding="utf-8"))
    assert documented["families"] == json.loads(json.dumps([dataclasses.asdict(row) for row in found]))
    assert documented["bugs"] == len(bank)
    # The bank has no near relative of a bug: how many names are right for other kernels is what
    # `test_unknown_kernels.py` demands.
    dense = [row for row in found if row.family not in (*FORMS, "quantised caches")]
    first = sum(row.first for row in dense)
    assert first >= 0.6 * sum(row.bugs - row.none for row in dense)
    assert first >= 0.6 * sum(row.bugs for row in dense)


# Cheap bugs, each of another kernel. If their error profiles are the kept ones, then cases, bounds and kernels are
# those with which the error profiles were measured.
SAMPLE = ("cap-ignored", "decode-last-block-dropped", "moba-gate-of-the-largest-key")


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(SAMPLE[0], marks=pytest.mark.nightly), *SAMPLE[1:]])
def test_a_sample_has_the_profile_that_is_kept(name: str) -> None:
    (planted,) = (each for each in BANK if each.name == name)
    (kept,) = (each for each in error_profiles.load_profiles() if each.name == name)
    now = parallel_examination.measure_known_bug(planted).profile
    assert now.sizes.keys() == kept.profile.sizes.keys()
    assert diagnosis.compare_profiles(now, kept).similarity > 0.97
