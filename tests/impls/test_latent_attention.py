"""Our latent attention: results on a few cases, also at real sizes, its cost, and its refusals."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cases.case_id import parse_case_id
from cases.storage_forms.server_traces import build_traces
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls.block_flash.attention import latent_attention as dense_latent_attention
from impls.paged import latent_attention
from reports.records import PASS, RED, Record

REAL = "decode/bf16/B3.T1.S70.N128.K1.H576.V512/own-linf-70-33-1/scale0.072/latent16/normal/s0"
MIXED = "prefill/f32/B4.T13.S45.N4.K1.H80.V64/own-l15-45-16-17-9/softcap30/sinks/scale0.144/latentshared16-q13-1-1-9"
TRAIN = "train/f32/B2.T24.S72.N4.K1.H80.V64/causal-o48/seg/sinks/scale0.144/latent/normal/s0"


def judged(name: str, case: str, *checks: str) -> list[Record]:
    chosen = [CHECKS_BY_NAME[check] for check in checks]
    return Runner(Settings()).run(
        run_plan.plan_case(implementation_registry.find_implementation(name), parse_case_id(case), chosen).jobs
    )


@pytest.mark.parametrize(
    ("name", "case", "checks"),
    [
        ("paged_latent", REAL, "forward poison"),
        pytest.param(
            "paged_latent",
            f"{MIXED}/dominant/s0",
            "forward residuals independence memory",
            marks=pytest.mark.long,
        ),
        ("paged_latent_tpu", f"{MIXED}/dominant/s0", "forward residuals poison"),
        pytest.param("paged_latent_tpu", REAL, "forward poison", marks=pytest.mark.long),
        ("block_flash_latent", TRAIN, "forward gradients gradients_lse poison"),
    ],
)
def test_ours_conform(name: str, case: str, checks: str) -> None:
    found = judged(name, case, *checks.split())
    assert [record for record in found if record.verdict in RED] == []
    assert {record.check for record in found if record.verdict == PASS} == set(checks.split())


@pytest.mark.long
def test_latents_live_as_pages_do() -> None:
    """Chunks, then tokens, while later sequences take the pages of those that have ended."""
    implementation = implementation_registry.find_implementation("paged_latent")
    case = build_traces(0, implementation.supports)[0]
    assert (case.storage or "").startswith("latent")
    found = Runner(Settings()).run(run_plan.plan_case(implementation, case, [CHECKS_BY_NAME["decoding"]]).jobs)
    assert {record.verdict for record in found} == {PASS}


def call(**changed: Any) -> Any:
    """Build a call with two sequences of one query each over a cache of six pages."""
    given: dict[str, Any] = {
        "q": jnp.ones((2, 4, 8)),
        "latent_pages": jnp.ones((6, 4, 8)),
        "value_dim": 6,
        "scale": 0.5,
        "kv_lens": jnp.asarray([3, 5], jnp.int32),
        "page_indices": jnp.zeros((2, 2), jnp.int32),
        "cu_q_lens": jnp.asarray([0, 1, 2], jnp.int32),
        "num_seqs": jnp.asarray([2], jnp.int32),
    } | changed
    return latent_attention(given.pop("q"), given.pop("latent_pages"), **given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"latent_pages": jnp.ones((6, 4, 1, 8))}, r"latent_pages must have the axes \[pages, page_size, depth\]"),
        ({"q": jnp.ones((2, 4, 7))}, "latent_pages has depth 8, q has 7"),
        ({"q": jnp.ones((2, 4, 8), jnp.bfloat16)}, "q and latent_pages must have one dtype"),
        ({"value_dim": 9}, "value_dim must be from 1 to the depth of latent_pages, 8, got 9"),
        ({"value_dim": 0}, "value_dim must be from 1"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"sinks": jnp.ones(3)}, "sinks must have shape"),
        ({"window": (2, 1)}, r"window must be \(left, 0\)"),
        ({"block_kv": 0}, "block_kv must be positive"),
        ({"backend": "gpu"}, "backend must be portable or tpu"),
        ({"block_rows": 24}, "block_rows must be a positive multiple of 16"),
        ({"kv_lens": jnp.ones(3, jnp.int32)}, "page_indices must have shape"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(call, **changed))


def test_latents_in_pages_are_read_and_not_differentiated() -> None:
    with pytest.raises(NotImplementedError, match="pages are read"):
        jax.grad(lambda q: call(q=q).sum())(jnp.ones((2, 4, 8)))


def test_pages_are_not_copied() -> None:
    """A cache of any size costs no more temporary memory: values are a part of the block that is read."""

    def temporary(pages: int) -> int:
        cache = jax.ShapeDtypeStruct((pages, 4, 8), jnp.float32)
        analysis = jax.jit(lambda cache: call(latent_pages=cache)).lower(cache).compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    assert temporary(4096) == temporary(64)


@pytest.mark.parametrize(
    ("latent", "value_dim", "message"),
    [((2, 5, 1, 8), 6, "latent must have the axes"), ((2, 5, 8), 9, "value_dim must be from 1 to the depth of latent")],
)
def test_what_is_wrong_of_a_dense_latent_is_named(latent: tuple[int, ...], value_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dense_latent_attention(jnp.ones((2, 3, 4, 8)), jnp.ones(latent), value_dim=value_dim, scale=0.5)
