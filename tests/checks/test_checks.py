"""Tests that each check passes a correct implementation and catches a planted bug."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cases.case_id import parse_case_id
from cases.decoding_cases import select_decoding_cases
from conformance import declare
from conformance.check_api.scopes import COMPILED, DECLINED, GRID, INDEXED, INTERPRETED
from conformance.check_api.subchecks import Subchecks
from conformance.checks import CHECKS, CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.execution.plain_functions import build_implementation
from conformance.judging import run_plan
from conformance.judging.job import Job
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.implementation import Accelerator, Implementation
from reports.records import ERROR, FAIL, PASS, RED, UNJUDGED, UNSUPPORTED, Record
from tests.kernels import naive

CAUSAL = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/normal/s0"
BIASED = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/bias/normal/s0"
CAPPED = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/softcap30/normal/s0"
SINKS = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/sinks/normal/s0"
SEVERAL = "train/f32/B3.T24.S24.N2.K2.H16.V16/causal/normal/s1"
DROPPED = "train/f32/B2.T24.S32.N2.K1.H16.V32/causal-o8/sinks/dropout0.25/normal/s1"
SHORT = "train/f32/B1.T16.S16.N2.K2.H16.V16/lengths-9/normal/s0"
PADDED = "train/f32/B1.T32.S32.N2.K2.H16.V16/causal/segpad/normal/s0"

ENSEMBLE = "train/bf16/B1.T128.S512.N8.K1.H64.V64/full/normal/s0"

FRONT = "train/f32/B1.T16.S16.N2.K2.H16.V16/causal/front-rms-half/normal/s0"
DECODE = "decode/f32/B3.T1.S40.N4.K2.H16.V24/lengths-0-17-40/sinks/normal/s0"
DECODED = next(case.id for case in select_decoding_cases() if "window" in case.mask)

CASE_OF = {"poison": SHORT, "arguments": CAPPED, "limits": SINKS, "ensemble": ENSEMBLE}
CASE_OF |= {"calls": BIASED, "parts": DECODE, "decoding": DECODED, "front_end": FRONT, "forms": CAPPED}
CASE_OF |= {"dropout": DROPPED, "batch_invariance": SEVERAL}
# Implementations for checks of declarations that only some make: linear memory, mergeable parts.
CLAIMS = {"memory": "block_flash", "parts": "ragged"}


def judge(implementation: Implementation | Callable[..., Any], case: str, check: str) -> list[Record]:
    """Return the records of one check on one case, without rejudging failures."""
    if not isinstance(implementation, Implementation):
        implementation = build_implementation(implementation, "kernel")
    planned = run_plan.plan_case(implementation, parse_case_id(case), [CHECKS_BY_NAME[check]])
    return [record for record in Runner(Settings(), confirmed=0).run(planned.jobs) if record.check == check]


def verdicts(found: list[Record]) -> dict[str, str]:
    return {record.observable: record.verdict for record in found}


def with_out(change: Callable[..., Any], **declared: Any) -> Callable[..., Any]:
    """Build the correct kernel with a changed `out`."""

    @declare(**{"behind_mask": "finite", **declared})
    def kernel(
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        mask: Any = None,
        segment_ids: Any = None,
        soft_cap: Any = None,
        sinks: Any = None,
        scale: Any = None,
        bias: Any = None,
        save_residuals: bool = False,
    ) -> Any:
        options = {"causal": causal, "mask": mask, "segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks}
        out, residuals = naive.attention(q, k, v, **options, scale=scale, bias=bias, save_residuals=True)
        out = change(out, q, k, v, options)
        return (out, residuals) if save_residuals else out

    return kernel


def with_lse(change: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """Build the correct kernel with a changed `logsumexp`."""

    @declare(behind_mask="finite")
    def kernel(q: Any, k: Any, v: Any, *, causal: bool = False, save_residuals: Any = False) -> Any:
        out, residuals = naive.attention(q, k, v, causal=causal, save_residuals=True)
        residuals["logsumexp"] = change(residuals["logsumexp"])
        return (out, residuals) if save_residuals else out

    return kernel


# Checks of accelerator kernels and of indexers have their own test modules.
_PORTABLE = [check.name for check in CHECKS if check.scope not in (DECLINED, INTERPRETED, COMPILED, INDEXED)]


# Checks that make hundreds of calls or compile many programs. By day, `.ci/run` runs them on the same kernel.
_LONG = ("calls", "errors", "transforms")


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=pytest.mark.nightly if check in _LONG else ()) for check in _PORTABLE]
)
def test_a_correct_implementation_passes(check: str) -> None:
    found = judge(
        implementation_registry.find_implementation(CLAIMS.get(check, "dot_product")), CASE_OF.get(check, CAUSAL), check
    )
    assert found
    # A traced number may be refused, and our implementation refuses it.
    refused = [record for record in found if check == "forms" and record.observable.endswith("_traced")]
    # A branch that only a variant or another platform takes is listed.
    listed = [record for record in found if check == "branches" and record.verdict == UNJUDGED]
    assert {record.verdict for record in found if record not in (*refused, *listed)} == {PASS}
    assert {record.verdict for record in refused} == ({UNSUPPORTED} if check == "forms" else set())


def test_what_nobody_can_ask_for_is_not_taken() -> None:
    def takes(q: Any, k: Any, v: Any, *, mask: Any = None, sinks: Any = None, **options: Any) -> jax.Array:
        return naive.attention(q, k, v)

    def lacks(q: Any, k: Any, v: Any, *, mask: Any = None) -> jax.Array:
        return naive.attention(q, k, v, mask=mask)

    by_signature: dict[str, Any] = {"unsupported": {"sinks": "none"}, "refuses_by_signature": True}
    (found,) = judge(Implementation(name="takes", call=takes, **by_signature), SINKS, "refusals")
    assert (found.verdict, "accepted" in found.reason) == (FAIL, True)
    assert judge(Implementation(name="lacks", call=lacks, **by_signature), SINKS, "refusals") == []


@pytest.mark.parametrize("interpreted", [False, True])
def test_no_signature_refuses_a_size(interpreted: bool) -> None:
    def attend(q: Any, k: Any, v: Any, *, strict: bool, **options: Any) -> Any:
        del options
        if q.shape[1] == 16:
            return naive.attention(q, k, v)
        if strict:
            raise ValueError("16 queries only")
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)

    def judge_size(*, strict: bool) -> dict[str, str]:
        kernel = Implementation(
            name="short",
            call=functools.partial(attend, strict=strict),
            supports_case=lambda case: None if case.q_length == 16 else "16 queries only",
            accelerator=Accelerator(platform="gpu", interpreted=interpreted),
            refuses_by_signature=True,
        )
        return verdicts(judge(kernel, "train/f32/B1.T20.S20.N2.K2.H16.V16/full/normal/s0", "refusals"))

    assert judge_size(strict=True) == {"refusal": PASS}
    # A compiler may refuse what an interpreter takes.
    assert judge_size(strict=False) == {"refusal": UNJUDGED if interpreted else FAIL}


def test_a_refusal_passes() -> None:
    def refuses(q: Any, k: Any, v: Any, *, mask: Any, sinks: Any = None, **options: Any) -> None:
        raise NotImplementedError("sinks are not supported")

    honest = Implementation(name="honest", call=refuses, unsupported={"sinks": "never written"})
    assert verdicts(judge(honest, SINKS, "refusals")) == {"refusal": PASS}


def doubled_gradient(out: Any, *_: Any) -> Any:
    return out + (out - jax.lax.stop_gradient(out))


def last_row_without_gradient(out: Any, *_: Any) -> Any:
    return out.at[:, -1].set(jax.lax.stop_gradient(out[:, -1]))


def last_head_without_gradient(out: Any, *_: Any) -> Any:
    return out.at[:, :, -1].set(jax.lax.stop_gradient(out[:, :, -1]))


@jax.custom_vjp
def off_in_the_rule(out: Any) -> Any:
    return out


off_in_the_rule.defvjp(lambda out: (1.01 * out, None), lambda _, cotangent: (cotangent,))


def leak_from_empty_rows(out: Any, q: Any, k: Any, v: Any, options: Any) -> Any:
    """Return `out` unchanged, but with a gradient from empty rows to `v`."""
    ok = naive.build_mask(q, k, options["causal"], None, options["mask"], options["segment_ids"])
    empty = ~ok.any(axis=-1).transpose(0, 2, 1)[..., None]
    pulled = v.sum(axis=1, keepdims=True)
    return out + jnp.where(empty, pulled - jax.lax.stop_gradient(pulled), 0)


@pytest.mark.parametrize(
    ("check", "change", "declared", "caught"),
    [
        ("forward", lambda out, *_: 1.001 * out, {}, {"out"}),
        ("gradients", doubled_gradient, {}, {"dq", "dk", "dv"}),
        ("gradients_part", last_row_without_gradient, {}, {"dq.row", "dk.row", "dv.row"}),
        ("gradients_part", last_head_without_gradient, {}, {"dq.head", "dk.head", "dv.head"}),
        ("gradients_part", leak_from_empty_rows, {"empty_rows": "zero"}, {"dv.empty"}),
        ("primal", lambda out, *_: off_in_the_rule(out), {}, {"out"}),
        ("poison", lambda out, *_: out, {"behind_mask": "any"}, {"out.nan", "out.inf"}),
    ],
)
def test_a_planted_bug_is_caught(
    check: str, change: Callable[..., Any], declared: dict[str, Any], caught: set[str]
) -> None:
    case = PADDED if "dv.empty" in caught else CASE_OF.get(check, CAUSAL)
    found = verdicts(judge(with_out(change, **declared), case, check))
    assert caught <= {observable for observable, verdict in found.items() if verdict == FAIL}


@pytest.mark.parametrize("check", ["forward", "residuals"])
def test_a_bug_in_the_rule_of_a_custom_vjp_is_invisible_without_differentiating(check: str) -> None:
    assert not any(r.verdict in RED for r in judge(with_out(lambda out, *_: off_in_the_rule(out)), CAUSAL, check))


def test_operands_on_the_second_device_are_not_those_of_the_first() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        out = naive.attention(q, k, v)
        is_elsewhere = not isinstance(q, jax.core.Tracer) and jax.devices()[0] not in q.devices()
        return jnp.zeros_like(out) if is_elsewhere else out

    plain = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/normal/s0"
    found = verdicts(judge(attend, plain, "sharding"))
    assert [name for name, verdict in found.items() if verdict in RED] == ["out.second"]


def test_an_ignored_operand_is_caught() -> None:
    def ignores(q: Any, k: Any, v: Any, *, causal: bool = False, **ignored: Any) -> Any:
        return naive.attention(q, k, v, causal=causal)

    assert verdicts(judge(ignores, CAPPED, "arguments")) == {"effect_of_soft_cap": FAIL}


def test_a_feature_accepted_though_declared_unsupported_is_caught() -> None:
    def accepts(q: Any, k: Any, v: Any, *, mask: Any, sinks: Any = None, **options: Any) -> Any:
        return naive.attention(q, k, v)

    silent = Implementation(name="silent", call=accepts, unsupported={"sinks": "never written"})
    (found,) = judge(silent, SINKS, "refusals")
    assert found.verdict == FAIL
    assert "never written" in found.reason
    assert "the call is accepted" in found.reason


def test_a_wrong_operand_that_is_accepted_is_caught() -> None:
    def accepts(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return q

    found = judge(Implementation(name="careless", call=accepts, validates=True), CAUSAL, "errors")
    passed = {record.observable for record in found if record.verdict != FAIL}
    # Without queries or keys the result has the right shape, and the second derivative of this is finite.
    assert passed == {"no_queries", "no_keys", "second_derivatives"}
    assert all("is accepted" in record.reason for record in found if record.observable not in passed)


def test_an_error_that_does_not_name_the_operand_is_caught() -> None:
    def refuses(q: Any, k: Any, v: Any, **options: Any) -> None:
        raise ValueError("no")

    found = judge(Implementation(name="terse", call=refuses, validates=True), CAUSAL, "errors")
    assert {record.verdict for record in found} == {FAIL}
    *operands, derivative = found
    assert all("does not name" in record.reason for record in operands)
    assert "a grad of grad raises ValueError" in derivative.reason


@pytest.mark.parametrize(
    "change",
    [lambda lse: lse / jnp.log(2.0), lambda lse: lse.astype(jnp.bfloat16), lambda lse: lse[..., None]],
    ids=["log2", "bf16", "shape"],
)
def test_a_wrong_logsumexp_is_caught(change: Callable[[jax.Array], jax.Array]) -> None:
    found = verdicts(judge(with_lse(change), CAUSAL, "residuals"))
    assert found == {"out": PASS, "logsumexp": FAIL, "max_logits": PASS}


def test_a_logsumexp_without_gradient_fails_unless_declared() -> None:
    silent = with_lse(jax.lax.stop_gradient)
    assert FAIL in verdicts(judge(silent, CAUSAL, "gradients_lse")).values()
    declared = declare(behind_mask="finite", differentiable_residuals=False)(silent)
    (found,) = judge(declared, CAUSAL, "gradients_lse")
    assert found.verdict == UNSUPPORTED
    assert found.reason == "logsumexp is declared not differentiable"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out, *_: out.astype(jnp.bfloat16), "dtype is bfloat16, must be that of q, float32"),
        (lambda out, *_: out[..., :-1], "shape is (1, 16, 2, 15), must be (1, 16, 2, 16)"),
        (lambda out, *_: jnp.full_like(out, jnp.nan), "exceeds"),
    ],
)
def test_a_result_of_the_wrong_kind_fails_and_says_how(change: Callable[..., Any], reason: str) -> None:
    (found,) = judge(with_out(change), CAUSAL, "forward")
    assert found.verdict == FAIL
    assert reason in found.reason


@pytest.mark.parametrize("check", ["gradients", "gradients_lse", "linearity", "independence"])
def test_what_is_computed_of_a_result_of_the_wrong_shape_says_so(check: str) -> None:
    def padded(q: Any, k: Any, v: Any, *, causal: bool = False, save_residuals: bool = False) -> Any:
        q, k, v = (jnp.pad(x, ((0, 0), (0, 8), (0, 0), (0, 0))) for x in (q, k, v))
        return naive.attention(q, k, v, causal=causal, save_residuals=save_residuals)

    found = judge(padded, CAUSAL, check)
    told = "out must be an array [1, 16, 2, 16], and the call returned an array float32[1, 24, 2, 16]"
    assert [(one.verdict, one.reason) for one in found] == [(ERROR, told)]


@pytest.mark.parametrize("error", [RuntimeError("no such block\nmore"), SystemExit(3), KeyError("x")])
def test_what_an_implementation_raises_becomes_an_error(error: BaseException) -> None:
    def raises(q: Any, k: Any, v: Any, *, causal: bool = False) -> None:
        raise error

    (found,) = judge(raises, CAUSAL, "forward")
    assert found.verdict == ERROR
    assert type(error).__name__ in found.reason
    assert "\n" not in found.reason


def test_cases_that_differ_in_values_alone_are_judged_by_the_same_programs() -> None:
    traced: list[tuple[int, ...]] = []

    def traces(out: Any, *_: Any) -> Any:
        traced.append(out.shape)
        return out

    kernel = build_implementation(with_out(traces), "kernel")
    checks = tuple(check for check in CHECKS if check.scope is GRID)
    runner = Runner(Settings())

    # Subchecks that need no compilation may differ between cases.
    once = Subchecks(pullbacks=("plain",), cotangents=("row",), laws=("linearity",))
    again = dataclasses.replace(once, cotangents=("head",), laws=("independence",))

    def judge_with(distribution: str, selection: Subchecks) -> list[Record]:
        case = parse_case_id(CAPPED.replace("/full/", "/lengths-9/").replace("/normal/", f"/{distribution}/"))
        return runner.judge(Job(kernel, case, checks, selection))

    expected = {PASS, UNSUPPORTED}  # keys behind the mask are declared to be finite
    assert {record.verdict for record in judge_with("normal", once)} == expected
    programs = len(traced)
    assert programs
    for distribution, selection in zip(
        ("knee", "heavy", "cancel", "ties", "small"), itertools.cycle((again, once)), strict=False
    ):
        assert {record.verdict for record in judge_with(distribution, selection)} == expected
    assert len(traced) == programs


def test_every_check_has_a_description() -> None:
    assert all(check.about for check in CHECKS)
    assert len(CHECKS_BY_NAME) == len(CHECKS)


def test_partial_application_keeps_the_declaration() -> None:
    declared = functools.partial(with_lse(jax.lax.stop_gradient))
    assert build_implementation(declared, "kernel").behind_mask == "finite"
