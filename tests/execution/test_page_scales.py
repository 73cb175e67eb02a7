"""Functions over pages with scales: recognition, arguments and judgements."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cases import operand_values
from cases.case import KV_FEATURES, Case, CaseIdError
from cases.case_id import parse_case_id
from cases.quantization import READ_CACHES, split_level
from cases.storage_forms.server_traces import build_traces
from cases.storage_forms.storage_layout import NOBODY
from conformance.check_api.scopes import ImplementationGrids
from conformance.checks import CHECKS_BY_NAME
from conformance.checks.problem_pair import take_numbers
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.execution.stored_calls import StoredCall
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import FAIL, PASS, RED, UNSUPPORTED
from tests.execution.test_plain_functions import conforms, judge
from tests.kernels import serving_attention

INT8 = "prefill/f32/B4.T21.S64.N4.K2.H16.V16/own-linf-53-16-17-8/kvint8-token/shared16-q21-1-1-8/normal/s0"
FP8 = INT8.replace("int8", "fp8").replace("f32", "bf16")
WHOLE = INT8.replace("token", "tensor")
PLAIN = INT8.replace("/kvint8-token", "")
CHECKS = ("forward", "residuals", "poison", "independence")


def scaled_alone(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    k_scales: Any,
    v_scales: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
) -> Any:
    """Attend to pages with scales, and take no others."""
    tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    return serving_attention.scaled(q, k_pages, v_pages, k_scales=k_scales, v_scales=v_scales, **tables)


@pytest.mark.parametrize("case", [INT8, pytest.param(FP8, marks=pytest.mark.long)])
def test_a_function_of_scaled_pages_conforms(case: str) -> None:
    assert conforms(serving_attention.scaled, case, *CHECKS)


def test_who_may_be_called_without_scales_takes_both_sorts_of_pages() -> None:
    both, alone, none = (
        build_implementation(f, "kernel") for f in (serving_attention.scaled, scaled_alone, serving_attention.paged)
    )
    scaled, plain = parse_case_id(INT8), parse_case_id(PLAIN)
    assert (both.supports(scaled), both.supports(plain)) == (None, None)
    assert alone.supports(scaled) is None
    assert (
        alone.supports(plain)
        == "k_scales: the function needs k_scales and v_scales, and the pages of this case have none"
    )
    assert (none.supports(scaled) or "").startswith("kv_int8: not declared")
    assert none.supports(plain) is None
    assert both.residuals == {"logsumexp", "max_logits"}
    assert alone.residuals == frozenset()


@pytest.mark.parametrize("case", [WHOLE, pytest.param(WHOLE.replace("int8", "fp8"), marks=pytest.mark.long)])
def test_a_function_of_one_scale_for_all_conforms(case: str) -> None:
    assert conforms(serving_attention.scaled_whole, case, *CHECKS)


def test_one_scale_for_all_is_a_number_that_is_known_before_tracing() -> None:
    seen: list[Any] = []

    def attention(
        q: Any, k: Any, v: Any, *, page_indices: Any, kv_lens: Any, cu_q_lens: Any, k_scale: float, v_scale: float
    ) -> Any:
        seen.append((k_scale, v_scale))
        return q

    implementation = build_implementation(attention, "kernel")
    assert implementation.supports(parse_case_id(PLAIN)) == (
        "k_scale: the function needs k_scale and v_scale, and the pages of this case have none"
    )
    assert (implementation.supports(parse_case_id(INT8)) or "").startswith("kv_token_scales: not declared")
    problem = operand_values.draw_problem(parse_case_id(WHOLE))
    Executor(implementation).forward(problem)
    assert problem.kv_scales is not None
    assert set(seen) == {tuple(map(float, problem.kv_scales))}
    assert {type(x) for pair in seen for x in pair} == {float}


def queries_in_fp8(
    q: Any,
    k: Any,
    v: Any,
    *,
    page_indices: Any,
    kv_lens: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    k_scale: float,
    v_scale: float,
    q_scale: float,
    out_dtype: Any = jnp.bfloat16,
) -> Any:
    tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    assert q.dtype == jnp.float8_e4m3fn
    wide = q.astype(jnp.float32) * q_scale
    return serving_attention.scaled_whole(wide, k, v, k_scale=k_scale, v_scale=v_scale, **tables).astype(out_dtype)


QUERIES = WHOLE.replace("int8-tensor", "fp8-tensor/qfp8")


@pytest.mark.parametrize("case", [QUERIES, QUERIES.replace("f32", "bf16")])
def test_a_function_of_queries_in_fp8_conforms(case: str) -> None:
    assert build_implementation(queries_in_fp8, "kernel").offers >= {"q_fp8", "kv_tensor_scales"}
    assert conforms(queries_in_fp8, case, *CHECKS)


def test_queries_in_fp8_are_exact_and_need_their_parameters() -> None:
    problem = operand_values.draw_problem(parse_case_id(QUERIES.replace("f32", "bf16")))
    assert problem.q_scale is not None
    assert np.frexp(problem.q_scale)[0] != 0.5
    exact = problem.q.astype(np.float64) / problem.q_scale
    assert (exact.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) == exact).all()
    made = build_implementation(queries_in_fp8, "kernel")
    assert "q_scale: the function needs q_scale" in (made.supports(parse_case_id(QUERIES.replace("/qfp8", ""))) or "")
    bare = build_implementation(functools.partial(queries_in_fp8), "kernel")
    assert bare.offers == made.offers
    assert (
        build_implementation(serving_attention.scaled_whole, "k").supports(parse_case_id(QUERIES)) or ""
    ).startswith("q_fp8: not declared")
    with pytest.raises(CaseIdError, match="qfp8"):
        parse_case_id(PLAIN.replace("/shared", "/qfp8/shared"))


def test_two_problems_of_one_program_have_the_same_scales() -> None:
    first = operand_values.draw_problem(parse_case_id(QUERIES))
    other = operand_values.draw_problem(parse_case_id(QUERIES.replace("/s0", "/s1")))
    taken = take_numbers(other, first)
    assert (taken.kv_scales, taken.q_scale) == (first.kv_scales, first.q_scale)
    assert other.q_scale is not None
    assert first.q_scale is not None
    assert (taken.q / first.q_scale == other.q / other.q_scale).all()
    assert (taken.k == other.k).all()


def test_without_a_parameter_for_the_dtype_out_is_in_bf16() -> None:
    function = eval(
        "lambda q, k, v, *, page_indices, kv_lens, cu_q_lens, k_scale, v_scale, q_scale: q",
    )
    made = build_implementation(function, "kernel")
    assert "out_dtype" in (made.supports(parse_case_id(QUERIES)) or "")
    assert made.supports(parse_case_id(QUERIES.replace("f32", "bf16"))) is None


def test_scales_of_all_are_peaks_of_all() -> None:
    problem, plain = (
        operand_values.draw_problem(parse_case_id(case.replace("shared", "paged"))) for case in (WHOLE, PLAIN)
    )
    assert problem.kv_scales is not None
    for stored, scale, x in zip((problem.k, problem.v), problem.kv_scales, (plain.k, plain.v), strict=True):
        assert scale == (np.abs(x.astype(np.float64)).max() / 127).astype(np.float32)
        assert np.abs(stored.astype(np.int32)).max() == 127


def test_residuals_of_one_that_needs_scales_are_found() -> None:
    def with_logsumexp(
        q: Any,
        k_pages: Any,
        v_pages: Any,
        *,
        k_scales: Any,
        v_scales: Any,
        kv_lens: Any,
        page_indices: Any,
        cu_q_lens: Any,
        save_residuals: bool = False,
    ) -> Any:
        assert k_scales.shape == v_scales.shape == k_pages.shape[:3]
        return q, {"logsumexp": q[..., 0]}

    assert build_implementation(with_logsumexp, "kernel").residuals == {"logsumexp"}


_TABLES = "page_indices, kv_lens, cu_q_lens"


@pytest.mark.parametrize(
    ("parameters", "features", "cases"),
    [
        ("k_descale, v_descale", {"kv_int8", "kv_fp8", "kv_sequence_scales"}, ("kvint8-sequence", "kvfp8-sequence")),
        ("k_descale=None, v_descale=None", {"kv_int8", "kv_fp8", "kv_sequence_scales"}, ("kvfp8-sequence", None)),
        (
            "k_descale, v_descale, q_descale",
            {"kv_int8", "kv_fp8", "kv_sequence_scales", "q_descale"},
            ("kvfp8-sequence/qfp8",),
        ),
        ("k_block_scales, v_block_scales", {"kv_mxfp8"}, ("kvmxfp8-block",)),
        (
            "k_block_scales, v_block_scales, k_global_scale, v_global_scale",
            {"kv_mxfp8", "kv_nvfp4"},
            ("kvnvfp4-block",),
        ),
        (
            "k_channel_scales, k_channel_zeros, v_token_scales, v_token_zeros",
            {"kv_channel_scales"},
            ("kvuint8-channel",),
        ),
    ],
)
def test_parameters_say_which_scales_a_function_takes(
    parameters: str, features: set[str], cases: tuple[str | None, ...]
) -> None:
    made = build_implementation(eval(f"lambda q, k, v, *, {_TABLES}, {parameters}: q"), "kernel")
    assert made.offers & {*KV_FEATURES, "q_descale", "q_fp8"} == features
    caches = ("kvint8-token", "kvint8-tensor", "kvfp8-sequence/qfp8", *READ_CACHES, None)
    plain = parse_case_id(PLAIN.replace("f32", "bf16").replace("H16.V16", "H32.V32"))
    taken = {level for level in caches if made.supports(dataclasses.replace(plain, **split_level(level))) is None}
    assert taken >= set(cases)
    assert len(taken) <= max(len(cases), 3 if "None" in parameters else 1)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("q, k, v, *, page_indices, kv_lens, cu_q_lens, k_block_scales", "lacks 'v_block_scales' [^']*$"),
        ("q, k, v, *, page_indices, kv_lens, cu_q_lens, k_descale, q_descale", "lacks 'v_descale'"),
        ("q, k, v, *, page_indices, kv_lens, cu_q_lens, k_channel_scales, v_token_scales", "lacks 'k_channel_zeros'"),
        ("q, k, v, *, page_indices, kv_lens, cu_q_lens, k_scales", r"lacks 'v_scales' \(the scales of v_pages, \["),
        ("q, k, v, *, page_indices, kv_lens, cu_q_lens, v_scales=None", "lacks 'k_scales'"),
        ("q, k, v, *, page_indices, kv_lens, cu_q_lens, k_scale", r"lacks 'v_scale' \(the scale of all v_pages, a"),
        (
            "q, k, v, *, page_indices, kv_lens, cu_q_lens, kv_scales",
            "needs the argument 'kv_scales'.*k_scales, v_scales",
        ),
        ("q, k, v, k_pages, v_pages, *, page_indices, kv_lens, cu_q_lens, k_scales", "lacks 'v_scales'"),
    ],
)
def test_what_is_missing_is_named(parameters: str, message: str) -> None:
    function = eval(f"lambda {parameters}: q")
    with pytest.raises(NotAnAttentionFunction, match=message):
        build_implementation(function, "kernel")


def test_who_takes_whatever_there_is_has_not_said_that_it_knows_scales() -> None:
    def attention(q: Any, k: Any, v: Any, *, page_indices: Any, kv_lens: Any, cu_q_lens: Any, **options: Any) -> Any:
        return q

    assert "kv_int8" not in build_implementation(attention, "kernel").offers


def test_other_caches_have_no_pages() -> None:
    both = build_implementation(serving_attention.scaled, "kernel")
    for cache, reason in (("kvint8-head", "kv_head_scales: not declared"), ("kvint4-token", "kv_int4: not declared")):
        assert (both.supports(parse_case_id(INT8.replace("kvint8-token", cache))) or "").startswith(reason)
    packed = parse_case_id("prefill/f32/B1.T8.S8.N2.K2.H16.V16/own-linf-8/kvint8-token/packed/normal/s0")
    assert build_implementation(serving_attention.packed, "kernel").supports(packed) is not None
    assert build_implementation(serving_attention.writing, "kernel").supports(parse_case_id(INT8)) is not None


def taken(case: str, *, stale: float) -> tuple[operand_values.Problem, dict[str, np.ndarray]]:
    problem = operand_values.draw_problem(parse_case_id(case))
    executor = Executor(build_implementation(serving_attention.scaled, "kernel"))
    _, arrays = executor.arguments(problem)
    storage = {**arrays["storage"], "stale": np.float32(stale)}
    call = executor.implementation.call
    assert isinstance(call, StoredCall)
    found = call.store(arrays["q"], arrays["k"], arrays["v"], storage, None, arrays["kv_scales"])
    return problem, {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.parametrize(("case", "dtype"), [(INT8, np.int8), (FP8, ml_dtypes.float8_e4m3fn)])
def test_scales_lie_where_their_keys_do(case: str, dtype: Any) -> None:
    problem, found = taken(case, stale=np.nan)
    assert problem.storage is not None
    assert problem.kv_scales is not None
    held = problem.storage.held
    assert found["k"].dtype == found["v"].dtype == np.dtype(dtype)
    for pages, scales, means in (("k", "k_scales", problem.keys), ("v", "v_scales", problem.values)):
        assert found[scales].shape == (*held.shape, problem.k.shape[2])
        assert np.isnan(found[scales][held == NOBODY]).all()
        meant = found[pages].astype(np.float64) * found[scales].astype(np.float64)[..., None]
        there = held != NOBODY
        assert np.array_equal(meant[there], means.reshape(-1, *means.shape[2:])[held[there]])


@pytest.mark.parametrize(
    ("case", "stale", "bad"),
    [(INT8, np.nan, 127), (INT8, 64.0, 64), (INT8, np.inf, 127), (FP8, np.nan, np.nan), (FP8, 2.0**40, 448)],
)
def test_dead_rows_of_pages_hold_the_worst_that_their_dtype_has(case: str, stale: float, bad: float) -> None:
    problem, found = taken(case, stale=stale)
    assert problem.storage is not None
    nobody = problem.storage.held == NOBODY
    assert np.array_equal(np.unique(found["k"][nobody].astype(np.float64)), [bad], equal_nan=True)
    assert np.array_equal(np.unique(found["k_scales"][nobody]), [np.float32(stale)], equal_nan=True)


def changed(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a function of scaled pages with its scales changed."""

    @functools.wraps(scaled_alone)
    def attention(q: Any, k_pages: Any, v_pages: Any, *, k_scales: Any, v_scales: Any, **tables: Any) -> Any:
        k_scales, v_scales = change(k_scales, v_scales)
        return scaled_alone(q, k_pages, v_pages, k_scales=k_scales, v_scales=v_scales, **tables)

    return attention


@pytest.mark.parametrize(
    "change",
    [
        lambda k, v: (k, k),
        lambda k, v: (jnp.roll(k, 1, axis=1), v),
        lambda k, v: (k, jnp.nan_to_num(v) * 0 + v[..., :1]),
    ],
    ids=["of_k_for_v", "of_another_row", "of_the_first_head"],
)
def test_wrong_scales_are_seen(change: Callable[[Any, Any], Any]) -> None:
    assert conforms(changed(lambda k, v: (k, v)), INT8)
    assert {record.verdict for record in judge(changed(change), INT8)} == {FAIL}


def test_the_grid_of_others_knows_nothing_of_scales() -> None:
    def caches(function: Callable[..., Any]) -> set[str | None]:
        asked = ImplementationGrids(build_implementation(function, "kernel"), "quick", 0)
        cases: tuple[Case, ...] = (*asked.grid.cases, *asked.sizes.cases, *asked.grid.declined, *asked.grid.singles)
        return {case.kv_cache for case in (*cases, *build_traces(0, asked.implementation.supports))}

    assert caches(serving_attention.paged) == {None}
    assert caches(serving_attention.scaled) == {None, "kvint8-token", "kvfp8-token"}
    assert caches(serving_attention.scaled_whole) == {None, "kvint8-tensor", "kvfp8-tensor"}


@pytest.mark.long
@pytest.mark.parametrize(
    "function", [serving_attention.scaled, serving_attention.scaled_whole], ids=lambda function: function.__name__
)
def test_scales_live_as_pages_do(function: Callable[..., Any]) -> None:
    implementation = build_implementation(function, "kernel")
    case = next(case for case in build_traces(0, implementation.supports) if case.kv_cache)
    found = Runner(Settings()).run(run_plan.plan_case(implementation, case, [CHECKS_BY_NAME["decoding"]]).jobs)
    assert {record.verdict for record in found} == {PASS}


@pytest.mark.long
def test_checks_of_few_cases_take_scales() -> None:
    """Run each check of one or two cases on the case with every operand."""
    implementation = build_implementation(serving_attention.scaled, "kernel")
    case = parse_case_id(INT8.replace("kvint8-token", "softcap30/sinks/kvint8-token"))
    checks = [CHECKS_BY_NAME[name] for name in ("arguments", "transforms", "calls", "aliasing", "forms", "limits")]
    found = Runner(Settings()).run(run_plan.plan_case(implementation, case, checks).jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert {record.check for record in found if record.verdict == PASS} >= {check.name for check in checks}
    assert {record.verdict for record in found} <= {PASS, UNSUPPORTED}
