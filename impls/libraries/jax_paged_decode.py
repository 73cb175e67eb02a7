"""Adapter of paged decode attention of `jax.experimental.pallas.ops`, for TPU and for GPU: one query per sequence.

The library takes queries `[B, N, H]` and pages `[K, pages, page_size, H]`. All table entries must be valid pages, even
unused ones. The kernels do not scale logits, so the adapter computes `q * scale` in f32 and rounds it to q's dtype, as
the kernels' callers do. The kernels support no windows and no sinks, and return no residuals. Pages may be int8 with
scales `[K, pages, page_size]`; the TPU kernel takes scales with one more axis, and divides them by 127.5.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from cases.case import Case
from cases.storage_forms.paged_form import SCALED_FEATURES
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import Interpret, get_default_products, resolve_interpret, runs_on, use_tpu_interpreter
from impls.libraries.mask_flags import ONLY_CAUSAL

PAGES_TOGETHER = 2
SPLITS = 2
"""GPU programs that share a sequence. The page table's width must be a multiple of `SPLITS * PAGES_TOGETHER`."""
UNSUPPORTED = {
    "prefill": "takes one query for each sequence",
    "window": ONLY_CAUSAL,
    "sinks": "takes no sinks",
    "v_head_dim": "needs values of the same depth as keys",
}

_ONLY_TPU = {"f16": "the matrix unit multiplies no float16", "kv_fp8": "its pages with scales are int8"}


def attention(
    q: Float[Array, "total_q N H"],
    k_pages: Shaped[Array, "pages page_size K H"],
    v_pages: Shaped[Array, "pages page_size K V"],
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    k_scales: Float32[Array, "pages page_size K"] | None = None,
    v_scales: Float32[Array, "pages page_size K"] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    platform: str = "tpu",
    interpret: Interpret = None,
) -> jax.Array:
    """Implement the paged call (docs/contract.md, section 8) for at most one query per sequence.

    `interpret` is as for `pallas_call`.
    """
    number = jnp.arange(len(kv_lens), dtype=jnp.int32)
    has_query = (number < num_seqs[0]) & (jnp.diff(cu_q_lens) == 1)
    row = jnp.where(has_query, cu_q_lens[:-1], len(q))
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    scaled = (q.astype(jnp.float32) * jnp.float32(factor)).astype(q.dtype)
    queries = scaled.at[row].get(mode="fill", fill_value=0)
    lengths = jnp.where(has_query, kv_lens, 0)
    table = jnp.clip(page_indices, 0, len(k_pages) - 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (PAGES_TOGETHER * SPLITS))))
    k, v = (x.transpose(2, 0, 1, 3) for x in (k_pages, v_pages))
    scales = None if k_scales is None or v_scales is None else (x.transpose(2, 0, 1) for x in (k_scales, v_scales))
    interpret = resolve_interpret(interpret, platform)
    if platform == "tpu":
        if scales is not None:
            k, v = (_quantize_pages(x, of_x) for x, of_x in zip((k, v), scales, strict=True))
        with use_tpu_interpreter(interpret):
            out = _load_module("tpu").paged_attention(
                queries,
                k,
                v,
                lengths,
                table,
                attn_logits_soft_cap=soft_cap,
                pages_per_compute_block=PAGES_TOGETHER,
            )
    else:
        by_name = {} if scales is None else dict(zip(("k_scales_pages", "v_scales_pages"), scales, strict=True))
        out = _load_module("gpu").paged_attention(
            queries,
            k,
            v,
            table,
            lengths,
            k_splits=SPLITS,
            pages_per_compute_block=PAGES_TOGETHER,
            attn_logits_soft_cap=soft_cap,
            interpret=bool(interpret),
            **by_name,
        )
    found: jax.Array = jnp.zeros(q.shape, q.dtype).at[row].set(out, mode="drop")
    return found


def _quantize_pages(pages: jax.Array, scales: jax.Array) -> Any:
    """Convert pages `[K, pages, page_size, H]` and their scales to the form that the TPU kernel takes."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.paged_attention.quantization_utils")
    return module.QuantizedTensor(pages, scales[..., None] * jnp.float32(module.MAX_INT8))


def _load_module(platform: str) -> ModuleType:
    """Load the library's module when it is needed: some versions warn on import."""
    return importlib.import_module(f"jax.experimental.pallas.ops.{platform}.paged_attention")


def _find_case_limit(platform: str, case: Case) -> str | None:
    if any(kv == 0 and q for q, kv in zip(case.q_lengths, case.kv_lengths, strict=True)):
        return "needs a key for each query"
    if platform == "gpu" and case.head_dim & (case.head_dim - 1):
        return f"needs a head depth that is a power of two; H is {case.head_dim}"
    page_size = case.stored.size if case.stored is not None else None
    if platform == "gpu" and page_size and page_size & (page_size - 1):
        return f"needs pages of a power of two of keys; they have {page_size}"
    return None


def _build_implementation(name: str, platform: Literal["tpu", "gpu"]) -> Implementation:
    call: Callable[..., Any] = functools.partial(attention, platform=platform)
    return Implementation(
        name=name,
        call=call,
        description=f"jax.experimental.pallas.ops.{platform}.paged_attention",
        unsupported=UNSUPPORTED | (_ONLY_TPU if platform == "tpu" else {}),
        offers=SCALED_FEATURES,
        supports_case=functools.partial(_find_case_limit, platform),
        # The TPU kernel converts keys and values to bf16 in VMEM, whatever their dtype. Keys and values with scales are
        # f32 in VMEM, and the chip's products at default precision round them to bf16.
        arithmetic=Arithmetic(
            products="bf16" if platform == "tpu" else get_default_products(),
            scaled_q=True,
            cache="input" if platform == "tpu" else "f32",
        ),
        residuals=frozenset(),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="undefined",
        behind_mask="finite",
        storage="paged",
        refuses_by_signature=True,
        accelerator=Accelerator(
            platform=platform,
            interpreted=not runs_on(platform),
            under_interpreter=(lambda parameters: functools.partial(call, interpret=parameters))
            if platform == "tpu"
            else None,
            native=functools.partial(call, interpret=False),
        ),
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _build_implementation("jax_paged_tpu", "tpu"),
    _build_implementation("jax_paged_gpu", "gpu"),
)
