"""Each red record is in exactly one finding, with the cause that it follows from."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import hypothesis
import msgspec
import pytest
from hypothesis import strategies

from cases.error_profile_cases import ERROR_PROFILE_CASES
from cases.grid import build_grid
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from reports.causes import fault_location, finding_text, root_causes
from reports.causes.case_levels import find_levels, parse_fields, rank_plainness
from reports.causes.finding import BEHIND_MASK, CHECK, FORWARD, GRADIENTS, RAISES, UNEXPECTED, UNREPEATABLE, Finding
from reports.causes.remedies import summarize_mask_leak
from reports.records import (
    BEYOND_ROUNDING,
    ERROR,
    FAIL,
    PASS,
    RED,
    UNEXPECTED_PASS,
    UNJUDGED,
    UNSUPPORTED,
    Record,
    Worst,
)
from reports.unreached_branches import REACHES

BASE = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/normal/s0"
SINKS = "train/f32/B1.T128.S128.N2.K2.H64.V64/full/sinks/normal/s0"


@functools.cache
def list_cases() -> tuple[str, ...]:
    """List the rows of the grid at `quick`."""
    return tuple(case.id for case in build_grid("quick", 0, lambda case: None).cases if case.kv_cache is None)


def make_record(
    case: str, check: str = "forward", observable: str = "out", verdict: str = PASS, **more: object
) -> Record:
    made = Record(
        implementation="kernel", platform="cpu", case=case, check=check, observable=observable, verdict=verdict
    )
    return msgspec.structs.replace(made, **more)


Wrong = Callable[[str, str], bool]
"""Whether a result is wrong in a case."""


def make_records(wrong: Wrong) -> list[Record]:
    """Make the records of a run: the plain call, gradients in training, and a law of attention."""
    found = []
    for case in list_cases():
        asked = [("forward", "out"), ("residuals", "logsumexp"), ("poison", "out.huge")]
        if case.startswith("train"):
            asked += [("gradients", name) for name in ("dq", "dk", "dv")] + [("linearity", "dq")]
        found += [
            make_record(case, *one, verdict=FAIL if wrong(case, one[1].partition(".")[0]) else PASS) for one in asked
        ]
    return found


def has_levels(case: str, *names: str) -> bool:
    return set(names) <= {level.name for level in find_levels(case)}


def name_levels(finding: Finding) -> list[str]:
    return [level.name for level in finding.levels or ()]


def test_what_follows_from_a_wrong_forward_is_under_it() -> None:
    found = make_records(lambda case, result: has_levels(case, "sinks"))
    (finding,) = root_causes.find_root_causes(found)
    assert name_levels(finding) == ["sinks"]
    assert finding.kind == FORWARD
    assert finding.results == ("out", "logsumexp")
    assert set(finding.follows) == {"gradients", "linearity", "poison"}
    assert len(finding.records) == sum(one.verdict == FAIL for one in found)
    assert (finding.inside.red, finding.outside.red) == (finding.inside.asked, 0)
    assert finding_text.format_title(finding) == "out is wrong with sinks"
    asked = sum(has_levels(case, "sinks") for case in list_cases())
    others = len(list_cases()) - asked
    assert finding_text.format_shares(finding) == f"fails in {asked} of {asked} such cases, and in 0 of {others} others"


ODD = "prefill/f32/B1.T64.S320.N6.K2.H128.V128/causal/sinks/ties/s0"
"""A case of which one failure among many passing cases tells little."""
WITHOUT = (ODD.replace("sinks/", ""), ODD.replace("N6.K2", "N2.K2"), ODD.replace("causal/", "full/"))


@pytest.mark.parametrize(("passing", "needed"), [(1, ["sinks"]), (2, ["sinks", "groups"]), (3, ["sinks", "groups"])])
def test_what_a_lone_failing_case_needs_is_named(passing: int, needed: list[str]) -> None:
    probes = [make_record(case) for case in WITHOUT[:passing]]
    found = [*make_records(lambda case, result: False), make_record(ODD, verdict=FAIL, ratio=1e6, limit=4.0)]
    (finding,) = root_causes.find_root_causes(found, probes)
    assert set(needed) <= set(name_levels(finding))
    assert len(name_levels(finding)) == passing
    assert finding.is_confirmed
    assert finding.smallest.case == ODD


@pytest.mark.parametrize(("ratio", "named"), [(4.5, False), (40.0, True)])
def test_a_failure_close_to_the_limit_needs_nothing_in_particular(ratio: float, named: bool) -> None:
    probes = [make_record(case) for case in WITHOUT]
    found = [*make_records(lambda case, result: False), make_record(ODD, verdict=FAIL, ratio=ratio, limit=4.0)]
    (finding,) = root_causes.find_root_causes(found, probes)
    assert bool(finding.levels) is named


def test_three_faults_are_three_findings() -> None:
    def wrong(case: str, result: str) -> bool:
        forward = has_levels(case, "sinks") or has_levels(case, "soft_cap", "bias")
        return forward or (result == "dk" and has_levels(case, "bf16"))

    found = root_causes.find_root_causes(make_records(wrong))
    assert sorted(map(name_levels, found)) == [["bf16"], ["bias", "soft_cap"], ["sinks"]]
    assert [finding.kind for finding in found] == [FORWARD, FORWARD, GRADIENTS]
    assert found[2].results == ("dk",)


def test_a_gradient_that_is_wrong_alone_is_found_beside_a_residual_that_is_wrong_everywhere() -> None:
    found = root_causes.find_root_causes(
        make_records(lambda case, result: result == "logsumexp" or (result == "dk" and has_levels(case, "groups")))
    )
    assert [(finding.kind, name_levels(finding)) for finding in found] == [(FORWARD, []), (GRADIENTS, ["groups"])]
    assert finding_text.format_title(found[0]) == "logsumexp is wrong in every case"
    assert finding_text.format_title(found[1]) == "dk is wrong with groups of heads (N > K)"


def test_a_kernel_that_is_wrong_everywhere_has_one_finding() -> None:
    (finding,) = root_causes.find_root_causes(make_records(lambda case, result: True))
    assert finding_text.format_title(finding) == "out is wrong in every case"
    assert finding_text.format_shares(finding) == f"fails in {len(list_cases())} of {len(list_cases())} cases"


def test_lengths_that_raise_are_one_finding_wherever_the_line_is_met() -> None:
    reason = "AssertionError (/kernel.py:7: assert ...)"
    long = [case for case in list_cases() if has_levels(case, "S % 64")]
    found = [make_record(case, verdict=PASS) for case in list_cases() if case not in long]
    found += [make_record(case, "forward", "all", ERROR, reason=reason) for case in long]
    found += [make_record(BASE, "calls", "odd", ERROR, reason=reason)]
    (finding,) = root_causes.find_root_causes(found)
    assert finding.checks == ("forward", "calls")
    assert "if such lengths are not supported: raise NotImplementedError for them" in finding_text.list_facts(finding)


def test_another_dtype_is_a_cause_of_its_own() -> None:
    def judged(case: str) -> Record:
        if has_levels(case, "16 bits"):
            dtype = "bfloat16" if has_levels(case, "bf16") else "float16"
            return make_record(case, verdict=FAIL, reason=f"dtype is float32, must be that of q, {dtype}")
        return make_record(case, verdict=FAIL if has_levels(case, "bias") else PASS)

    form, wrong = root_causes.find_root_causes([judged(case) for case in list_cases()])
    assert finding_text.format_title(form).startswith("the dtype of out is float32, must be that of q, ")
    assert finding_text.format_title(form).endswith("in bf16 and in f16")
    assert form.outside.red == 0
    assert not any("if it is not supported" in fact for fact in finding_text.list_facts(form))
    assert finding_text.format_title(wrong) == "out is wrong with a bias"
    assert not any(has_levels(one.case, "16 bits") for one in wrong.records)


def test_what_rounds_too_much_explains_nothing_where_other_results_say_otherwise() -> None:
    def wrong(case: str, result: str) -> bool:
        return has_levels(case, "sinks") or (result in ("dq", "dbias") and has_levels(case, "bias"))

    asked = [case for case in list_cases() if has_levels(case, "bf16") and not has_levels(case, "sinks")][:3]
    found = [make_record(case, "ensemble", "out.spread", FAIL) for case in asked]
    found += [make_record(BASE.replace("s0", "s1"), "calls", "dq.odd", FAIL)]
    sinks, precision, gradients = sorted(
        root_causes.find_root_causes([*make_records(wrong), *found]),
        key=lambda one: (one.kind, one.located_by[0] == "ensemble"),
    )
    assert (name_levels(sinks), sinks.located_by[0]) == (["sinks"], "forward")
    assert finding_text.format_title(precision).startswith("out is less precise than a correct kernel's in ")
    assert {one.check for one in precision.records} == {"ensemble"}
    assert (gradients.kind, name_levels(gradients)) == (GRADIENTS, ["bias"])
    assert "calls" in gradients.follows


def test_what_raises_is_named_by_its_line() -> None:
    def raised(case: str, check: str) -> Record:
        if not has_levels(case, "soft_cap", "bias"):
            return make_record(case, check)
        reason = f"ValueError: no {len(case)} (/kernel.py:74: raise ValueError(...))"
        return make_record(case, check, "all", ERROR, reason=reason)

    (finding,) = root_causes.find_root_causes(
        [raised(case, check) for case in list_cases() for check in ("forward", "poison")]
    )
    assert (finding.kind, name_levels(finding)) == (RAISES, ["bias", "soft_cap"])
    assert finding_text.format_title(finding).endswith(", with a bias and with a soft cap")
    assert finding_text.format_title(finding).startswith("raises ValueError: no ")
    assert set(finding.checks) == {"forward", "poison"}
    assert finding_text.format_refusal(finding) == ""  # no declaration excludes a pair of features


def test_messages_that_differ_by_shapes_and_dtypes_are_one_finding() -> None:
    arrays = ("float32[1,16,2,8]", "bfloat16[3,40,80]", "f16[2]")
    reasons = [f"ValueError: must be a pair, got {array} and ({index}, 5)" for index, array in enumerate(arrays)]
    raised = [make_record(case, "forward", "all", ERROR, reason=reasons[i % 3]) for i, case in enumerate(list_cases())]
    (finding,) = root_causes.find_root_causes(raised)
    assert len(finding.records) == len(list_cases())
    other = make_record(BASE, "poison", "all", ERROR, reason="ValueError: must be a triple, got f16[2] and (0, 5)")
    assert len(root_causes.find_root_causes([*raised, other])) == 2


def test_what_always_raises_with_one_feature_names_the_declaration_of_it() -> None:
    def found(wrong: Callable[[str], bool], verdict: str = ERROR) -> Finding:
        reason = "ValueError: no (/kernel.py:74: raise ValueError(...))"
        bad = {
            case: make_record(case, "forward", "all", verdict, reason=reason) for case in list_cases() if wrong(case)
        }
        (finding,) = root_causes.find_root_causes([bad.get(case, make_record(case)) for case in list_cases()])
        return finding

    hint = "if it is not supported: unsupported={}".format
    assert finding_text.format_refusal(found(lambda case: has_levels(case, "groups"))) == hint(
        '{"gqa": "...", "mqa": "..."}'
    )
    assert finding_text.format_refusal(found(lambda case: has_levels(case, "sinks"))) == hint('{"sinks": "..."}')
    assert finding_text.format_refusal(found(lambda case: has_levels(case, "sinks"), FAIL)) == ""
    assert finding_text.format_refusal(found(lambda case: True)) == ""


def test_what_no_feature_tells_is_said() -> None:
    drawn = random.Random(0)
    odd = set(drawn.sample(list_cases(), 3))
    (finding,) = root_causes.find_root_causes(make_records(lambda case, result: case in odd))
    assert finding.levels is None
    assert not finding.is_explained
    assert (
        finding_text.format_shares(finding)
        == f"fails in 3 of {len(list_cases())} cases, and no feature or pair of features distinguishes them"
    )


def test_a_check_that_fails_alone_is_a_finding_of_its_own() -> None:
    alone = [make_record(SINKS, "aliasing", "out", FAIL), make_record(SINKS, "aliasing", "dq", FAIL)]
    wrong, other = root_causes.find_root_causes(
        [*make_records(lambda case, result: has_levels(case, "soft_cap")), *alone]
    )
    assert name_levels(wrong) == ["soft_cap"]
    assert (other.kind, len(other.records)) == (CHECK, 2)
    assert finding_text.format_title(other) == "aliasing fails"


def test_leaks_and_unexpected_passes_have_findings_of_their_own() -> None:
    leak = make_record(BASE, "poison", "dk.nan", FAIL, remedy='behind_mask="finite"')
    passing = make_record(BASE, "gradients", "dv", UNEXPECTED_PASS, reason="listed as failing")
    found = root_causes.find_root_causes([make_record(BASE), leak, passing])
    assert [finding.kind for finding in found] == [BEHIND_MASK, UNEXPECTED]
    assert [finding.is_explained for finding in found] == [True, True]
    assert finding_text.list_facts(found[0]) == [finding_text.format_mask_leak(summarize_mask_leak(found[0].records))]


def test_probes_are_evidence_and_are_not_counted() -> None:
    asked = [one for one in make_records(lambda case, result: has_levels(case, "sinks")) if one.check == "forward"]
    (before,) = root_causes.find_root_causes(asked)
    probes = [make_record(SINKS, verdict=FAIL), make_record(BASE)]
    (after,) = root_causes.find_root_causes(asked, probes)
    assert (before.inside, before.outside, before.records) == (after.inside, after.outside, after.records)
    assert not before.is_confirmed
    assert after.is_confirmed
    assert after.smallest == probes[0]
    assert finding_text.format_confirmation(after) == "confirmed: this case fails, and the same without sinks passes"


def test_cases_that_were_chosen_for_a_finding_do_not_move_it() -> None:
    asked = [one for one in make_records(lambda case, result: has_levels(case, "sinks")) if one.check == "forward"]
    profile = [one.case.id for one in ERROR_PROFILE_CASES if one.case.phase == "train"]
    (before,) = root_causes.find_root_causes(asked)
    assert root_causes.find_root_causes(asked, [make_record(case, verdict=FAIL) for case in profile]) == [before]
    plain = next(case for case in profile if case.endswith("full/normal/s0"))
    probes = [make_record(plain.replace("full", "full/sinks"), verdict=FAIL), make_record(plain)]
    (after,) = root_causes.find_root_causes(asked, probes)
    assert after.without == (plain,)  # one that passes nevertheless is evidence


@pytest.mark.parametrize(
    ("verdict", "beyond", "said"),
    [
        (PASS, {}, "the algorithm is right, it rounds too much"),
        (FAIL, {BEYOND_ROUNDING: 0.0}, "the algorithm is right, it rounds too much"),
        (FAIL, {BEYOND_ROUNDING: 1.0}, "wrong also in exact arithmetic"),
        (UNJUDGED, {}, ""),
    ],
)
def test_a_finding_says_what_float64_says_of_its_plainest_case(verdict: str, beyond: object, said: str) -> None:
    worst = Worst((0,), 2.0, 1.0, 0.1)
    asked = [make_record(BASE, verdict=FAIL, worst=worst), make_record(SINKS, verdict=FAIL, worst=worst)]
    probe = make_record(BASE, "algorithm", verdict=verdict, figures=beyond)
    (before,) = root_causes.find_root_causes(asked)
    (after,) = root_causes.find_root_causes(asked, [probe])
    assert finding_text.format_exactness(before) == ""
    assert finding_text.format_exactness(after).startswith(said)
    assert bool(said) == bool(finding_text.format_exactness(after))
    assert (after.records, after.kind, after.inside) == (before.records, before.kind, before.inside)


def test_the_title_of_failures_behind_one_branch_names_their_confirmed_levels_too() -> None:
    asked = [make_record(case) for case in list_cases()[:20] if not has_levels(case, "right side")]
    wide = BASE.replace("full", "window-l79-r1")
    found = make_record(wide.replace("/s0", "/s7"), verdict=FAIL, reason=f"{REACHES}flash.py:18 `right > 0` is true")
    (before,) = root_causes.find_root_causes([*asked, found])
    (after,) = root_causes.find_root_causes([*asked, found], [make_record(wide, verdict=FAIL), make_record(BASE)])
    branch = "where flash.py:18 `right > 0` is true"
    assert finding_text.format_title(before) == f"out is wrong {branch}"
    assert finding_text.format_title(after) == f"out is wrong under a window that reaches to the right, {branch}"


def test_what_only_float64_shows_has_its_own_title() -> None:
    records = [make_record(BASE), make_record(BASE, "algorithm", verdict=FAIL, figures={BEYOND_ROUNDING: 0.0})]
    (finding,) = root_causes.find_root_causes(records)
    assert finding_text.format_title(finding).startswith("out is wrong in exact arithmetic")


def test_a_probe_that_passes_says_that_more_is_needed() -> None:
    asked = [one for one in make_records(lambda case, result: has_levels(case, "sinks")) if one.check == "forward"]
    (finding,) = root_causes.find_root_causes(asked, [make_record(SINKS), make_record(BASE)])
    confirmation = finding_text.format_confirmation(finding)
    assert SINKS in confirmation
    assert "needs more" in confirmation
    assert "confirmed" not in confirmation


@pytest.mark.parametrize("case", ["", "*", "case/3", "train/f32/B1.T1/full/normal/s0", "a/b/c/d/e/f"])
def test_what_is_no_case_id_has_no_levels(case: str) -> None:
    assert parse_fields(case) is None
    assert find_levels(case) == frozenset()
    assert rank_plainness(case) > rank_plainness(BASE)
    (finding,) = root_causes.find_root_causes([make_record(case, verdict=FAIL)])
    assert finding.records == (make_record(case, verdict=FAIL),)


VERDICTS_DRAWN = strategies.sampled_from((PASS, FAIL, ERROR, UNSUPPORTED, UNEXPECTED_PASS))
DRAWN = strategies.builds(
    lambda case, asked, verdict, reason: make_record(case, asked[0], asked[1], verdict, reason=reason),
    strategies.sampled_from([*list_cases()[:40], "case/1", ""]),
    strategies.sampled_from(
        [
            ("forward", "out"),
            ("residuals", "logsumexp"),
            ("gradients", "dk"),
            ("poison", "out.nan"),
            ("calls", "out.one"),
            ("linearity", "dq"),
        ]
    ),
    VERDICTS_DRAWN,
    strategies.sampled_from(["", "ValueError: 1 (/kernel.py:7: x)", "TypeError: 2"]),
)


@hypothesis.given(strategies.lists(DRAWN, max_size=60))
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_each_red_record_is_in_exactly_one_finding(found: list[Record]) -> None:
    explained = [one for finding in root_causes.find_root_causes(found) for one in finding.records]
    assert sorted(explained, key=repr) == sorted((one for one in found if one.verdict in RED), key=repr)


@hypothesis.given(strategies.lists(DRAWN, max_size=40, unique_by=lambda one: one.key), strategies.randoms())
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_findings_do_not_hang_on_the_order_of_records(found: list[Record], drawn: random.Random) -> None:
    shuffled = found.copy()
    drawn.shuffle(shuffled)
    found_in = [
        {(finding.kind, tuple(name_levels(finding)), finding.records) for finding in root_causes.find_root_causes(x)}
        for x in (found, shuffled)
    ]
    assert found_in[0] == found_in[1]


@pytest.mark.long
def test_more_records_of_the_same_results_are_no_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    compute_gain = fault_location._compute_gain

    def count_gain(rows: int, signal: fault_location.Signal) -> float:
        nonlocal calls
        calls += 1
        return compute_gain(rows, signal)

    def count_work(repeats: int) -> int:
        nonlocal calls
        calls = 0
        found = make_records(lambda case, result: has_levels(case, "sinks") or result == "dk")
        names = [f".{n}" for n in range(repeats)]
        root_causes.find_root_causes(
            [msgspec.structs.replace(one, observable=f"{one.observable}{name}") for one in found for name in names]
        )
        return calls

    monkeypatch.setattr(fault_location, "_compute_gain", count_gain)
    assert count_work(13) == count_work(1) > 0


def test_no_implementation_pushes_the_findings_of_another_out() -> None:
    many = [make_record(BASE, f"check{n}", verdict=FAIL) for n in range(20)]
    found = root_causes.find_root_causes([*many, make_record(BASE, verdict=FAIL, implementation="other")])
    texts = [finding_text.describe_finding(number, finding) for number, finding in enumerate(found, 1)]
    shown, hidden, failures = finding_text.choose_foremost(texts, 3)
    assert [text.finding.implementation.name for text in shown] == ["kernel", "kernel", "other"]
    assert [text.number for text in shown] == [1, 2, 21]
    assert hidden == failures == 18


def test_what_is_seen_of_one_level_of_two_confirms_in_part() -> None:
    asked = [
        one for one in make_records(lambda case, result: has_levels(case, "soft_cap", "bias")) if one.check == "forward"
    ]
    both, cap = (BASE.replace("full", f"full/{parts}") for parts in ("softcap30/bias", "softcap30"))
    (finding,) = root_causes.find_root_causes(asked, [make_record(both, verdict=FAIL), make_record(cap)])
    assert not finding.is_confirmed
    assert (
        finding_text.format_confirmation(finding)
        == "confirmed in part: this case fails, and the same without bias passes"
    )


def test_a_result_that_only_some_cases_have_is_located_among_all() -> None:
    found = make_records(lambda case, result: False)
    found += [
        make_record(case, "gradients", "dsinks", FAIL) for case in list_cases() if has_levels(case, "sinks", "train")
    ]
    (finding,) = root_causes.find_root_causes(found)
    assert finding_text.format_title(finding) == "dsinks is wrong with sinks"


@functools.cache
def list_smoke_cases() -> tuple[str, ...]:
    """List the cases whose forward results `smoke` judges of a plain function."""

    def attention(q, k, v, *, bias=None, sinks=None, causal=False, window=None, soft_cap=None, scale=None):  # type: ignore[no-untyped-def]
        return q

    implementation = build_implementation(attention, "kernel")
    plan = run_plan.plan_run([implementation], level="smoke", seeds=(0,), checks=(CHECKS_BY_NAME["forward"],))
    return tuple(dict.fromkeys(job.case.id for job in plan.jobs if implementation.supports(job.case) is None))


@pytest.mark.parametrize("level", ["bias", "scale", "sinks", "soft_cap", "window", "causal", "groups", "not causal"])
@pytest.mark.parametrize("cases", [list_smoke_cases, list_cases])
def test_a_fault_of_one_feature_is_named_by_that_feature(cases: Callable[[], tuple[str, ...]], level: str) -> None:
    records = [make_record(case, verdict=FAIL if has_levels(case, level) else PASS) for case in cases()]
    (finding,) = root_causes.find_root_causes(records)
    assert [level] in [[one.name for one in levels] for levels in (finding.levels or (), *finding.others)]
    assert finding_text.format_title(finding) == f"out is wrong {(finding.levels or ())[0].words}"


def test_a_sequence_without_keys_is_named_rather_than_its_phase() -> None:
    cases = [
        f"{phase}/f32/B2.T{t}.S200.N2.K2.H64.V64/lengths-{lengths}/{values}/s0"
        for phase, t in (("decode", 1), ("prefill", 4))
        for lengths in ("0-200", "0-128", "101-200", "7-9")
        for values in ("normal", "heavy")
    ]
    cases += ["decode/f32/B2.T1.S200.N2.K2.H64.V64/full/normal/s0", BASE]
    records = [make_record(case, verdict=FAIL if "lengths-0-" in case else PASS) for case in cases]
    (finding,) = root_causes.find_root_causes(records)
    assert name_levels(finding) == ["empty sequence"]
    assert "no queries or no keys" in finding_text.format_title(finding)


def test_the_title_of_a_call_in_doubles_names_jaxs_option() -> None:
    records = [make_record(BASE.replace("s0", f"s{n}"), "transforms", "out.x64", FAIL) for n in range(3)]
    (finding,) = root_causes.find_root_causes(records)
    assert "jax_enable_x64" in finding_text.format_title(finding)


def make_gradient_records(wrong: Callable[[str, str], bool]) -> list[Record]:
    """Make the records of gradients under each cotangent; a case rotates between the two calls, as at `quick`."""
    found = []
    for place, case in enumerate(case for case in list_cases() if case.startswith("train")):
        found.append(make_record(case))
        asked = ["gradients/{}"] if place % 2 else ["gradients_lse/{}", "gradients_part/{}.lse"]
        asked.append("gradients_part/{}.row" if place % 3 else "gradients_part/{}.head")
        for name, template in itertools.product(("dq", "dk", "dv"), asked):
            check, observable = template.format(name).split("/")
            how = {"gradients": "out", "gradients_lse": "both"}.get(check) or observable.rpartition(".")[2]
            found.append(make_record(case, check, observable, FAIL if wrong(name, how) else PASS))
    return found


@pytest.mark.parametrize(
    ("cotangents", "words"),
    [
        ({"both", "lse"}, "dk is wrong where the cotangent of logsumexp is not zero"),
        ({"lse"}, "dk is wrong where only logsumexp has a cotangent"),
        ({"both"}, "dk is wrong where out and logsumexp both have a cotangent"),
        ({"row", "head"}, "dk is wrong where most of the cotangent is zero"),
        ({"out", "row", "head"}, "dk is wrong where logsumexp has no cotangent"),
        ({"out", "both", "lse", "row", "head"}, "dk is wrong in every case that was judged"),
    ],
)
def test_a_finding_says_which_cotangents_show_it(cotangents: set[str], words: str) -> None:
    records = make_gradient_records(lambda name, how: name == "dk" and how in cotangents)
    (finding,) = root_causes.find_root_causes(records)
    assert finding_text.format_title(finding) == words


@pytest.mark.parametrize("wrong", [False, True])
def test_results_that_change_from_call_to_call_are_a_finding_of_their_own(wrong: bool) -> None:
    """`wrong` says whether they change so much that they are wrong in some cases too."""
    reason = "the same call gives other numbers when it is made again: 5 of 9 values of dq change"
    found = make_records(lambda case, result: wrong and result == "dq" and has_levels(case, "sinks"))
    for case in list_cases():
        if case.startswith("train"):
            found += [
                make_record(case, "independence", "dq.repeated", FAIL, reason=reason),
                make_record(case, "independence", "dk.repeated"),
                make_record(case, "independence", "dq.first"),
            ]
    found.append(make_record(BASE, "transforms", "bits.second_call", FAIL))
    first, *others = root_causes.find_root_causes(found)
    assert first.kind == UNREPEATABLE
    assert finding_text.format_title(first) == "dq changes from call to call"
    assert [finding.kind for finding in others] == [GRADIENTS] * wrong


@pytest.mark.parametrize("level", ["no queries", "unequal rows", "causal of any kind", "later keys"])
def test_a_fault_of_a_kind_of_length_or_mask_is_named_by_it(level: str) -> None:
    masks = ["full", "causal", "window-l31-r0", "window-l9-r9", "chunked-32", "dense-d60", "lengths-64-64"]
    masks += ["lengths-64-32", "causal_and_lengths-128-64"]
    cases = [f"train/f32/B2.T128.S128.N2.K2.H64.V64/{mask}/{v}/s0" for mask in masks for v in ("normal", "large")]
    for ends, queries in (("16-9", "9-0"), ("9-9", "9-9"), ("16-16", "9-16"), ("12-9", "0-9"), ("16-16", "16-16")):
        cases += [
            f"train/f32/B2.T16.S16.N2.K2.H16.V16/own-linf-{ends}/packed-q{queries}/{v}/s0" for v in ("normal", "large")
        ]
    found = [make_record(case, verdict=FAIL if has_levels(case, level) else PASS) for case in cases]
    (finding,) = root_causes.find_root_causes(found)
    named = [name_levels(finding), *([other.name for other in others] for others in finding.others)]
    assert [level] in named
