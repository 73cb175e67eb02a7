"""Test signatures of kernels, and which planted bugs are named as most similar."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.signature_cases import SIGNATURE_CASES
from cases.storage_forms.form_registry import FORMS
from conformance.execution import implementation_registry
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sensitivity import diagnosis, failure_signatures
from conformance.sensitivity.failure_signatures import KnownBug, Signature
from reports.records import ERROR, FAIL, PASS, UNSUPPORTED, Record
from tests.bank import confusions, parallel_examination, signatures_command
from tests.planted.bank import BANK

IDS = [asked.case.id for asked in SIGNATURE_CASES]
SIZES = st.one_of(st.none(), st.integers(0, 2000).map(lambda n: round(n * 0.005, 3)))
SIGNATURES = st.dictionaries(
    st.sampled_from(IDS), st.dictionaries(st.sampled_from(["out", "dq", "dk", "logsumexp"]), SIZES, min_size=1)
).map(Signature)


def build_bug(found: Signature, name: str = "bug", kind: str = "a.kind") -> KnownBug:
    return KnownBug(name=name, family="family", kind=kind, reference="inferred from a test", signature=found)


def build_record(case: str, check: str, observable: str, verdict: str, ratio: float | None = None) -> Record:
    return Record(
        implementation="it", platform="cpu", case=case, check=check, observable=observable, verdict=verdict, ratio=ratio
    )


def test_no_case_is_there_twice_and_every_one_is_asked_forward() -> None:
    assert len(set(IDS)) == len(IDS)
    assert all("forward" in asked.checks for asked in SIGNATURE_CASES)


def test_records_say_what_is_right_and_by_how_much_the_rest_is_wrong() -> None:
    first, second, third, _ = IDS[:4]
    found = failure_signatures.build_signature(
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
    found = failure_signatures.build_signature([build_record(IDS[0], "forward", "all", ERROR, ratio)])
    assert found.wrong[IDS[0], "all"] > 30


@given(one=SIGNATURES, two=SIGNATURES)
def test_a_file_keeps_them(one: Signature, two: Signature, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "signatures.json"
    signatures_command.save_signatures([build_bug(two, "b"), build_bug(one, "a")], path)
    assert [(each.name, each.signature) for each in failure_signatures.load_signatures(path)] == [
        ("a", one),
        ("b", two),
    ]


@given(SIGNATURES, SIGNATURES)
def test_likeness_is_between_none_and_the_same(one: Signature, two: Signature) -> None:
    alike = diagnosis.compare_signatures(one, build_bug(two))
    assert 0 <= alike.similarity <= 1 + 1e-9
    assert set(alike.shared) <= set(one.wrong)
    assert alike.rest == len(one.wrong) - len(alike.shared)
    if one.wrong:
        assert diagnosis.compare_signatures(one, build_bug(one)).similarity == 1.0


@given(SIGNATURES, st.lists(SIGNATURES, max_size=6), st.randoms())
def test_at_most_three_of_different_kinds_are_named_whatever_the_order(
    found: Signature, others: list[Signature], random: object
) -> None:
    bank = [build_bug(other, f"bug-{n}", f"kind.{n % 4}") for n, other in enumerate(others)]
    named = diagnosis.find_nearest(found, bank)
    assert len(named) <= diagnosis.MAX_NAMED
    assert len({each.bug.kind for each in named}) == len(named)
    assert all(each.similarity >= diagnosis.MIN_SIMILARITY for each in named)
    assert [each.similarity for each in named] == sorted((each.similarity for each in named), reverse=True)
    assert diagnosis.find_nearest(found, list(reversed(bank))) == named


def test_what_a_bug_would_show_and_the_kernel_does_not_speaks_against_it() -> None:
    shown: dict[str, failure_signatures.Sizes] = {IDS[0]: {"out": 3.0, "dq": None}}
    both = build_bug(Signature({IDS[0]: {"out": 3.0, "dq": 3.0}}))
    one = build_bug(Signature({IDS[0]: {"out": 3.0, "dq": None}}))
    kernel = Signature(shown)
    assert diagnosis.compare_signatures(kernel, one).similarity > diagnosis.compare_signatures(kernel, both).similarity
    # A kernel with a second fault is still similar to the first.
    worse = Signature({**shown, IDS[1]: {"out": 3.0}})
    assert diagnosis.find_nearest(worse, [build_bug(Signature({**one.signature.sizes, IDS[1]: {"out": None}}))])


def test_a_mistake_in_one_gradient_alone_is_like_the_same_in_all_results() -> None:
    every = build_bug(
        Signature({IDS[0]: {"out": 4.0, "dq": 3.0, "dk": 3.0}, IDS[1]: {"out": None, "dq": None, "dk": None}})
    )
    one = Signature({IDS[0]: {"out": None, "dq": None, "dk": 3.0}, IDS[1]: {"out": None, "dq": None, "dk": None}})
    assert diagnosis.compare_signatures(one, every).similarity == 0.75
    # Other numbers are less similar. A right result of the same gradient speaks against the bug.
    louder = Signature({**one.sizes, IDS[0]: {"out": None, "dq": None, "dk": 5.0}})
    assert 0.25 < diagnosis.compare_signatures(louder, every).similarity < 0.3
    elsewhere = build_bug(Signature({**every.signature.sizes, IDS[1]: {"out": 4.0, "dq": 3.0, "dk": 3.0}}))
    assert diagnosis.compare_signatures(one, elsewhere).similarity < 0.5
    # Where the forward pass is wrong, the gradients follow, and nothing is left out.
    forward = Signature({**one.sizes, IDS[0]: {"out": 4.0, "dq": None, "dk": 3.0}})
    assert 0.66 < diagnosis.compare_signatures(forward, every).similarity < 0.67  # two of three


def test_a_kernel_with_two_faults_is_like_two_bugs() -> None:
    right: failure_signatures.Sizes = {"out": None}
    one = build_bug(Signature({IDS[0]: {"out": 3.0}, IDS[1]: {"out": 4.0}, IDS[2]: right}), "one", "kind.one")
    two = build_bug(Signature({IDS[0]: right, IDS[1]: right, IDS[2]: {"out": 5.0}}), "two", "kind.two")
    both = Signature({IDS[0]: {"out": 3.0}, IDS[1]: {"out": 4.0}, IDS[2]: {"out": 5.0}})
    first, second = diagnosis.diagnose(both, [two, one])
    assert first[0].bug.name == "one"
    assert [each.bug.name for each in second] == ["two"]
    assert first[0].rest == 1
    assert second[0].similarity == 1.0


def test_being_wrong_everywhere_by_other_numbers_is_like_nothing() -> None:
    sizes = ({"out": 3.0}, {"out": 4.0}, {"out": 5.0}, {"out": 3.5})
    everywhere = Signature(dict(zip(IDS, sizes, strict=False)))
    other = build_bug(Signature({case: {"out": 6.0} for case in IDS[:4]}))
    assert 0.35 <= diagnosis.compare_signatures(everywhere, other).similarity < 0.4
    assert diagnosis.find_nearest(everywhere, [other]) == []
    # A mistake in one of several places still says where to look.
    somewhere = Signature({IDS[0]: {"out": 3.0}, **{case: {"out": None} for case in IDS[1:4]}})
    there = build_bug(Signature({IDS[0]: {"out": 6.0}, **{case: {"out": None} for case in IDS[1:4]}}))
    assert len(diagnosis.find_nearest(somewhere, [there])) == 1
    assert len(diagnosis.find_nearest(everywhere, [build_bug(everywhere)])) == 1


def test_how_operands_lie_is_no_class_of_what_is_wrong() -> None:
    sizes: dict[str, failure_signatures.Sizes] = {IDS[0]: {"out": 3.0}, IDS[1]: {"out": None}}
    known = [build_bug(Signature({**sizes, IDS[0]: {"out": 3.0 + n}}), f"bug-{n}", f"kind {n}") for n in range(3)]
    paged = [dataclasses.replace(each, family="paged") for each in known]
    (row,) = confusions.measure_confusions(paged)
    assert (row.bugs, row.named, row.alone) == (3, 0, 3)
    (row,) = confusions.measure_confusions([dataclasses.replace(each, kind=f"scales.{each.kind}") for each in paged])
    assert (row.bugs, row.named, row.alone) == (3, 3, 0)
    (row,) = confusions.measure_confusions(known)
    assert (row.bugs, row.named, row.alone) == (3, 3, 0)


def test_what_only_one_of_them_was_asked_says_nothing() -> None:
    kernel = Signature({IDS[0]: {"out": 3.0}})
    more = build_bug(Signature({IDS[0]: {"out": 3.0, "logsumexp": 4.0}, IDS[1]: {"out": 5.0}}))
    assert diagnosis.compare_signatures(kernel, more).similarity == 1.0


@pytest.mark.long
def test_a_right_kernel_has_nothing_wrong() -> None:
    implementation = implementation_registry.find_implementation("dot_product")
    runner = Runner(Settings())
    few = itertools.islice(failure_signatures.iter_signature_jobs(implementation), 0, None, 5)
    found = failure_signatures.build_signature(record for job in few for record in runner.judge(job))
    assert found.sizes
    assert found.wrong == {}
    assert diagnosis.find_nearest(found, failure_signatures.load_signatures()) == []


DOCUMENTED = Path(__file__).parents[2] / "docs" / "measurements" / "data" / "diagnosis.json"


@pytest.mark.nightly
def test_the_documented_confusions_are_those_of_the_kept_signatures() -> None:
    bank = failure_signatures.load_signatures()
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


# Cheap bugs, each of another kernel. If their signatures are the kept ones, then cases, bounds and kernels are those
# with which the signatures were measured.
SAMPLE = ("cap-ignored", "decode-last-block-dropped", "moba-gate-of-the-largest-key")


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(SAMPLE[0], marks=pytest.mark.nightly), *SAMPLE[1:]])
def test_a_sample_has_the_signature_that_is_kept(name: str) -> None:
    (planted,) = (each for each in BANK if each.name == name)
    (kept,) = (each for each in failure_signatures.load_signatures() if each.name == name)
    now = parallel_examination.measure_known_bug(planted).signature
    assert now.sizes.keys() == kept.signature.sizes.keys()
    assert diagnosis.compare_signatures(now, kept).similarity > 0.97
