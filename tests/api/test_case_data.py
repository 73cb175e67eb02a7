"""`conformance.case`: operands, exact results and bounds as arrays."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import jax
import numpy as np
import pytest

import conformance
from tests.api import kernels
from tests.api.kernels import PLAIN, WINDOW

PAGED = "prefill/f32/B4.T13.S45.N2.K2.H64.V64/own-linf-45-16-17-9/paged16-q13-1-1-9/normal/s0"
PACKED = "train/f32/B4.T30.S30.N2.K2.H64.V64/own-linf-24-1-17-30/packed-q24-1-17-30/normal/s0"
LATENT = "prefill/f32/B4.T13.S45.N4.K1.H80.V64/own-linf-45-16-17-9/scale0.144/latent16-q13-1-1-9/normal/s0"
RING = "prefill/f32/B3.T4.S45.N4.K2.H16.V16/own-l9-45-16-2/ring16/normal/s0"


def test_operands_and_expected_results_are_those_of_plain_attention() -> None:
    case = conformance.case(WINDOW)
    q, k, v = (case.operands[name].astype(np.float64) for name in "qkv")
    x = np.einsum("btnh,bsnh->bnts", q, k) / 8
    x = np.where(case.operands["mask"], x, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    out = np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)
    # Sums of 64 products and of 128 keys in float64: a logit errs by at most `logit`, and weights by twice that share.
    unit = 2.0**-53
    logit = 66 * unit * np.einsum("btnh,bsnh->bnts", abs(q), abs(k)).max() / 8
    assert abs(out - case.expected["out"]).max() <= (2 * logit + 260 * unit) * abs(v).max()
    assert case.compare(out.astype(np.float32)).passes
    assert {name: x.shape for name, x in case.bounds.items()} == {name: x.shape for name, x in case.expected.items()}


def test_a_function_gets_the_arguments_of_its_parameters() -> None:
    case = conformance.case(WINDOW)
    arguments = case.arguments(kernels.attention)
    assert sorted(arguments) == ["k", "q", "v", "window"]
    assert arguments["window"] == (31, 0)
    assert case.compare(kernels.attention(**arguments)).passes


def test_a_captured_array_is_a_leaf_of_the_operand() -> None:
    case = conformance.case("train/f32/B1.T16.S16.N2.K2.H8.V8/full/score-buckets/normal/s0")
    (table,) = jax.tree.leaves(case.operands["score_mod"])
    assert table.shape == case.expected["dscore_table"].shape == (32, 2)


def test_comparison_says_where_a_result_is_wrong() -> None:
    case = conformance.case(WINDOW)
    compared = case.compare(case.run(kernels.faulty_attention))
    assert not compared.passes
    wrong = compared["out"]
    assert wrong.verdict == "fail"
    assert wrong.ratio is not None
    assert wrong.limit is not None
    assert wrong.ratio > wrong.limit
    assert wrong.expected == case.expected["out"][wrong.index]
    assert str(list(wrong.index)) in str(compared)
    assert case.compare(case.run(kernels.attention)).passes
    with pytest.raises(ValueError, match="dq"):
        case.compare({"qd": 0})


def test_nothing_compared_is_no_pass() -> None:
    assert not conformance.case(PLAIN).compare({}).passes


def test_an_unsupported_case_says_why() -> None:
    def dense(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v)

    with pytest.raises(ValueError, match="window"):
        conformance.case(WINDOW).arguments(dense)


@pytest.mark.parametrize(
    ("case_id", "names"),
    [
        (PAGED, {"kv_lens", "page_indices", "cu_q_lens"}),
        (PACKED, {"cu_q_lens", "cu_kv_lens"}),
        (LATENT, {"latent_pages", "value_dim"}),
        (RING, {"k_cache", "v_cache", "cache_seqlens"}),
    ],
)
def test_stored_cases_have_the_operands_of_their_form_and_take_stored_results(case_id: str, names: set[str]) -> None:
    case = conformance.case(case_id)
    assert names <= set(case.operands)
    assert case.compare(case.expected).passes
    storage = case.problem.storage
    assert storage is not None
    dense = case.expected["out"]
    stored = dense.reshape(-1, *dense.shape[2:])[np.maximum(storage.q_rows, 0)]
    assert stored.shape[:-1] == case.operands["q"].shape[:-1]
    assert case.compare(stored).passes
    assert not case.compare(stored + 1).passes


def test_declared_arithmetic_widens_the_bounds() -> None:
    case_id = "train/bf16/B1.T128.S128.N2.K2.H64.V64/full/normal/s0"
    exact, rounded = conformance.case(case_id), conformance.case(case_id, logits="input")
    assert (rounded.bounds["out"] > exact.bounds["out"]).all()


def test_a_wrong_id_or_declaration_is_an_error() -> None:
    with pytest.raises(ValueError, match="train/f33"):
        conformance.case("train/f33")
    with pytest.raises(TypeError, match="'logits'"):
        conformance.case(PLAIN, logit="input")  # type: ignore[call-arg] # the test is about this


def test_cases_lists_the_ids_of_a_level_and_of_a_kernel() -> None:
    assert set(conformance.cases("train/f32")) < set(conformance.cases())
    mine = conformance.cases(function=kernels.attention)
    assert mine
    assert all("/sinks/" not in case_id for case_id in mine)
    with pytest.raises(ValueError, match="'quick'"):
        conformance.cases(level="quik")  # type: ignore[arg-type] # the test is about this


@pytest.mark.parametrize("module", ["check_function", "case_data"])
def test_examples_in_docstrings_run_as_printed(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"conformance.api.{module}"), optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed
