"""The automatic choice of a kernel, its reason, and that every argument reaches the chosen kernel."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.case import Case
from cases.case_id import parse_case_id
from cases.masks import Causal, Dense, Full, Indexer, Lengths, Mask
from cases.moba_mask import Moba
from cases.operand_values import draw_problem
from conformance.checks import CHECKS_BY_NAME
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls import auto
from impls.auto import CANDIDATES, Route
from impls.contract.implementation import Implementation
from reports.records import PASS, RED, UNSUPPORTED

FORCED = {impl.name: impl for impl in auto.IMPLEMENTATIONS if impl.name != "auto"}


def shapes(case: Case) -> dict[str, Any]:
    """Make abstract operands: choosing a kernel computes nothing."""
    problem = draw_problem(case)
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (problem.q, problem.k, problem.v))
    options = {name: getattr(problem, name) for name in ("segment_ids", "soft_cap", "sinks", "bias", "scale")}
    return {"q": q, "k": k, "v": v, "mask": problem.mask, "options": options}


PLAIN = "train/bf16/B1.T128.S128.N2.K2.H64.V64/causal/normal/s0"


@pytest.mark.parametrize(
    ("case_id", "platform", "kernel"),
    [
        (PLAIN, "cpu", "dot_product"),
        (PLAIN, "tpu", "splash_tpu"),
        (PLAIN, "gpu", "flash_gpu"),
        (PLAIN.replace("128", "2048"), "cpu", "block_flash"),
        ("decode/bf16/B1.T1.S200.N2.K2.H64.V64/full/normal/s0", "tpu", "dot_product"),
        (PLAIN.replace("causal", "moba-32-2"), "tpu", "moba_tpu"),
        (PLAIN.replace("causal", "moba-32-2/bias"), "tpu", "moba"),
        (PLAIN.replace("causal", "moba-32-2"), "gpu", "moba"),
        ("prefill/bf16/B1.T64.S320.N2.K2.H64.V64/causal-o256/normal/s0", "tpu", "splash_tpu"),
    ],
)
def test_the_kernel_suits_platform_phase_and_lengths(case_id: str, platform: str, kernel: str) -> None:
    found, candidate = auto.find_route(**shapes(parse_case_id(case_id)), platform=platform)
    assert found.kernel == candidate.kernel.name == kernel
    assert platform in found.reason


def test_decode_goes_to_kernels_without_gradients_only_where_the_caller_says_so() -> None:
    case = parse_case_id("decode/bf16/B1.T1.S200.N2.K2.H64.V64/lengths-70/normal/s0")
    for platform, kernel in (("cpu", "ragged"), ("tpu", "ragged_tpu"), ("gpu", "ragged_gpu")):
        assert auto.find_route(**shapes(case), platform=platform, phase="decode")[0].kernel == kernel
        guessed, _ = auto.find_route(**shapes(case), platform=platform)
        assert guessed.kernel == "dot_product"
        assert "no gradients" in dict(guessed.passed_over)[kernel]


@pytest.mark.parametrize(
    ("platform", "change", "kernel", "lacking"),
    [
        (
            "tpu",
            {"bias": "bias"},
            "dot_product",
            ("splash_tpu", "does not support bias (additive bias): it takes no bias"),
        ),
        ("tpu", {"dtype": "f16"}, "dot_product", ("splash_tpu", "does not support f16")),
        ("gpu", {"mask": "indexer-d40"}, "dot_product", ("flash_gpu", "does not support indexer")),
    ],
)
def test_a_fallback_says_what_was_passed_over_and_why(
    platform: str, change: dict[str, Any], kernel: str, lacking: tuple[str, str]
) -> None:
    case = dataclasses.replace(parse_case_id(PLAIN), **change)
    found, _ = auto.find_route(**shapes(case), platform=platform)
    assert found.kernel == kernel
    reasons = dict(found.passed_over)
    assert reasons[lacking[0]].startswith(lacking[1])
    assert f"{lacking[0]} {reasons[lacking[0]]}" in str(found)
    with pytest.raises(NotImplementedError, match=lacking[0]):
        auto.find_route(**shapes(case), platform=platform, fall_back=False)


def test_a_kernel_asked_for_by_name_is_taken_or_refuses() -> None:
    found, _ = auto.find_route(**shapes(parse_case_id(PLAIN)), kernel="block_flash")
    assert found == Route("block_flash", "requested by name")
    biased = shapes(dataclasses.replace(parse_case_id(PLAIN), bias="bias"))
    with pytest.raises(NotImplementedError, match="splash_tpu does not support bias"):
        auto.find_route(**biased, kernel="splash_tpu")
    with pytest.raises(
        ValueError, match=r"kernel must be one of .*splash_tpu, flash_gpu, dot_product, block_flash, got 'x'"
    ):
        auto.find_route(**biased, kernel="x")
    with pytest.raises(ValueError, match="phase must be one of"):
        auto.find_route(**biased, phase="training")  # type: ignore[arg-type]  # on purpose


def test_a_call_that_no_kernel_supports_says_what_each_lacks() -> None:
    only = tuple(c for c in CANDIDATES if c.kernel.name in ("splash_tpu", "flash_gpu"))
    with pytest.raises(
        NotImplementedError, match=r"no kernel supports this call: splash_tpu is for tpu.*; flash_gpu is"
    ):
        auto.find_route(**shapes(parse_case_id(PLAIN)), platform="cpu", candidates=only)


def test_the_route_is_logged_and_handed_out(caplog: pytest.LogCaptureFixture) -> None:
    q = jnp.ones((1, 4, 1, 8))
    routes: list[Route] = []
    with caplog.at_level(logging.INFO, logger="impls.auto"):
        auto.attention(q, q, q, on_route=routes.append)
    assert routes[0].kernel == "dot_product"
    assert "dot_product: first that suits train on cpu with 16 logits" in caplog.text


# Everything that a call can have, unlike in value and kind.
EVERYTHING = parse_case_id("train/f32/B2.T8.S8.N4.K2.H4.V6/causal/seg/softcap5/sinks/bias/scale0.3/normal/s1")
MASKS: tuple[Mask, ...] = (
    Full(),
    Causal(2) & Lengths((3, 8)),
    Dense(np.tri(8, dtype=bool)),
    Indexer(np.ones((2, 1, 8, 8), bool)),
)


def test_a_quantised_cache_goes_to_the_kernel_that_takes_one() -> None:
    case = parse_case_id("decode/bf16/B2.T1.S20.N2.K2.H8.V8/lengths-7-20/kvint8-token/normal/s0")
    problem = draw_problem(case)
    asked: dict[str, Any] = {"mask": problem.mask, "options": {"kv_scales": problem.kv_scales}}
    found, _ = auto.find_route(problem.q, problem.k, problem.v, **asked)
    assert found.kernel == "quantized_kv"
    with pytest.raises(NotImplementedError, match="block_flash does not support kv_int8"):
        auto.find_route(problem.q, problem.k, problem.v, **asked, kernel="block_flash")
    plain = draw_problem(parse_case_id(PLAIN))
    with pytest.raises(NotImplementedError, match="only quantised caches"):
        auto.attention(*map(jnp.asarray, (plain.q, plain.k, plain.v)), kernel="quantized_kv")
    assert red(AUTO, "forward", case) == []


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.kernel.name)
@pytest.mark.parametrize("save_residuals", [False, True])
def test_every_operand_reaches_every_kernel_as_it_is(candidate: auto.Candidate, save_residuals: bool) -> None:
    moba: list[Mask] = [Moba(4, 2)] if "moba" in candidate.kernel.offers else []
    taken = moba or [mask for mask in MASKS if candidate.lacks(mask.features) is None]
    assert taken
    for mask in taken:
        _arrives(candidate, mask, save_residuals)


def _arrives(candidate: auto.Candidate, mask: Mask, save_residuals: bool) -> None:
    got: dict[str, Any] = {}

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> str:
        got.update(options, q=q, k=k, v=v)
        return "what the kernel returns"

    double = dataclasses.replace(candidate, kernel=dataclasses.replace(candidate.kernel, call=kernel, unsupported={}))
    problem = dataclasses.replace(draw_problem(EVERYTHING), mask=mask)
    sent = {
        name: getattr(problem, name) for name in ("q", "k", "v", "segment_ids", "soft_cap", "sinks", "bias", "scale")
    }
    sent |= {"mask": mask, "save_residuals": save_residuals}
    static, arrays = candidate.kernel.lower_mask(mask, 2, 4, 8, 8)
    expected = {name: x for name, x in sent.items() if name != "mask"} | dict(static) | dict(arrays)
    found = auto.attention(**sent, kernel=candidate.kernel.name, candidates=(double,))
    assert found == "what the kernel returns"
    assert set(got) == set(expected)
    assert all(np.array_equal(got[name], expected[name]) for name in arrays if name != "mask")
    assert all(got[name] is expected[name] for name in sent if name != "mask")
    assert got["mask"] == expected["mask"]


AUTO = next(impl for impl in auto.IMPLEMENTATIONS if impl.name == "auto")


def red(impl: Implementation, check: str, case: Case | None = None) -> list[Any]:
    """What the gate has against the implementation in this check, over all its cases or on one."""
    checks = (CHECKS_BY_NAME[check],)
    chosen = (
        run_plan.plan_run([impl], level="quick", checks=checks)
        if case is None
        else run_plan.plan_case(impl, case, checks)
    )
    jobs = chosen.jobs
    found = [record for job in jobs for record in Runner(Settings()).judge(job)]
    assert found
    assert {record.verdict for record in found} <= {PASS, UNSUPPORTED, *RED}
    return [record for record in found if record.verdict in RED]


# By day one route. `test_every_operand_reaches_every_kernel_as_it_is` has all of them, without computing anything.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "auto_ragged")) for name in FORCED]
)
def test_every_feature_arrives_by_every_route(name: str) -> None:
    assert red(FORCED[name], "arguments") == []


LACKING = [name for name, impl in FORCED.items() if impl.unsupported]


@pytest.mark.parametrize("name", ["auto_flash_gpu", "auto_splash_tpu"])
def test_what_a_route_lacks_is_refused(name: str) -> None:
    assert name in LACKING
    assert red(FORCED[name], "refusals") == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", LACKING)
def test_what_any_route_lacks_is_refused(name: str) -> None:
    assert red(FORCED[name], "refusals") == []
