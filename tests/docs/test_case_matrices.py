"""Tests of the comparison of other test suites with level `quick`."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from cases.case_id import parse_case_id
from cases.masks import Full, Window
from website import case_matrices
from website.measurement_tables import DATA, PARTS, ROOT

FOUND: dict[str, Any] = tomllib.loads((DATA / "case_matrices.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def missing() -> set[case_matrices.Pair]:
    compared = map(case_matrices.compare_suite, FOUND["suite"])
    return {pair for found in compared for pair in found.pairs - found.covered}


def test_each_pair_that_quick_lacks_has_a_reason_and_each_reason_has_a_pair(missing: set[case_matrices.Pair]) -> None:
    reasons = {pair: case_matrices.find_reason(pair, FOUND["reason"]) for pair in missing}
    assert not [pair for pair, reason in reasons.items() if reason is None]
    assert set(reasons.values()) == set(range(len(FOUND["reason"])))


def test_reasons_name_values_that_suites_have() -> None:
    known = {value for suite in FOUND["suite"] for value in case_matrices.compare_suite(suite).values}
    assert {value for reason in FOUND["reason"] for value in reason["values"]} <= known


@pytest.mark.parametrize("suite", FOUND["suite"], ids=lambda suite: suite["name"])
def test_a_suite_has_no_fewer_cases_than_the_tests_of_it_that_are_compared(suite: dict[str, Any]) -> None:
    assert sum(test["cases"] for test in suite["test"]) <= suite["all_cases"]


def test_a_test_covers_the_pairs_of_its_parameters_but_for_those_that_it_skips() -> None:
    test = {
        "dtype": ["f16"],
        "heads": ["mha"],
        "depth": [64],
        "lengths": [[1, 300]],
        "swapped": True,
        "mask": ["full", "causal"],
        "storage": ["dense", "paged"],
        "page": [16],
        "features": ["alibi"],
        "never": [["more queries than keys", "causal"], ["paged", "alibi"]],
    }
    pairs = case_matrices.compare_suite({"test": [test]}).pairs
    assert {("causal", "more keys than queries"), ("paged", "pages of 16 to 63"), ("alibi", "dense")} <= pairs
    assert ("1 key", "queries: up to 1,023, with a tail") in pairs
    assert pairs.isdisjoint(
        {("causal", "more queries than keys"), ("1 key", "causal"), ("alibi", "pages of 16 to 63"), ("dense", "paged")}
    )
    assert ("dense", "pages of 16 to 63") not in pairs


def test_a_stored_case_has_the_lengths_of_each_of_its_sequences() -> None:
    case = parse_case_id("prefill/f16/B2.T9.S300.N4.K2.H256.V256/own-l31-140-300/sinks/paged32-q9-1/normal/s0")
    first, second = case_matrices.iter_case_values(case)
    assert first | second > {"f16", "gqa", "depth 256", "window", "paged", "pages of 16 to 63", "sinks"}
    assert {"1 query", "queries: 2 to 127"} <= first ^ second
    assert "dense" not in first | second


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (Full(), "full"),
        (Window(None, None), "full"),
        (Window(3, 0), "window"),
        (Window(3, 5), "window with later keys"),
    ],
)
def test_a_window_is_named_by_whether_it_has_later_keys(mask: Any, name: str) -> None:
    assert case_matrices.classify_mask(mask) == name


def test_the_page_has_the_tables_that_are_computed() -> None:
    page = (ROOT / "docs" / "measurements" / "case-matrices.md").read_text(encoding="utf-8")
    for part in ("case-matrices", "case-values", "missing-pairs", "outside-corpora"):
        assert f"<!-- generated: {part} -->" in page
        assert PARTS[part]().count("|") > 20
