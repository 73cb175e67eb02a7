"""The decode kernel for Hopper: its results in JAX's interpreter, what it refuses, and where it is used."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from cases.case_id import parse_case_id
from conformance.accelerators import interpreters
from conformance.checks import CHECKS_BY_NAME
from conformance.execution import implementation_registry
from conformance.judging import run_plan
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from impls import paged, ragged
from impls.paged import paged_gpu
from impls.pallas_gpu import mosaic_decode as share_kernel
from impls.pallas_gpu import mosaic_tiles
from impls.pallas_gpu.mosaic_decode import DecodeShape, count_slots
from reports.records import FAIL, PASS

MOSAIC, TRITON = "mosaic_gpu_v2", "__gpu$xla.gpu.triton"


@contextlib.contextmanager
def tracing_for(kind: str) -> Iterator[None]:
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def judge(name: str, case: str) -> dict[str, str]:
    """Run the check `interpreter`, and return its verdicts by observable."""
    implementation = implementation_registry.find_implementation(name)
    jobs = run_plan.plan_case(implementation, parse_case_id(case), [CHECKS_BY_NAME["interpreter"]]).jobs
    return {record.observable: record.verdict for record in Runner(Settings()).run(jobs)}


def check_verdicts(found: dict[str, str]) -> None:
    names = {"out_with_residuals.seed0", "logsumexp.seed0", "max_logits.seed0", "races.residuals"}
    assert found == dict.fromkeys(names, PASS)


WINDOWS = "decode/bf16/B4.T1.S500.N4.K1.H128.V128/own-l250-500-490-480-470/paged16/normal/s0"
"""Shares of five tiles, of which the first and the last are partial; the ring has three slots."""


@pytest.mark.parametrize(
    "case",
    [
        WINDOWS,
        # Several shares of a sequence, more tiles than the ring has slots, a partial last page, and no keys at all.
        "decode/bf16/B3.T1.S900.N8.K2.H128.V128/own-linf-900-130-0/paged16/normal/s0",
        # A window that begins within a page, several queries of a sequence, and groups of 8.
        "prefill/f16/B2.T2.S300.N16.K2.H64.V64/own-l150-300-90/softcap30/sinks/paged8/normal/s0",
        pytest.param(
            "prefill/bf16/B3.T20.S200.N4.K2.H64.V128/own-l70-200-40-1/paged64-q20-9-1/normal/s0",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "decode/bf16/B2.T1.S300.N4.K1.H192.V128/own-linf-300-64/paged128/normal/s0", marks=pytest.mark.nightly
        ),
        pytest.param(
            "decode/f16/B2.T1.S200.N72.K1.H64.V64/own-linf-200-5/scale0.3/shared32/normal/s0", marks=pytest.mark.nightly
        ),
    ],
)
def test_it_is_right_over_pages_and_nothing_races(case: str) -> None:
    check_verdicts(judge("paged_gpu_mosaic", case))


@pytest.mark.parametrize(
    "case",
    [
        "decode/bf16/B2.T1.S400.N8.K2.H128.V128/own-l300-400-130/kvint8-tensor/paged16/normal/s0",
        "prefill/bf16/B2.T2.S300.N4.K2.H64.V64/own-linf-300-90/softcap30/kvfp8-tensor/paged64/normal/s0",
        pytest.param(
            "decode/f16/B1.T1.S300.N4.K1.H192.V128/own-linf-300/sinks/kvfp8-tensor/paged8/normal/s0",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_it_is_right_over_quantised_pages_and_nothing_races(case: str) -> None:
    check_verdicts(judge("paged_quantized_gpu_mosaic", case))


@pytest.mark.parametrize(
    "case",
    [
        # Two splits of a sequence, more tiles than the ring has slots, a sequence without keys, and groups of 8.
        "decode/bf16/B3.T1.S1000.N16.K2.H128.V128/lengths-990-0-130/sinks/normal/s0",
        # More rows than one tile has, chunks, and a cache that is no multiple of the kernel's tiles.
        "prefill/f16/B1.T20.S200.N4.K1.H64.V64/chunked-50-o180/softcap30/normal/s0",
        pytest.param("prefill/bf16/B2.T2.S264.N8.K2.H64.V192/own-l70-200-90/normal/s0", marks=pytest.mark.nightly),
        pytest.param("decode/bf16/B1.T1.S520.N4.K1.H256.V256/window-l400-r0-o519/normal/s0", marks=pytest.mark.nightly),
    ],
)
def test_it_is_right_over_a_padded_cache_and_nothing_races(case: str) -> None:
    check_verdicts(judge("ragged_gpu_mosaic", case))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"depth": 80}, "head_dim 80"),
        ({"kv_length": 300}, "k and v with room for 300 keys: it takes multiples of 8"),
        ({"dtype": jnp.float32}, "q in float32"),
    ],
)
def test_a_padded_cache_that_it_does_not_support_is_refused(changed: dict[str, Any], reason: str) -> None:
    size = {"depth": 64, "kv_length": 320, "dtype": jnp.bfloat16, **changed}
    q = jnp.zeros((1, 1, 4, size["depth"]), size["dtype"])
    k = jnp.zeros((1, size["kv_length"], 2, size["depth"]), size["dtype"])
    with pytest.raises(NotImplementedError, match=f"ragged does not support backend='mosaic' for {reason}"):
        ragged.attention(q, k, k, backend="mosaic")


def test_what_lies_past_the_length_of_a_padded_cache_does_not_spread() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, 2, 64)), jnp.float16) for n in (1, 160, 160))
    lengths = jnp.array([0, 90], jnp.int32)
    dead = (jnp.arange(160)[None, :] >= lengths[:, None])[..., None, None]
    options: dict[str, Any] = {"lengths": lengths, "backend": "mosaic", "num_splits": 2}
    options["interpret"] = interpreters.build_parameters(0, "gpu")
    clean = ragged.attention(q, k, v, **options)
    found = ragged.attention(q, *(jnp.where(dead, jnp.nan, x) for x in (k, v)), **options)
    assert not np.asarray(found[0]).any()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(clean))


@pytest.mark.parametrize("x64", [False, True])
def test_a_padded_cache_takes_one_kernel(x64: bool) -> None:
    def call(q: jax.Array, k: jax.Array, lengths: jax.Array) -> Any:
        return ragged.attention(q, k, k, lengths=lengths, backend="mosaic", interpret=False)

    shapes = [((2, 1, 8, 128), jnp.bfloat16), ((2, 4096, 2, 128), jnp.bfloat16), ((2,), jnp.int32)]
    with tracing_for("NVIDIA H200"), jax.enable_x64(x64):
        exported = jax.export.export(
            jax.jit(call), platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(MOSAIC)]
        )(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert exported.mlir_module().count(f"@{MOSAIC}") == 1


TABLES: dict[str, Any] = {
    "kv_lens": jnp.array([100, 70], jnp.int32),
    "page_indices": jnp.array([[3, 0, 5, 1, 7, 2, 9], [8, 4, 6, 10, 12, 99, -7]], jnp.int32),
    "cu_q_lens": jnp.array([0, 1, 3], jnp.int32),
    "num_seqs": jnp.array([2], jnp.int32),
}


def draw_pages(dtype: Any = jnp.bfloat16, depth: int = 64, page_size: int = 16) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((3, 4, depth), (14, page_size, 2, depth), (14, page_size, 2, depth))
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v


def test_what_no_query_sees_does_not_spread() -> None:
    q, k, v = draw_pages()
    seen = np.zeros(k.shape[:2], bool)
    for row, length in enumerate((100, 70)):
        for j in range(length):
            # The window of 30 keys before the query's own begins at key 69, or at key 38 for the earlier of two.
            if j >= (69, 38)[row]:
                seen[TABLES["page_indices"][row, j // 16], j % 16] = True
    poisoned = tuple(jnp.where(seen[..., None, None], x, jnp.nan) for x in (k, v))
    options: dict[str, Any] = {"window": (30, 0), "backend": "mosaic", "num_programs": 2}
    options["interpret"] = interpreters.build_parameters(0, "gpu")
    clean, found = (paged.attention(q, x, y, **TABLES, **options) for x, y in ((k, v), poisoned))
    assert np.isfinite(np.asarray(found, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(clean))


@pytest.mark.parametrize(
    ("kind", "changed", "reason"),
    [
        ("NVIDIA A100-SXM4-80GB", {}, "GPUs other than Hopper, which 'NVIDIA A100-SXM4-80GB' is not"),
        ("NVIDIA H200", {"dtype": jnp.float32}, "q in float32: it multiplies bfloat16 and float16"),
        ("NVIDIA H200", {"depth": 80}, "head_dim 80: it takes multiples of 64 up to 256"),
        ("NVIDIA H200", {"depth": 320}, "head_dim 320"),
        ("NVIDIA H200", {"page_size": 5}, "page_size 5: it takes 8, 16, 32 and multiples of 64"),
        ("NVIDIA H200", {"page_size": 48}, "page_size 48"),
    ],
)
def test_what_it_does_not_support_it_refuses(kind: str, changed: dict[str, Any], reason: str) -> None:
    with (
        tracing_for(kind),
        pytest.raises(NotImplementedError, match=f"backend='mosaic' for {reason}.*; take backend='gpu'"),
    ):
        paged.attention(*draw_pages(**changed), **TABLES, backend="mosaic", interpret=False)


def test_more_queries_than_rows_and_other_blocks_are_refused() -> None:
    q, k, v = draw_pages()
    many = jnp.zeros((40, 4, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"80 rows of queries per tile \(block_q times .*at most 64"):
        paged.attention(many, k, v, **TABLES, backend="mosaic", block_q=40)
    with pytest.raises(ValueError, match="block_kv must be 64 for backend 'mosaic', got 128"):
        paged.attention(q, k, v, **TABLES, backend="mosaic", block_kv=128)


def test_scales_of_tokens_are_refused() -> None:
    q, *pages = draw_pages()
    k, v = (x.astype(jnp.int8) for x in pages)
    scales = jnp.ones(k.shape[:3])
    with pytest.raises(NotImplementedError, match=r"does not support k_scales .* give k_scale and v_scale"):
        paged.attention(q, k, v, **TABLES, k_scales=scales, v_scales=scales, backend="mosaic")


def test_a_cuda_that_miscompiles_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tiles, "get_cuda_version", lambda: 12080)
    with tracing_for("NVIDIA H200"), pytest.raises(NotImplementedError, match=r"masks under CUDA 12\.8"):
        paged.attention(*draw_pages(), **TABLES, backend="mosaic", interpret=False)


@pytest.mark.parametrize("x64", [False, True])
def test_it_computes_shares_and_triton_merges_them(x64: bool) -> None:
    def count_kernels(backend: Any) -> list[int]:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw_pages()]
        with tracing_for("NVIDIA H100 80GB HBM3"), jax.enable_x64(x64):
            exported = jax.export.export(
                jax.jit(lambda *x: paged.attention(*x, **TABLES, backend=backend, interpret=False)),
                platforms=["cuda"],
                disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in (MOSAIC, TRITON)],
            )(*shapes)
        text = exported.mlir_module()
        return [text.count(f"@{MOSAIC}"), text.count(f"@{TRITON}")]

    assert count_kernels("mosaic") == [1, 1]
    assert count_kernels("gpu") == [0, 2]


@pytest.mark.parametrize(
    ("depths", "dtype", "slots", "together"),
    [
        ((64, 64), "bfloat16", 6, 2),
        ((128, 128), "bfloat16", 3, 2),
        ((192, 128), "bfloat16", 2, 2),
        ((192, 192), "bfloat16", 4, 1),
        ((256, 256), "bfloat16", 3, 1),
        ((128, 128), "int8", 4, 2),
        ((256, 256), "int8", 4, 1),
    ],
)
def test_two_programs_share_a_multiprocessor_where_they_fit(
    depths: tuple[int, int], dtype: str, slots: int, together: int
) -> None:
    assert count_slots(*depths, dtype) == (slots, together)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The next tile is copied to the slot of a tile that still arrives, or is still read.
        ("slot = self.slot(step)", "slot = self.slot(step + 1)"),
        # The pages of the step before.
        ("next_pages = carry", "next_pages = carry; next_pages = visit.look_up_pages(step)"),
        # Values of keys that no query sees are multiplied by 0.
        ("jnp.where(seen, v, jnp.zeros_like(v))", "v"),
        # Of the blocks that are not full, those before the full ones are counted twice.
        ("self.full_first + self.full + (rest - before)", "self.full_first + self.full + rest"),
    ],
)
@pytest.mark.long
def test_the_interpreter_shows_a_wrong_kernel(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(share_kernel)
    assert source.count(old) == 1
    wrong = types.ModuleType("wrong_share_kernel")
    monkeypatch.setitem(sys.modules, wrong.__name__, wrong)
    exec(compile(source.replace(old, new), "wrong_share_kernel.py", "exec"), vars(wrong))
    monkeypatch.setattr(paged_gpu, "attend_to_shares", wrong.attend_to_shares)
    jax.clear_caches()
    assert FAIL in judge("paged_gpu_mosaic", WINDOWS).values()
    jax.clear_caches()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("depths", list(itertools.product((64, 128, 192, 256), repeat=2)), ids=str)
def test_the_programs_of_a_multiprocessor_fit_its_shared_memory(depths: tuple[int, int], dtype: Any) -> None:
    """With the results, which take the memory of the ring in the end."""
    shape = DecodeShape(
        head_dim=depths[0],
        v_head_dim=depths[1],
        rows=8,
        columns=1,
        columns_per_head=1,
        page_size=64,
        dtype=jnp.bfloat16,
        stored_dtype=dtype,
        scale=1.0,
        soft_cap=None,
        interpret=True,  # so that ring and results have names of their own
    )
    sizes = {
        name: -(-math.prod(x.shape) * jnp.dtype(x.dtype).itemsize // 1024) * 1024
        for name, x in share_kernel.build_scratch(shape).items()
        if not isinstance(x, plgpu.Barrier)
    }
    results = sum(sizes.pop(name) for name in ("out_tile", "max_tile", "sum_tile"))
    ring = sizes.pop("k_tile") + sizes.pop("v_tile")
    _, together = count_slots(*depths, dtype)
    barriers, reserved = 1024, 1024
    assert together * (sum(sizes.values()) + max(ring, results) + barriers + reserved) <= 228 * 1024
