"""Functions over latents, in pages and dense: recognition, calls and judgements."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cases.case_id import parse_case_id
from cases.operand_values import draw_problem
from conformance import declare
from conformance.execution import implementation_registry, stored_calls
from conformance.execution.executor import Executor
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.execution.stored_calls import LatentCall
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.contract.implementation import Implementation
from reports.records import FAIL, PASS, RED, UNSUPPORTED
from tests.execution.test_plain_functions import conforms, judge
from tests.kernels import latent_attention, naive
from tests.test_readme import ROOT, blocks

MIXED = "prefill/f32/B4.T9.S37.N4.K1.H24.V16/own-linf-37-16-17-8/scale0.3/latentshared16-q9-1-1-8/normal/s0"
WINDOW = "prefill/f32/B4.T9.S37.N4.K1.H24.V16/own-l7-37-16-17-8/scale0.3/latent16-q9-1-1-8/normal/s0"
TRAIN = "train/f32/B2.T12.S15.N4.K1.H24.V16/causal-o3/scale0.3/latent/normal/s0"
CHECKS = ("forward", "residuals", "poison", "independence", "arguments")


def test_a_function_over_latents_in_pages_conforms() -> None:
    assert conforms(latent_attention.in_pages, MIXED, *CHECKS)


def test_a_function_over_dense_latents_conforms_with_gradients() -> None:
    assert conforms(
        latent_attention.dense, TRAIN, *CHECKS, "gradients", "gradients_lse", "differentiation", "linearity"
    )


def last_coordinates(q: Any, latent: Any, *, value_dim: int, scale: float, mask: Any = None) -> Any:
    return latent_attention.dense(q, jnp.roll(latent, value_dim, axis=-1), value_dim=value_dim, scale=scale, mask=mask)


def own_width(q: Any, latent: Any, *, value_dim: int, scale: float, mask: Any = None) -> Any:
    return latent_attention.dense(q, latent, value_dim=value_dim, scale=q.shape[-1] ** -0.5, mask=mask)


@pytest.mark.parametrize("wrong", [last_coordinates, own_width])
def test_a_wrong_function_does_not_conform(wrong: Any) -> None:
    assert {record.verdict for record in judge(wrong, TRAIN)} == {FAIL}


def test_values_that_pass_no_gradient_are_seen_by_the_gradient_of_the_latent_alone() -> None:
    def attention(q: Any, latent: Any, *, value_dim: int, scale: float, mask: Any = None) -> Any:
        k = latent[:, :, None]
        return naive.attention(q, k, jax.lax.stop_gradient(k[..., :value_dim]), scale=scale, mask=mask)

    found = {record.observable: record.verdict for record in judge(attention, TRAIN, "forward", "gradients")}
    assert found == {"out": PASS, "dq": PASS, "dk": FAIL}


def test_the_scale_is_always_told_and_the_depth_of_values() -> None:
    told: dict[str, Any] = {}

    def attention(q: Any, latent: Any, *, value_dim: int, scale: float, mask: Any = None) -> Any:
        told.update(value_dim=value_dim, scale=scale, shape=latent.shape)
        return latent_attention.dense(q, latent, value_dim=value_dim, scale=scale, mask=mask)

    executor = Executor(build_implementation(attention, "kernel"))
    for case in (TRAIN, TRAIN.replace("/scale0.3", "")):
        call, arrays = executor.bind(draw_problem(parse_case_id(case)))
        call(arrays)
        assert told == {"value_dim": 16, "scale": 0.3 if "scale" in case else 1 / math.sqrt(24), "shape": (2, 15, 24)}


def test_kinds_are_read_from_names() -> None:
    paged, dense = (
        build_implementation(latent_attention.in_pages, "paged"),
        build_implementation(latent_attention.dense, "dense"),
    )
    assert (paged.storage, dense.storage) == ("latent_pages", "latent")
    assert paged.gradients == frozenset()
    assert dense.gradients == {"dq", "dk", "dsinks"}
    assert paged.residuals == dense.residuals == {"logsumexp", "max_logits"}
    assert paged.supports(parse_case_id(WINDOW)) is None
    assert "latent" in (paged.supports(parse_case_id(TRAIN)) or "")
    assert "latent" in (dense.supports(parse_case_id(MIXED)) or "")
    assert "dense" in (dense.supports(parse_case_id(TRAIN.replace("/latent", ""))) or "")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("q, latent", "takes 'latent', as functions of latents do, but lacks 'value_dim' .* and 'scale'"),
        ("q, latent, *, value_dim", "lacks 'scale'"),
        ("q, latent, *, value_dim, scale, kv_lens", "needs the argument 'kv_lens'"),
        ("q, latent_pages, *, value_dim, scale, kv_lens, cu_q_lens", "lacks 'page_indices'"),
        ("q, latent_pages, *, value_dim, scale, page_indices, kv_lens, cu_q_lens, mask", "needs the argument 'mask'"),
        ("q, *, latent, value_dim, scale", "does not take q, latent: .* as its first two arguments"),
        ("q_nope, q_pe, latent_pages, *, page_indices", "as its second argument, after q"),
    ],
)
def test_what_is_missing_is_named(parameters: str, message: str) -> None:
    function = eval(f"lambda {parameters}: q")
    with pytest.raises(NotAnAttentionFunction, match=message):
        build_implementation(function, "kernel")


def test_an_operand_of_that_name_behind_others_means_nothing() -> None:
    def attention(q: Any, k: Any, v: Any, latent: Any = None) -> Any:
        return q

    assert build_implementation(attention, "kernel").storage is None


def test_an_implementation_says_how_it_takes_its_operands() -> None:
    made = Implementation(name="mine", call=latent_attention.dense, storage="latent")
    assert made.gradients == {"dq", "dk", "dsinks", "dbias", "dscore_table", "dlogit_scale"}
    assert "latent" in made.offers
    assert isinstance(stored_calls.lower_implementation(made).call, LatentCall)
    varied = stored_calls.lower_implementation(
        Implementation(name="mine", call=latent_attention.in_pages, storage="latent_pages")
    )
    assert isinstance(varied.call, stored_calls.StoredCall)
    assert stored_calls.lower_implementation(varied) is varied


def test_nothing_that_a_latent_has_no_form_of_is_called_right() -> None:
    found = judge(latent_attention.dense, TRAIN, "linearity", "sharding")
    assert not {record.verdict for record in found} & set(RED)
    shown = {(record.check, record.observable) for record in found if record.verdict == UNSUPPORTED}
    assert shown == {("sharding", "all")}
    seen = {record.observable for record in found}
    assert {"dq.scaled", "dk.scaled"} <= seen
    assert "out.scaled" not in seen  # of values alone, which it has not


def test_a_kernel_with_rank_and_rotary_part_apart_conforms_as_the_documents_wrap_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "how-to" / "latent.md").read_text()
    source = next(text for text in blocks(page, "python") if text.startswith("# mla.py"))
    (tmp_path / "mla.py").write_text(source)
    serving = ModuleType("my_kernels.serving")
    monkeypatch.setattr(serving, "mla_attention", latent_attention.mla_ragged_paged_attention, raising=False)
    monkeypatch.setitem(sys.modules, "my_kernels", ModuleType("my_kernels"))
    monkeypatch.setitem(sys.modules, "my_kernels.serving", serving)
    attention = implementation_registry.find_implementation(f"{tmp_path}/mla.py:attention")
    assert {"window", "soft_cap", "sinks"} & set(attention.unsupported) == {"soft_cap", "sinks"}
    found = Runner(Settings()).run(run_plan.plan_case(attention, parse_case_id(MIXED)).jobs)
    assert [record for record in found if record.verdict in RED] == []
    assert "out" in {record.observable for record in found if record.verdict == PASS}


def test_stale_latents_in_pages_must_not_leak() -> None:
    def leaks(
        q: Any,
        latent_pages: Any,
        *,
        value_dim: int,
        scale: float,
        kv_lens: Any,
        page_indices: Any,
        cu_q_lens: Any,
        num_seqs: Any,
    ) -> Any:
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        out = latent_attention.in_pages(q, latent_pages, value_dim=value_dim, scale=scale, **tables)
        return out + 0 * latent_pages.sum()

    assert {record.verdict for record in judge(leaks, MIXED)} == {FAIL}
    assert conforms(declare(behind_mask="finite")(leaks), MIXED)


@pytest.mark.parametrize("kernel", [latent_attention.writing, latent_attention.writing_whole])
def test_a_function_that_writes_latents_is_recognised(kernel: Any) -> None:
    made = build_implementation(kernel, "kernel")
    assert (made.storage, made.writes_pages) == ("latent_pages", True)
    assert made.residuals == {"logsumexp", "max_logits"}
    assert made.gradients == frozenset()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("q_nope, q_pe, c_kv, latent_pages, *, scale, kv_lens, page_indices, cu_q_lens", "lacks 'k_pe'"),
        ("q_nope, q_pe, c_kv, k_pe, latent_pages, *, kv_lens, page_indices, cu_q_lens", "lacks 'scale'"),
        ("x, latent, latent_pages, *, scale, kv_lens, page_indices, cu_q_lens", "lacks 'q'"),
    ],
)
def test_what_a_function_that_writes_latents_lacks_is_named(parameters: str, message: str) -> None:
    with pytest.raises(NotAnAttentionFunction, match=message):
        build_implementation(eval(f"lambda {parameters}: None"), "kernel")


def test_a_function_gets_the_parts_of_latents_by_name_and_in_any_order() -> None:
    seen: dict[str, Any] = {}

    def attention(
        latent_pages: Any,
        c_kv: Any,
        k_pe: Any,
        q_pe: Any,
        q_nope: Any,
        *,
        value_dim: int,
        scale: float,
        kv_lens: Any,
        page_indices: Any,
        cu_q_lens: Any,
        num_seqs: Any,
    ) -> Any:
        seen.update(value_dim=value_dim, q_nope=q_nope.shape, q_pe=q_pe.shape, c_kv=c_kv.shape, k_pe=k_pe.shape)
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        return latent_attention.writing(q_nope, q_pe, c_kv, k_pe, latent_pages, scale=scale, **tables)

    case = MIXED.replace("37-16-17-8", "37-32-17-8").replace("latentshared", "latent")
    found = {record.observable: record.verdict for record in judge(attention, case, "forward")}
    assert found == {"out": PASS, "latent_pages": PASS}
    total = seen["q_nope"][0]
    assert seen == {
        "value_dim": 16,
        **{"q_nope": (total, 4, 16), "q_pe": (total, 4, 8), "c_kv": (total, 16), "k_pe": (total, 8)},
    }


@pytest.mark.parametrize("obeys", [True, False])
def test_a_function_that_writes_latents_is_told_not_to(obeys: bool) -> None:
    def attention(
        q_nope: Any,
        q_pe: Any,
        c_kv: Any,
        k_pe: Any,
        latent_pages: Any,
        *,
        scale: float,
        kv_lens: Any,
        page_indices: Any,
        cu_q_lens: Any,
        num_seqs: Any,
        update_kv_cache: bool,
    ) -> Any:
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        if update_kv_cache or not obeys:
            return latent_attention.writing(q_nope, q_pe, c_kv, k_pe, latent_pages, scale=scale, **tables)
        q = jnp.concatenate([q_nope, q_pe], axis=-1)
        depth = q_nope.shape[-1]
        return latent_attention.in_pages(q, latent_pages, value_dim=depth, scale=scale, **tables), latent_pages

    case = MIXED.replace("37-16-17-8", "37-32-17-8").replace("latentshared", "latent")
    found = {record.observable: record.verdict for record in judge(attention, case, "forward")}
    expected = PASS if obeys else FAIL
    assert found == {
        **{"out": PASS, "latent_pages": PASS},
        **{"out.no_update": expected, "latent_pages.no_update": expected},
    }
