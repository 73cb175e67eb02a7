"""Tests of the checks `parts` and `decoding`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.decoding_cases import LENGTH, PIECES, cut_case, cut_problem, select_decoding_cases
from cases.operand_values import Problem, draw_problem
from conformance.checks import CHECKS_BY_NAME
from conformance.checks.parts import _split_cache
from conformance.execution import implementation_registry
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.implementation import Implementation
from impls.requested_features import OPTIONAL, list_requested_features
from reports.records import FAIL, PASS, RED, Record
from tests.kernels.split_decode import DecodeSteps, build_decode_implementation
from tests.planted.features.decode import BUGS

CASE = "decode/f32/B3.T1.S40.N4.K2.H16.V24/{}/sinks/normal/s0"


def judge(subject: Implementation, case: str, check: str) -> list[Record]:
    """Return the records of one check on one case, without rejudging failures."""
    planned = run_plan.plan_case(subject, parse_case_id(case), [CHECKS_BY_NAME[check]])
    return [record for record in Runner(Settings(), confirmed=0).run(planned.jobs) if record.check == check]


def verdicts(found: list[Record]) -> dict[str, str]:
    return {record.observable: record.verdict for record in found}


ASKED = {f"{name}.{how}": PASS for how in ("part", "merged") for name in ("out", "logsumexp", "max")}


@pytest.mark.parametrize(
    "mask", ["lengths-0-17-40", "full", "causal-o39", "window-l9-r0-o30_and_lengths-40-0-21", "chunked-7-o39"]
)
def test_a_right_part_passes_alone_and_merged(mask: str) -> None:
    assert verdicts(judge(build_decode_implementation(DecodeSteps()), CASE.format(mask), "parts")) == ASKED


def test_the_contracts_merge_serves_those_who_have_none() -> None:
    kernel = dataclasses.replace(build_decode_implementation(DecodeSteps()), merge=None)
    assert verdicts(judge(kernel, CASE.format("lengths-0-17-40"), "parts")) == ASKED


def test_who_offers_no_parts_is_not_asked() -> None:
    assert judge(implementation_registry.find_implementation("dot_product"), CASE.format("full"), "parts") == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda part: part[0], "a part must be (out, max, sum), got ArrayImpl"),
        (lambda part: part._replace(max=part.max[..., 0]), "max of a part must have shape (3, 1, 4, 1), got (3, 1, 4)"),
        (lambda part: part._replace(sum=part.sum.astype(jnp.bfloat16)), "sum of a part must be float32, got bfloat16"),
    ],
)
def test_a_malformed_part_is_told_by_what_is_wrong(change: Any, reason: str) -> None:
    found = judge(build_decode_implementation(DecodeSteps(returned=change)), CASE.format("full"), "parts")
    told = {record.reason for record in found if record.verdict == FAIL and record.observable.endswith(".part")}
    assert told == {reason}


@pytest.mark.parametrize(
    "mask",
    [
        "full",
        "lengths-0-17-40",
        "own-l9-0-17-40",
        "own-linf-1-22-40",
        "causal-o35_and_lengths-40-3-22",
        "window-l9-r3-o21",
        "chunked-7-o39",
        "chunked-39-o39",
    ],
)
def test_pieces_of_a_cache_see_together_what_the_whole_sees(mask: str) -> None:
    problem = draw_problem(parse_case_id(CASE.format(mask)))
    pieces = _split_cache(problem)
    seen = np.concatenate([np.broadcast_to(p.allowed, (3, 1, 1, p.k.shape[1])) for p in pieces], axis=-1)
    np.testing.assert_array_equal(seen, np.broadcast_to(problem.allowed, seen.shape))
    np.testing.assert_array_equal(np.concatenate([p.k for p in pieces], axis=1), problem.k)
    assert [p.sinks is None for p in pieces] == [True, False]


@pytest.mark.parametrize("mask", ["dense-d40", "chunked-41-o39", "causal_or_spans-0-1"])
def test_a_mask_that_cannot_be_moved_has_no_pieces(mask: str) -> None:
    assert _split_cache(draw_problem(parse_case_id(CASE.format(mask)))) == []


def test_every_mask_that_has_a_decode_form_is_decoded() -> None:
    cases = select_decoding_cases(3)
    kinds = ("causal", "window", "chunked", "dense", "indexer", "listed", "spans", "moba")
    assert all(any(kind in case.mask for case in cases) for kind in kinds)
    assert any(case.segments for case in cases)
    assert {case.kv_cache for case in cases} == {None, "kvint8-token", "kvfp8-head"}
    assert any(case.alibi for case in cases)
    assert any(case.score for case in cases)
    assert all(parse_case_id(case.id) == case and case.seed == 3 for case in cases)
    assert [cut_case(cases[1], *at).mask for at in PIECES] == [f"window-l9-r0{o}" for o in ("", "-o18", "-o36", "-o38")]
    assert [cut_case(cases[0], *at).phase for at in PIECES] == ["prefill", "prefill", "decode", "decode"]
    assert max(stop for _, stop in PIECES) < LENGTH


@pytest.mark.parametrize("case", select_decoding_cases(), ids=str)
def test_a_piece_has_the_rows_of_the_whole_and_nothing_behind_them(case: Case) -> None:
    whole = draw_problem(case)
    for start, stop in PIECES:
        some = cut_problem(whole, start, stop, stale=64.0)
        kv_length = some.k.shape[1]
        np.testing.assert_array_equal(some.allowed, whole.allowed[..., start:stop, :kv_length])
        assert not some.allowed[..., stop:].any()
        np.testing.assert_array_equal(some.keys[:, :stop], whole.keys[:, :stop])
        assert [operand for operand, _ in some.logit_terms] == [operand for operand, _ in whole.logit_terms]
        for (_, term), (_, of_all) in zip(some.logit_terms, whole.logit_terms, strict=True):
            np.testing.assert_array_equal(term, of_all[..., start:stop, :stop])
        if not whole.logit_terms:
            assert (some.keys[:, stop:] != whole.keys[:, stop:]).mean() > 0.9
        assert set(find_features(some)) <= set(cut_case(case, start, stop).features)


def find_features(problem: Problem) -> tuple[str, ...]:
    options = {name: getattr(problem, name) for name in (*OPTIONAL, "kv_scales", "alibi_slopes", "score_mod")}
    return list_requested_features(problem.q, problem.k, problem.v, problem.mask, options)


def test_heads_in_groups_are_decoded_only_where_they_are_supported() -> None:
    def equal_heads_only(case: Any) -> str | None:
        return "equal heads only" if case.num_q_heads != case.num_kv_heads else None

    assert {case.num_q_heads for case in select_decoding_cases(0, equal_heads_only)} == {2}
    assert select_decoding_cases(0, lambda case: "no decode" if case.phase == "decode" else None) == ()


@pytest.mark.parametrize("name", ["dot_product", "block_flash", "ragged"])
def test_piece_by_piece_is_one_pass(name: str) -> None:
    (case,) = (case for case in select_decoding_cases() if "chunked" in case.mask)
    found = verdicts(judge(implementation_registry.find_implementation(name), case.id, "decoding"))
    places = ("chunk0", "chunk18", "token36", "token38")
    assert found == {f"{x}.{at}": PASS for at in places for x in ("out", "logsumexp", "max_logits")}


def test_a_token_that_is_taken_for_the_last_of_a_full_cache_fails_where_the_cache_is_not_full() -> None:
    (bug,) = (bug for bug in BUGS if bug.name == "decode-at-the-end-of-the-cache")
    found = judge(bug.build(), select_decoding_cases()[0].id, "decoding")
    assert {record.observable for record in found if record.verdict in RED} >= {"out.token36", "out.token38"}
    assert not any(record.verdict in RED for record in found if "chunk" in record.observable)
