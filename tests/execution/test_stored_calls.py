"""Functions over pages and packed sequences: recognition, calls and judgements."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import operand_values
from cases.case_id import parse_case_id
from cases.storage_forms.server_traces import build_traces
from conformance import declare
from conformance.execution import stored_calls
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from impls.contract.implementation import Implementation
from reports.records import ERROR, FAIL, PASS, RED, UNSUPPORTED
from tests.execution.test_plain_functions import conforms, judge
from tests.kernels import serving_attention

MIXED = "prefill/f32/B4.T21.S64.N4.K2.H16.V16/own-linf-53-16-17-8/shared16-q21-1-1-8/normal/s0"
WINDOW = "prefill/f32/B4.T21.S64.N4.K2.H16.V16/own-l7-53-16-17-8/shared16-q21-1-1-8/normal/s0"
TRAIN = "train/f32/B4.T30.S30.N4.K2.H16.V16/own-linf-24-1-17-30/packed-q24-1-17-30/normal/s0"
FULL = "train/f32/B4.T30.S30.N4.K2.H16.V16/lengths-24-1-17-30/packed-q24-1-17-30/normal/s0"
PADDED = "train/f32/B2.T9.S8.N2.K1.H16.V16/lengths-8-5/packed-q9-4/normal/s0"
CHECKS = ("forward", "residuals", "poison", "independence")


def test_a_paged_function_conforms() -> None:
    assert conforms(serving_attention.paged, MIXED, *CHECKS)
    assert conforms(serving_attention.paged, WINDOW, *CHECKS)


def test_a_packed_function_conforms_with_gradients() -> None:
    for case in (TRAIN, FULL):
        assert conforms(serving_attention.packed, case, *CHECKS, "gradients", "gradients_lse", "primal")


def zeros(q: Any, k: Any, v: Any, *, kv_lens: Any, page_indices: Any, cu_q_lens: Any) -> Any:
    return jnp.zeros((*q.shape[:2], v.shape[-1]), q.dtype)


def first_page_only(q: Any, k: Any, v: Any, *, page_indices: Any, **tables: Any) -> Any:
    return serving_attention.paged(
        q, k, v, page_indices=jnp.broadcast_to(page_indices[:, :1], page_indices.shape), **tables
    )


def _with_tables(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the signature of the one that it wraps."""
    vars(function)["__signature__"] = inspect.signature(serving_attention.paged)
    return function


@pytest.mark.parametrize("wrong", [zeros, _with_tables(first_page_only)], ids=["zeros", "first_page_only"])
def test_a_wrong_function_does_not_conform(wrong: Callable[..., Any]) -> None:
    assert {record.verdict for record in judge(wrong, MIXED)} == {FAIL}


def test_nan_in_padding_must_not_leak() -> None:
    def leaks(
        q: Any, k: Any, v: Any, *, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any, save_residuals: bool
    ) -> Any:
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        out = serving_attention.paged(q, k, v, **tables)
        return out + 0 * k[..., :1].sum()

    assert {record.verdict for record in judge(leaks, MIXED)} == {FAIL}
    assert conforms(declare(behind_mask="finite")(leaks), MIXED)


def test_kinds_are_read_from_names() -> None:
    paged, packed = (
        build_implementation(serving_attention.paged, "paged"),
        build_implementation(serving_attention.packed, "packed"),
    )
    assert (paged.storage, packed.storage) == ("paged", "packed")
    assert paged.gradients == frozenset()
    assert packed.gradients == {"dq", "dk", "dv", "dsinks"}
    assert paged.residuals == {"logsumexp", "max_logits"}
    assert paged.supports(parse_case_id(MIXED)) is None
    assert "packed" in (paged.supports(parse_case_id(TRAIN)) or "")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("q, k, v, *, page_indices, kv_lens", "lacks 'cu_q_lens'"),
        ("q, k, v, *, page_indices, cu_q_lens", "lacks 'kv_lens'"),
        ("q, k, v, *, cu_q_lens", "lacks 'cu_kv_lens'"),
        ("q, k, v, *, kv_lens", "lacks 'cu_q_lens'"),
        ("q, k, v, *, page_indices, kv_lens, cu_q_lens, block_tables", "needs the argument 'block_tables'"),
        ("q, k, v, *, page_indices, kv_lens, cu_q_lens, bias", "needs the argument 'bias'"),
    ],
)
def test_what_is_missing_is_named(parameters: str, message: str) -> None:
    function = eval(f"lambda {parameters}: q")
    with pytest.raises(NotAnAttentionFunction, match=message):
        build_implementation(function, "kernel")


def test_without_a_window_windows_are_unsupported() -> None:
    def attention(q: Any, k: Any, v: Any, *, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any) -> Any:
        return serving_attention.paged(
            q, k, v, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=num_seqs
        )

    assert conforms(attention, MIXED)
    assert {record.verdict for record in judge(attention, WINDOW)} == {UNSUPPORTED}


@pytest.mark.long
def test_without_num_seqs_there_is_nothing_behind_the_last_sequence() -> None:
    seen: dict[str, Any] = {}

    def attention(q: Any, k: Any, v: Any, *, kv_lens: Any, page_indices: Any, cu_q_lens: Any) -> Any:
        seen.update(kv_lens=kv_lens, cu_q_lens=cu_q_lens)
        count = jnp.full(1, len(kv_lens), jnp.int32)
        return serving_attention.paged(
            q, k, v, kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, num_seqs=count
        )

    executor = Executor(build_implementation(attention, "kernel"))
    plain, arrays = executor.bind(operand_values.draw_problem(parse_case_id(MIXED)))
    plain(arrays)
    assert np.asarray(seen["kv_lens"]).tolist() == [53, 16, 17, 8, 0]
    assert np.asarray(seen["cu_q_lens"]).tolist() == [0, 21, 22, 23, 31, 31]
    assert conforms(attention, MIXED)


def test_causal_alone_is_told_a_packed_function_as_a_window_if_it_has_no_causal() -> None:
    def attention(q: Any, k: Any, v: Any, *, cu_q_lens: Any, cu_kv_lens: Any, num_seqs: Any, window: Any = None) -> Any:
        tables = {"cu_q_lens": cu_q_lens, "cu_kv_lens": cu_kv_lens, "num_seqs": num_seqs}
        return serving_attention.packed(q, k, v, window=window, **tables)

    assert conforms(attention, TRAIN, "forward", "gradients")


def test_an_array_of_another_shape_is_named() -> None:
    def attention(q: Any, k: Any, v: Any, *, cu_q_lens: Any, cu_kv_lens: Any) -> Any:
        return q[1:]

    (record,) = judge(attention, FULL)
    assert record.verdict == ERROR
    assert "out must have the shape [72, 4, 16] of the stored queries" in record.reason


def test_an_implementation_says_how_it_takes_its_operands() -> None:
    made = Implementation(name="mine", call=serving_attention.paged, storage="paged", gradients=frozenset())
    assert "paged" in made.offers
    assert made.supports(parse_case_id(MIXED)) is None
    executor = Executor(made)
    assert isinstance(executor.implementation.call, stored_calls.StoredCall)
    assert executor.with_declarations(executor.implementation).implementation.call is executor.implementation.call
    out = executor.forward(operand_values.draw_problem(parse_case_id(MIXED))).values["out"]
    assert out.shape == (4, 21, 4, 16)
    assert (out[1, :20] == 0).all()


def test_a_mean_of_no_keys_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="mean"):
        Implementation(name="mine", call=serving_attention.paged, storage="paged", empty_rows="mean")


def test_a_window_is_not_traced_and_lengths_are() -> None:
    executor = Executor(build_implementation(serving_attention.paged, "kernel"))
    problem = operand_values.draw_problem(parse_case_id(WINDOW))
    statics, arrays = executor.arguments(problem)
    assert statics["window"] == (7, 0)
    other = parse_case_id(WINDOW.replace("53-16-17-8", "40-15-20-9"))
    assert executor.arguments(operand_values.draw_problem(other))[0] == statics
    assert set(arrays["storage"]) == {
        *("kv_lens", "page_indices", "cu_q_lens", "num_seqs", "q_rows", "places", "held", "stale")
    }


@pytest.mark.parametrize(("operand", "gradient"), [("q", "dq"), ("k", "dk"), ("v", "dv")])
def test_gradients_of_padding_are_zero(operand: str, gradient: str) -> None:
    """A gradient for tokens past the last sequence fails, and nothing else does."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, x), lambda x, dx: (jnp.where(jnp.isnan(x), 1e-30, dx).astype(x.dtype),))

    def attention(q: Any, k: Any, v: Any, *, cu_q_lens: Any, cu_kv_lens: Any, num_seqs: Any) -> Any:
        given = {"q": q, "k": k, "v": v}
        given[operand] = same(given[operand])
        return serving_attention.packed(**given, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens, num_seqs=num_seqs)

    found = {record.observable: record for record in judge(attention, PADDED, "gradients")}
    assert {name for name, record in found.items() if record.verdict != PASS} == {"padding"}
    assert f"of {gradient} of tokens past the last sequence" in found["padding"].reason


def test_what_nobody_wrote_is_nan_unless_it_must_be_finite() -> None:
    storage = operand_values.draw_problem(parse_case_id(MIXED)).storage
    assert storage is not None
    assert np.isnan(stored_calls.build_storage_arrays(storage, "any")["stale"])
    assert np.isfinite(stored_calls.build_storage_arrays(storage, "finite")["stale"])


def test_a_partial_function_is_read_like_another() -> None:
    assert conforms(functools.partial(serving_attention.paged, scale=None), MIXED)


def test_absent_queries_are_empty_rows_with_sinks_too() -> None:
    case = parse_case_id(MIXED.replace("/shared16", "/sinks/shared16"))
    made = dataclasses.replace(build_implementation(serving_attention.paged, "kernel"), empty_rows="zero")
    problem = operand_values.draw_problem(case)
    residuals = Executor(made).residuals(problem).values
    assert problem.sinks is not None
    assert (residuals["logsumexp"][1, :, 0] == problem.sinks).all()
    assert (residuals["max_logits"][1, :, 0] == -np.inf).all()


def test_absent_queries_pass_nothing_to_sinks_of_minus_infinity() -> None:
    case = parse_case_id(TRAIN.replace("/packed", "/sinks/packed"))
    problem, drawn = operand_values.draw_problem(case), operand_values.draw_cotangent(case)
    assert problem.sinks is not None
    none = dataclasses.replace(problem, sinks=np.where(np.arange(4) % 2, problem.sinks, -np.inf).astype(np.float32))
    made = dataclasses.replace(build_implementation(serving_attention.packed, "kernel"), empty_rows="zero")
    found = Executor(made).gradients_lse(none, drawn).values
    assert np.isneginf(found["logsumexp"][1, 0, 0])
    assert (found["dsinks"] != 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    "check",
    ["arguments", "forms", "program", pytest.param("aliasing", marks=pytest.mark.long), "invariance", "transforms"],
)
def test_checks_of_single_cases_are_not_red(check: str) -> None:
    found = judge(serving_attention.paged, WINDOW, check)
    assert not any(record.verdict in RED for record in found)


def test_a_servers_life_is_one_pass() -> None:
    for case in build_traces(0, build_implementation(serving_attention.paged, "kernel").supports):
        found = judge(serving_attention.paged, case.id, "decoding")
        assert {record.verdict for record in found} == {PASS}
        assert len(found) == 24
