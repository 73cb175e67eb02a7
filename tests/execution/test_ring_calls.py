"""Functions over a ring buffer: recognition, calls and judgements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from cases.storage_forms.server_traces import build_traces
from conformance import declare
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from reports.records import ERROR, FAIL, PASS, RED, UNSUPPORTED
from tests.execution.test_plain_functions import conforms, judge
from tests.kernels.ring_attention import attend_ring

DECODE = "decode/f32/B4.T1.S45.N4.K2.H16.V16/own-l9-45-16-17-5/ring16/normal/s0"
FULL = "decode/f32/B4.T1.S45.N4.K2.H16.V16/own-l15-45-16-32-5/sinks/ring16/normal/s0"
CHUNK = "prefill/bf16/B3.T4.S45.N4.K2.H16.V16/own-l9-45-16-2/softcap2/ring16/normal/s0"
SHORT = "prefill/f32/B2.T4.S9.N2.K2.H16.V16/own-linf-9-3/ring16/normal/s0"
CHECKS = ("forward", "residuals", "poison", "independence")


@pytest.mark.parametrize("case", [DECODE, FULL, CHUNK, SHORT])
def test_a_function_over_a_ring_conforms(case: str) -> None:
    assert conforms(attend_ring, case, *CHECKS)


def test_the_form_is_read_from_the_name_of_the_lengths() -> None:
    made = build_implementation(attend_ring, "ring")
    assert (made.storage, made.gradients) == ("ring", frozenset())
    assert made.residuals == {"logsumexp", "max_logits"}
    assert made.supports(parse_case_id(DECODE)) is None
    assert "have lost some" in (made.supports(parse_case_id(DECODE.replace("l9", "l16"))) or "")


def test_operands_are_head_major_and_positions_are_counted_from_the_length() -> None:
    seen: dict[str, Any] = {}

    def attention(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, window: Any = None) -> Any:
        seen.update(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens)
        return attend_ring(q, k_cache, v_cache, cache_seqlens=cache_seqlens, window=window)

    problem = draw_problem(parse_case_id(DECODE))
    plain, arrays = Executor(build_implementation(attention, "ring")).bind(problem)
    plain(arrays)
    rows = len(seen["cache_seqlens"])
    assert seen["q"].shape == (rows, 1, 4, 16)
    assert seen["k_cache"].shape == (rows, 2, 16, 16)
    assert seen["cache_seqlens"].tolist()[:4] == [45, 16, 17, 5]
    assert (seen["k_cache"][0, :, 44 % 16] == problem.k[0, 44]).all()
    assert (seen["v_cache"][1, :, 3] == problem.v[1, 3]).all()
    assert jnp.isnan(seen["k_cache"][3, :, 5:]).all()


def test_zeros_do_not_conform() -> None:
    def zeros(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, window: Any = None) -> Any:
        return jnp.zeros((*q.shape[:-1], v_cache.shape[-1]), q.dtype)

    assert {record.verdict for record in judge(zeros, DECODE)} == {FAIL}


def test_stale_slots_must_not_leak() -> None:
    def leaks(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, window: Any = None) -> Any:
        out = attend_ring(q, k_cache, v_cache, cache_seqlens=cache_seqlens, window=window)
        return out + 0 * k_cache[..., :1].sum()

    assert {record.verdict for record in judge(leaks, DECODE)} == {FAIL}
    assert conforms(declare(behind_mask="finite")(leaks), DECODE)


def test_without_a_window_windows_are_unsupported() -> None:
    def attention(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any) -> Any:
        return attend_ring(q, k_cache, v_cache, cache_seqlens=cache_seqlens)

    assert conforms(attention, SHORT)
    assert {record.verdict for record in judge(attention, DECODE)} == {UNSUPPORTED}


def test_an_array_of_another_shape_is_named() -> None:
    def attention(q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, window: Any = None) -> Any:
        return jnp.swapaxes(attend_ring(q, k_cache, v_cache, cache_seqlens=cache_seqlens, window=window), 1, 2)

    (record,) = judge(attention, DECODE)
    assert record.verdict == ERROR
    assert "out must have the shape" in record.reason


def test_a_required_argument_that_nobody_fills_is_named() -> None:
    with pytest.raises(NotAnAttentionFunction, match="block_table"):
        build_implementation(lambda q, k_cache, v_cache, *, cache_seqlens, block_table: q, "ring")


@pytest.mark.parametrize(
    "check", ["arguments", "calls", "forms", "program", "aliasing", "invariance", "transforms", "memory"]
)
def test_checks_of_single_cases_are_not_red(check: str) -> None:
    found = judge(attend_ring, DECODE, check)
    assert not any(record.verdict in RED for record in found)


def test_it_is_mapped_over() -> None:
    found = [record for record in judge(attend_ring, DECODE, "transforms") if record.observable.startswith("out.vmap")]
    assert {record.verdict for record in found} == {PASS}


def test_a_servers_trace_is_one_pass() -> None:
    for case in build_traces(0, build_implementation(attend_ring, "ring").supports):
        found = judge(attend_ring, case.id, "decoding")
        assert {record.verdict for record in found} == {PASS}
        assert len(found) == 24


def test_under_jit_of_the_kernel_results_are_the_same() -> None:
    assert conforms(jax.jit(attend_ring, static_argnames=("window", "scale", "soft_cap", "save_residuals")), DECODE)
