"""Declarations: a right kernel passes with its declaration and fails without, and a wrong kernel fails with it too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case_id import parse_case_id
from conformance import declare
from conformance.checks import CHECKS_BY_NAME
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.declarations import list_declarations
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from reports.records import ERROR, FAIL, PASS, RED, UNSUPPORTED, Record
from tests.kernels import naive, serving_attention

SHAPE = "train/f32/B2.T16.S16.N2.K1.H16.V16"
FULL, BIAS = f"{SHAPE}/full/normal/s0", f"{SHAPE}/causal/bias/normal/s0"


def judge(function: Callable[..., Any], case: str, *checks: str, **declared: Any) -> dict[str, Record]:
    """Judge a function on one case, and return the records by check and observable."""
    kernel = build_implementation(declare(behind_mask="finite", **declared)(function), "kernel")
    chosen = [CHECKS_BY_NAME[name] for name in checks or ("forward",)]
    found = Runner(Settings()).run(run_plan.plan_case(kernel, parse_case_id(case), chosen).jobs)
    return {f"{record.check}.{record.observable}": record for record in found}


def list_red(found: Mapping[str, Record]) -> set[str]:
    assert found
    return {name for name, record in found.items() if record.verdict in RED}


def list_named(function: Callable[..., Any], **declared: Any) -> list[str]:
    """Return what the verdict names as declared."""
    return list_declarations(build_implementation(declare(**declared)(function), "kernel"))


def attend(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    return naive.attention(q, k, v, causal=causal, bias=bias)


def lose_bias_gradient(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    return attend(q, k, v, causal=causal, bias=None if bias is None else jax.lax.stop_gradient(bias))


@jax.custom_vjp
def without_gradient(bias: Any) -> Any:
    return bias


def raise_on_gradient(*_: Any) -> Any:
    raise RuntimeError("there is no gradient of the bias")


without_gradient.defvjp(raise_on_gradient, raise_on_gradient)


def raise_for_bias_gradient(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    return attend(q, k, v, causal=causal, bias=None if bias is None else without_gradient(bias))


def scale_query_gradient(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    q = 1.1 * q - jax.lax.stop_gradient(0.1 * q)
    return lose_bias_gradient(q, k, v, causal=causal, bias=bias)


QKV = ("q", "k", "v")


@pytest.mark.parametrize("kernel", [lose_bias_gradient, raise_for_bias_gradient])
def test_a_gradient_that_is_declared_not_to_exist_is_unsupported(kernel: Callable[..., Any]) -> None:
    checks = ("gradients", "differentiation")
    assert list_red(judge(kernel, BIAS, *checks))
    found = judge(kernel, BIAS, *checks, gradients=QKV)
    assert not list_red(found)
    assert {found[f"gradients.{name}"].verdict for name in ("dq", "dk", "dv")} == {PASS}
    assert found["gradients.dbias"].verdict == UNSUPPORTED
    assert "dbias is not offered" in found["gradients.dbias"].reason
    assert list_named(kernel, gradients=QKV) == ["no dbias"]
    assert "gradients.dq" in list_red(judge(scale_query_gradient, BIAS, "gradients", gradients=QKV))


def test_a_function_without_any_gradient_shows_it() -> None:
    found = judge(attend, BIAS, "gradients", gradients=())
    assert [(name, record.verdict) for name, record in found.items()] == [("gradients.all", UNSUPPORTED)]
    assert list_named(attend, gradients=()) == ["no dq dk dv dbias"]


@pytest.mark.parametrize("wrong", [("q", "biass"), ("dq",)])
def test_gradients_are_named_by_operand(wrong: Any) -> None:
    with pytest.raises(ValueError, match="gradients"):
        declare(gradients=wrong)


def refuse_bias(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    if bias is not None:
        raise ValueError("no bias beside a causal mask")
    return attend(q, k, v, causal=causal)


def double_without_bias(q: Any, k: Any, v: Any, *, causal: bool = False, bias: Any = None) -> Any:
    return 2 * refuse_bias(q, k, v, causal=causal, bias=bias)


def refuse_second_call() -> Callable[..., Any]:
    calls: list[int] = []

    def attention(q: Any, k: Any, v: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("called before")
        return attend(q, k, v)

    return attention


def test_a_value_error_refuses_a_case_only_where_it_is_declared() -> None:
    assert judge(refuse_bias, BIAS)["forward.all"].verdict == ERROR
    refused = judge(refuse_bias, BIAS, refuses="ValueError")["forward.all"]
    assert refused.verdict == UNSUPPORTED
    assert "no bias beside a causal mask" in refused.reason
    assert list_named(refuse_bias, refuses="ValueError") == ['refuses="ValueError"']
    assert not list_red(judge(refuse_bias, FULL, refuses="ValueError"))
    assert judge(double_without_bias, FULL, refuses="ValueError")["forward.out"].verdict == FAIL


def test_a_call_that_was_accepted_before_is_no_refusal() -> None:
    found = judge(refuse_second_call(), FULL, "forward", "calls", refuses="ValueError")
    assert found["forward.out"].verdict == PASS
    assert found["calls.thread"].verdict == ERROR
    assert "called before" in found["calls.thread"].reason


SINKS = f"{SHAPE}/causal/sinks/normal/s0"
CAPPED = "train/f32/B1.T16.S24.N4.K2.H16.V16/full/softcap2/biashead/large/s0"
NOTHING = f"{SHAPE}/lengths-0-9/normal/s0"
RESIDUAL_CHECKS = ("residuals", "gradients_lse", "gradients_part", "primal", "invariance", "independence")


def compute_parts(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> tuple[Any, Any, Any]:
    """Return `out`, and the logsumexp without and with the sink, in f32."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)))
    x = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[-1] ** -0.5
    seen = jnp.broadcast_to(True if mask is None else mask, x.shape)
    top = jnp.max(x, axis=-1, where=seen, initial=-1e30)
    pivot = jax.lax.stop_gradient(top if sinks is None else jnp.maximum(top, sinks[:, None]))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, x - pivot[..., None], 0)), 0)
    keys = weights.sum(axis=-1)
    total = keys if sinks is None else keys + jnp.exp(sinks[:, None] - pivot)
    logsumexps = [jnp.where(s > 0, pivot + jnp.log(jnp.where(s > 0, s, 1)), -jnp.inf) for s in (keys, total)]
    p = weights / jnp.where(total > 0, total, 1)[..., None]
    return jnp.einsum("bnts,bsnv->btnv", p, v, precision="highest"), logsumexps[0], logsumexps[1]


def build_kernel(convert: Callable[[Any, Any], Any], wrong: float = 1.0) -> Callable[..., Any]:
    """Build a kernel whose logsumexp is `convert(without sink, with sink)`, times a factor that is 1 if it is right."""

    def attention(
        q: Any, k: Any, v: Any, *, mask: Any = None, sinks: Any = None, segment_ids: Any = None, save_residuals: Any = 0
    ) -> Any:
        if segment_ids is not None:
            same = segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :]
            mask = same if mask is None else mask & same
        out, keys, total = compute_parts(q, k, v, mask, sinks)
        out = out.astype(q.dtype)
        return (out, {"logsumexp": wrong * convert(keys, total)}) if save_residuals else out

    return attention


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Any, Any], Any], str]] = {
    "base": ({"logsumexp_base": 2}, lambda keys, total: total / jnp.log(2.0), SINKS),
    "sink": ({"logsumexp_sink": False}, lambda keys, total: keys, SINKS),
    "both": ({"logsumexp_base": 2, "logsumexp_sink": False}, lambda keys, total: keys / jnp.log(2.0), SINKS),
    "empty": ({"logsumexp_empty": "inf"}, lambda keys, total: jnp.where(jnp.isinf(total), jnp.inf, total), NOTHING),
}


@pytest.mark.parametrize("formula", ["base", "sink", "empty", pytest.param("both", marks=pytest.mark.long)])
def test_another_logsumexp_is_right_only_as_declared(formula: str) -> None:
    declared, convert, case = FORMULAS[formula]
    kernel = build_kernel(convert)
    found = judge(kernel, case, *RESIDUAL_CHECKS, empty_rows="zero", **declared)
    assert not list_red(found)
    assert found["residuals.logsumexp"].verdict == PASS
    undeclared = judge(kernel, case, "residuals", empty_rows="zero")
    (named,) = {record.remedy for record in undeclared.values() if record.verdict == FAIL}
    assert named == ", ".join(list_named(kernel, **declared))
    if case == SINKS:
        wrong = judge(build_kernel(convert, 1.001), case, "residuals", "gradients_lse", empty_rows="zero", **declared)
        assert "residuals.logsumexp" in list_red(wrong)
        assert "gradients_lse.dq" in list_red(wrong)
        assert list_red(judge(build_kernel(lambda keys, total: total), case, "residuals", **declared))
    else:
        natural = build_kernel(lambda keys, total: total)
        assert "residuals.logsumexp" in list_red(judge(natural, case, "residuals", empty_rows="zero", **declared))


def build_capped(order: str) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any, *, soft_cap: Any = None, bias: Any = None) -> Any:
        group = q.shape[2] // k.shape[2]
        x = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, group, axis=2), precision="highest") * q.shape[-1] ** -0.5
        if bias is not None and order == "after_bias":
            x = x + bias
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        if bias is not None and order != "after_bias":
            x = x + (bias if order == "before_bias" else jax.lax.stop_gradient(bias))
        v = jnp.repeat(v, group, axis=2)
        return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(x), v, precision="highest")

    return attention


def test_a_bias_after_the_soft_cap_is_right_only_as_declared() -> None:
    checks = ("forward", "gradients", "arguments", "limits", "differentiation")
    declared = {"soft_cap": "before_bias"}
    found = judge(build_capped("before_bias"), CAPPED, *checks, **declared)
    assert not list_red(found)
    assert found["gradients.dbias"].verdict == PASS
    undeclared = judge(build_capped("before_bias"), CAPPED, "forward")
    assert {record.remedy for record in undeclared.values()} == {'soft_cap="before_bias"'}
    assert list_named(build_capped("before_bias"), **declared) == ['soft_cap="before_bias"']
    assert "forward.out" in list_red(judge(build_capped("after_bias"), CAPPED, **declared))
    assert list_red(judge(build_capped("lost"), CAPPED, "gradients", **declared)) == {"gradients.dbias"}


def attend_in_window(number: Any, wrong: int = 0) -> Callable[..., Any]:
    """Build a kernel that takes `number` for an open side of its window, or a length if `number` is "length"."""

    def attention(q: Any, k: Any, v: Any, *, window: tuple[int, int] | None = None) -> Any:
        if window is not None and number == "length":
            i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
            return naive.attention(q, k, v, mask=((i - j <= window[0] - wrong) & (j - i <= window[1]))[None, None])
        if window is not None and number is not None:
            # A window of (left, None), as a kernel without open sides would read it, is an error.
            window = tuple(None if x < 0 else x - wrong for x in window)  # type: ignore[assignment] # None is no int
        return naive.attention(q, k, v, window=window)

    return attention


@pytest.mark.parametrize("number", [-1, "length"])
@pytest.mark.parametrize("mask", ["window-linf-r3", "window-l5-rinf"])
def test_open_sides_are_passed_as_declared(number: Any, mask: str) -> None:
    case = f"{SHAPE}/{mask}/normal/s0"
    kernel = attend_in_window(number)
    assert not list_red(judge(kernel, case, "forward", "gradients", open_sides=number))
    assert judge(kernel, case)["forward.all"].verdict == ERROR
    other = {-1: "length", "length": -1}[number]
    if number == "length":
        assert list_red(judge(kernel, case, open_sides=other))
    shown = f'"{number}"' if isinstance(number, str) else number
    assert list_named(kernel, open_sides=number) == [f"open_sides={shown}"]
    if mask == "window-l5-rinf":
        assert "forward.out" in list_red(judge(attend_in_window(number, wrong=1), case, open_sides=number))


def attend_with_padding(negative: str) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any, *, segment_ids: Any = None) -> Any:
        mask = None
        if segment_ids is not None and negative == "padding":
            mask = (segment_ids[0] >= 0)[:, None, :, None] & (segment_ids[1] >= 0)[:, None, None, :]
        if segment_ids is not None and negative == "seen":  # padding sees all of its row
            segment_ids = [jnp.where(ids < 0, segment_ids[1][:, :1], ids) for ids in segment_ids]
        return naive.attention(q, k, v, mask=mask, segment_ids=segment_ids)

    return attention


WILD, PADDED = (f"train/f32/B2.T16.S24.N2.K1.H16.V16/full/{ids}/normal/s0" for ids in ("segwild", "segpad"))


def test_negative_ids_are_padding_only_as_declared() -> None:
    kernel = attend_with_padding("padding")
    assert list_red(judge(kernel, WILD, "forward"))
    for case in (WILD, PADDED):
        assert not list_red(judge(kernel, case, "forward", "gradients", negative_ids="padding"))
    assert list_red(judge(attend_with_padding("seen"), PADDED, "forward", negative_ids="padding"))
    # A kernel for which -1 is an id like any other lets padding attend to padding, in rows that it declares zero.
    like_others = attend_with_padding("ids")
    assert list_red(judge(like_others, PADDED, "gradients", negative_ids="padding", empty_rows="zero"))
    assert list_named(kernel, negative_ids="padding") == ['negative_ids="padding"']


def spoil_with_empty(q: Any, k: Any, v: Any, *, cu_q_lens: Any, cu_kv_lens: Any, num_seqs: Any) -> Any:
    """Attend within packed sequences; the result is NaN if a sequence has no queries or no keys."""
    used = jnp.arange(len(cu_q_lens) - 1) < num_seqs[0]
    empty = (used & ((jnp.diff(cu_q_lens) == 0) | (jnp.diff(cu_kv_lens) == 0))).any()
    found = serving_attention.packed(q, k, v, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens, num_seqs=num_seqs)
    return jnp.where(empty, jnp.nan, found)


def test_packed_sequences_that_are_never_empty_are_declared() -> None:
    empty, full = (f"train/f32/B3.T10.S10.N2.K1.H16.V16/lengths-10-{n}-6/packed-q10-{n}-5/normal/s0" for n in (0, 4))
    assert list_red(judge(spoil_with_empty, empty))
    declined = build_implementation(declare(empty_sequences=False)(spoil_with_empty), "kernel")
    assert "a sequence has no queries" in str(declined.supports(parse_case_id(empty)))
    assert not list_red(judge(spoil_with_empty, full, "forward", "gradients", empty_sequences=False))
    assert list_declarations(declined) == ["empty_sequences=False"]

    def doubled(q: Any, k: Any, v: Any, *, cu_q_lens: Any, cu_kv_lens: Any, num_seqs: Any) -> Any:
        return 2 * spoil_with_empty(q, k, v, cu_q_lens=cu_q_lens, cu_kv_lens=cu_kv_lens, num_seqs=num_seqs)

    assert list_red(judge(doubled, full, empty_sequences=False))


def build_base_two(wrong: float = 1.0) -> Callable[..., Any]:
    """Build a kernel that rounds `q * scale * log2(e)`, times a factor that is 1 if it is right."""

    def attention(q: Any, k: Any, v: Any, *, save_residuals: bool = False) -> Any:
        factor = wrong * q.shape[-1] ** -0.5 / jnp.log(2.0)
        scaled = (q.astype(jnp.float32) * factor).astype(q.dtype)
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        x = jnp.einsum("btnh,bsnh->bnts", scaled, k, precision="highest", preferred_element_type=jnp.float32)
        top = jax.lax.stop_gradient(x.max(axis=-1, keepdims=True))
        weights = jnp.exp2(x - top)
        total = weights.sum(axis=-1, keepdims=True)
        p = (weights / total).astype(q.dtype)
        out = jnp.einsum("bnts,bsnv->btnv", p, v, precision="highest", preferred_element_type=jnp.float32)
        out = out.astype(q.dtype)
        return (out, {"logsumexp": (top + jnp.log2(total))[..., 0] * jnp.log(2.0)}) if save_residuals else out

    return attention


def test_a_scale_for_base_two_rounds_although_the_scale_is_a_power_of_two() -> None:
    case, checks = "train/bf16/B1.T16.S64.N2.K2.H64.V64/full/large/s0", ("residuals", "gradients", "gradients_lse")
    assert list_red(judge(build_base_two(), case, *checks, scaled_q=True)) == {"residuals.logsumexp"}
    assert not list_red(judge(build_base_two(), case, *checks, scaled_q="base2"))
    assert list_named(build_base_two(), scaled_q="base2") == ['scaled_q="base2"']
    assert list_red(judge(build_base_two(1.1), case, *checks, scaled_q="base2"))


def attend_to_chosen(topk_more: int = 0, keys_more: int = 0) -> Callable[..., Any]:
    """Build a kernel with decode lengths and MoBA; it is wrong if it chooses or sees more than it should."""

    def attention(q: Any, k: Any, v: Any, *, kv_lengths: Any = None, moba: tuple[int, int] | None = None) -> Any:
        keys = k.shape[1]
        mask = jnp.ones((1, 1, q.shape[1], keys), bool)
        if kv_lengths is not None:
            assert kv_lengths.dtype == jnp.int32
            mask = jnp.arange(keys) < (kv_lengths + keys_more)[:, None, None, None]
        if moba is not None:
            chunk, topk = moba
            of_key, of_query = jnp.arange(keys) // chunk, jnp.arange(q.shape[1])[:, None] // chunk
            chunks = jnp.arange(-(-keys // chunk))
            share = (of_key == chunks[:, None]) / (of_key == chunks[:, None]).sum(axis=1, keepdims=True)
            means = jnp.einsum("cs,bskh->bckh", share, k.astype(jnp.float32), precision="highest")
            means = jnp.repeat(means, q.shape[2] // k.shape[2], axis=2)
            gates = jnp.einsum("btnh,bcnh->bntc", q.astype(jnp.float32), means, precision="highest")
            gates = jnp.where(chunks == of_query, jnp.inf, jnp.where(chunks > of_query, -jnp.inf, gates))
            rank = jnp.argsort(jnp.argsort(-gates, axis=-1, stable=True), axis=-1, stable=True)
            chosen = (rank < topk + topk_more) & (chunks <= of_query)
            mask = mask & chosen[..., of_key] & (jnp.arange(keys) <= jnp.arange(q.shape[1])[:, None])
        return naive.attention(q, k, v, mask=mask)

    return attention


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("decode/f32/B2.T1.S24.N2.K1.H16.V16/lengths-7-20/normal/s0", {"keys_more": 1}),
        ("train/f32/B1.T24.S24.N2.K1.H16.V16/moba-4-2/normal/s0", {"topk_more": 1}),
    ],
    ids=["lengths", "moba"],
)
def test_decode_lengths_and_moba_reach_a_plain_function(case: str, wrong: dict[str, int]) -> None:
    found = judge(attend_to_chosen(), case, "forward", "gradients", "poison")
    assert found["forward.out"].verdict == PASS
    assert not list_red(found)
    assert "forward.out" in list_red(judge(attend_to_chosen(**wrong), case))
    assert "mask" in str(build_implementation(attend, "lacks").supports(parse_case_id(case))) or "moba" in case
    assert build_implementation(attend, "lacks").supports(parse_case_id(case)) is not None


def sum_in_any_order(error: float) -> Callable[..., Any]:
    """Build a kernel whose dq differs from call to call, by up to `error` of itself, as with atomic additions."""
    calls = itertools.count(1)

    @jax.custom_vjp
    def perturb(q: Any) -> Any:
        return q

    def draw(dq: Any) -> Any:
        return np.random.default_rng(next(calls)).uniform(-error, error, dq.shape).astype(np.float32)

    def pull_back(_: None, dq: Any) -> tuple[Any]:
        return (dq * (1 + jax.pure_callback(draw, jax.ShapeDtypeStruct(dq.shape, jnp.float32), dq)),)

    perturb.defvjp(lambda q: (q, None), pull_back)
    return lambda q, k, v: naive.attention(perturb(q), k, v)


def test_gradients_may_differ_in_their_last_bits_only_as_declared() -> None:
    checks, laws = ("independence", "linearity", "gradients"), {"independence.dq.first", "linearity.dq.scaled"}
    kernel = sum_in_any_order(2.0**-23)
    # The cause is named: the same call gives other numbers. Nothing else is blamed.
    undeclared = judge(kernel, FULL, *checks)
    assert set(list_red(undeclared)) == {
        "independence.dq.repeated",
        "linearity.dq.repeated",
        "linearity.dq.repeated.tiny",
    }
    assert all("the same call gives other numbers" in undeclared[name].reason for name in list_red(undeclared))
    found = judge(kernel, FULL, *checks, unordered_sums=("dq",))
    assert not list_red(found)
    assert {found[name].verdict for name in laws} == {PASS}
    assert list_named(kernel, unordered_sums=("dq",)) == ['unordered_sums=("dq",)']
    assert list_red(judge(sum_in_any_order(0.01), FULL, *checks, unordered_sums=("dq",))) >= laws
    with pytest.raises(ValueError, match="unordered_sums"):
        declare(unordered_sums=("q",))
