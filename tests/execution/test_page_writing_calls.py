"""Functions that write pages: recognition, returned values and judgements."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import operand_values
from cases.case_id import parse_case_id
from cases.storage_forms.page_writes import build_writing
from cases.storage_forms.server_traces import build_traces
from conformance.checks import CHECKS_BY_NAME, page_comparison
from conformance.execution import stored_calls
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.executor_tasks import page_write_calls as driven
from conformance.judging import run_plan
from impls import paged
from impls.contract.implementation import Implementation
from reports.records import ERROR, FAIL, PASS, UNSUPPORTED, Record
from tests.bank.examination import create_single_look_runner
from tests.execution.test_plain_functions import judge
from tests.kernels import serving_attention

MIXED = "prefill/f32/B4.T13.S45.N4.K2.H16.V16/own-linf-45-32-33-9/shared16-q13-1-1-9/normal/s0"
SHORT = "prefill/bf16/B2.T3.S9.N2.K1.H8.V8/own-linf-9-3/paged4-q2-3/normal/s0"


def by_name(function: Callable[..., Any], case: str, *checks: str) -> dict[str, Record]:
    """Return the verdict on each observable; failures are not judged again, which takes seconds."""
    chosen = [CHECKS_BY_NAME[name] for name in checks or ("forward",)]
    planned = run_plan.plan_case(build_implementation(function, "kernel"), parse_case_id(case), chosen)
    return {record.observable: record for record in create_single_look_runner().run(planned.jobs)}


def with_one_count(function: Callable[..., Any], *operands: Any, kv_lens: Any, **tables: Any) -> Any:
    """Call a function that needs `num_seqs` with as many sequences as the tables have room for."""
    return function(*operands, kv_lens=kv_lens, num_seqs=jnp.full(1, len(kv_lens), jnp.int32), **tables)


def other_order(
    q: Any, k_pages: Any, v_pages: Any, *, v: Any, k: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any
) -> Any:
    tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens}
    return with_one_count(paged.attention_with_update, q, k, v, k_pages, v_pages, **tables)


def test_a_function_that_writes_is_recognised() -> None:
    made = build_implementation(serving_attention.writing, "kernel")
    assert (made.storage, made.writes_pages) == ("paged", True)
    assert made.residuals == {"logsumexp", "max_logits"}
    assert made.gradients == frozenset()
    assert not build_implementation(serving_attention.paged, "kernel").writes_pages
    assert not build_implementation(serving_attention.packed, "kernel").writes_pages


def test_a_function_that_writes_conforms() -> None:
    found = judge(serving_attention.writing, MIXED, "forward", "residuals")
    assert [(record.observable, record.verdict) for record in found] == [
        *(("out", PASS), ("k_pages", PASS), ("v_pages", PASS)),
        *(("out", PASS), ("logsumexp", PASS), ("max_logits", PASS), ("k_pages", PASS), ("v_pages", PASS)),
    ]


def test_operands_are_given_by_their_names() -> None:
    found = by_name(other_order, SHORT)
    assert {name: record.verdict for name, record in found.items()} == {"out": PASS, "k_pages": PASS, "v_pages": PASS}


def test_pages_without_all_four_names_are_none_that_are_written() -> None:
    with pytest.raises(NotAnAttentionFunction, match="'v_pages'"):
        build_implementation(eval("lambda q, k, k_pages, *, v_pages, page_indices, kv_lens, cu_q_lens: q"), "kernel")


def with_pages(change: Callable[[tuple[Any, ...], tuple[Any, Any]], Any]) -> Callable[..., Any]:
    """Return a right function with `change` applied to its results and the pages that it got."""

    def attention(
        q: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, *, kv_lens: Any, page_indices: Any, cu_q_lens: Any
    ) -> Any:
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens}
        new = with_one_count(paged.attention_with_update, q, k, v, k_pages, v_pages, **tables)
        return change(new, (k_pages, v_pages))

    return attention


def with_scales(
    q: Any,
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    k_scale: float,
    v_scale: float,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
) -> Any:
    tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    return paged.attention_with_update(q, k, v, k_pages, v_pages, k_scale=k_scale, v_scale=v_scale, **tables)


def test_a_function_with_scales_writes_by_them() -> None:
    made = build_implementation(with_scales, "kernel")
    assert made.offers == {"paged", "kv_int8", "kv_fp8", "kv_tensor_scales", "kv_writes_scaled"}
    assert "kv_writes_scaled" not in build_implementation(serving_attention.scaled_whole, "reader").offers
    scaled = SHORT.replace("/paged4", "/kvfp8-given/paged4")
    assert (made.supports(parse_case_id(SHORT)) or "").startswith("k_scale: the function needs k_scale and v_scale")
    assert "for calls that read pages" in (made.supports(parse_case_id(scaled.replace("given", "tensor"))) or "")
    found = by_name(with_scales, scaled, "forward", "aliasing")
    assert {record.verdict for record in found.values()} == {PASS}


@pytest.mark.parametrize("obeys", [True, False])
def test_a_function_is_told_not_to_write(obeys: bool) -> None:
    asked: list[bool] = []

    def attention(
        q: Any,
        k: Any,
        v: Any,
        k_pages: Any,
        v_pages: Any,
        *,
        kv_lens: Any,
        page_indices: Any,
        cu_q_lens: Any,
        num_seqs: Any,
        update_kv_cache: bool,
    ) -> Any:
        asked.append(update_kv_cache)
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        told = update_kv_cache or not obeys
        return paged.attention_with_update(q, k, v, k_pages, v_pages, update_kv_cache=told, **tables)

    found = by_name(attention, SHORT)
    assert {*asked} == {True, False}
    expected = PASS if obeys else FAIL
    assert {name: found[name].verdict for name in ("out", "out.no_update", "k_pages.no_update")} == {
        **{"out": PASS, "out.no_update": expected, "k_pages.no_update": expected}
    }


@pytest.mark.parametrize("mask", ["chunked-7_at-9-3", "tree-2-3_at-9-3"])
def test_masks_over_sequences_reach_a_function_that_writes(mask: str) -> None:
    def attention(
        q: Any,
        k: Any,
        v: Any,
        k_pages: Any,
        v_pages: Any,
        *,
        kv_lens: Any,
        page_indices: Any,
        cu_q_lens: Any,
        num_seqs: Any,
        mask: Any = None,
    ) -> Any:
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        return paged.attention_with_update(q, k, v, k_pages, v_pages, mask=mask, **tables)

    found = by_name(attention, SHORT.replace("own-linf-9-3", mask), "forward", "aliasing")
    assert {"out", "k_pages", "v_pages"} <= set(found)
    assert {record.verdict for record in found.values()} == {PASS}


def test_what_is_not_written_is_told() -> None:
    found = by_name(with_pages(lambda new, old: (new[0], *old)), SHORT)
    assert (found["out"].verdict, found["k_pages"].verdict, found["v_pages"].verdict) == (PASS, FAIL, FAIL)
    assert found["v_pages"].reason.startswith("5 of 5 rows do not hold the new values: page ")
    assert found["v_pages"].reason.endswith("; all of them are as before the call")


def told(change: Callable[[dict[str, np.ndarray]], Any]) -> dict[str, str]:
    """Return the reason for each changed array of pages; empty for an array that is right."""
    what = build_writing(operand_values.draw_problem(parse_case_id(SHORT)), 0, finite=False)
    got = {name: x.copy() for name, x in what.after.items()}
    got |= change(got) or {}
    return {judgement.observable: judgement.reason for judgement in page_comparison.judge_pages(what, got)}


def test_one_bit_elsewhere_is_told() -> None:
    def turned(got: dict[str, np.ndarray]) -> None:
        got["k_pages"].view(np.uint16)[-1, -1, 0, 7] ^= 0x8000

    found = told(turned)
    assert re.fullmatch(
        r"1 of \d+ rows that nothing is written to have changed: page \d+, row 3, head 0, element 7 is -?nan "
        r"\(0x[7f]fc0\), must be -?nan \(0x[7f]fc0\)",
        found["k_pages"],
    )
    assert found["v_pages"] == ""


def test_where_a_row_went_instead_is_told() -> None:
    found = told(lambda got: {"v_pages": np.roll(got["v_pages"], 1, axis=0)})
    assert "; what must be there is in page " in found["v_pages"]
    assert found["k_pages"] == ""


def test_pages_of_another_dtype_are_told() -> None:
    found = told(lambda got: {"k_pages": got["k_pages"].astype(np.float32)})
    assert found["k_pages"].startswith("must be bfloat16[")
    assert "as before the call, and is float32[" in found["k_pages"]


@pytest.mark.parametrize("change", [lambda new, old: new[0], lambda new, old: new[:2]], ids=["out alone", "two"])
def test_what_must_be_returned_is_named(change: Any) -> None:
    found = judge(with_pages(change), SHORT)
    assert {record.verdict for record in found} == {ERROR}
    assert "a call that writes pages must return (out, k_pages, v_pages), and returned" in found[0].reason


def test_cases_that_no_server_has_are_unsupported() -> None:
    (record,) = judge(serving_attention.writing, MIXED.replace("45-32-33-9", "45-16-33-9"))
    assert record.verdict == UNSUPPORTED
    assert "a page that sequences share would be written" in record.reason


def test_pages_are_written_by_paged_calls_alone() -> None:
    with pytest.raises(ValueError, match="writes_pages needs storage 'paged'"):
        Implementation(name="mine", call=serving_attention.packed, storage="packed", writes_pages=True)


def test_only_who_writes_gets_what_is_to_be_written() -> None:
    problem = operand_values.draw_problem(parse_case_id(SHORT))
    storage = problem.storage
    assert storage is not None
    made = build_implementation(serving_attention.writing, "kernel")
    assert "tokens" in stored_calls.build_storage_arrays_for(made, problem)
    assert "tokens" not in stored_calls.build_storage_arrays_for(dataclasses.replace(made, writes_pages=False), problem)
    held = stored_calls.build_storage_arrays_for(made, problem)["held"]
    assert ((held != storage.held).sum(), (held == -1).sum() - (storage.held == -1).sum()) == (5, 5)


def test_pages_are_handed_on_through_a_life() -> None:
    case = build_traces()[0]
    right = judge(serving_attention.writing, case.id, "decoding")
    assert {record.verdict for record in right} == {PASS}
    assert len(right) == 8 * 5
    # What a step returns is right, and what it dropped is missed by the next one.
    found = by_name(with_pages(lambda new, old: (new[0], new[1], old[1])), case.id, "decoding")
    assert found["out.step0"].verdict == PASS
    assert {found[name].verdict for name in ("v_pages.step0", "out.step1")} == {FAIL}


@pytest.mark.parametrize("taken", [("k_pages", "v_pages"), ()], ids=["donated", "kept"])
def test_pages_that_are_taken_from_the_caller_are_told(taken: tuple[str, ...]) -> None:
    compiled = jax.jit(paged.attention_with_update, donate_argnames=taken)

    def attention(
        q: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, *, kv_lens: Any, page_indices: Any, cu_q_lens: Any
    ) -> Any:
        if isinstance(k_pages, np.ndarray):
            raise TypeError("it takes no arrays of NumPy")
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens}
        return with_one_count(compiled, q, k, v, k_pages=k_pages, v_pages=v_pages, **tables)

    problem = operand_values.draw_problem(parse_case_id(SHORT))
    what = build_writing(problem, 0, finite=False)
    executor = Executor(build_implementation(attention, "kernel"))
    found, reason = executor.run(driven.find_written_operands, problem, what.tokens, what.before, compiled=False)
    assert found == list(taken)
    assert reason == "given JAX arrays, since NumPy arrays are refused (TypeError)"
