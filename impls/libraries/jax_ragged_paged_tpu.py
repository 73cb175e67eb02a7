"""Adapter of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`: prompts, chunks and tokens of many sequences.

The kernel takes the tables of the contract. Keys and values of a page are one array `[pages, page_size, 2 K, H]`, with
keys at even indices. The kernel's window includes the query's own key. The kernel returns no residuals.

Neither of JAX's interpreters can run this kernel. The fast interpreter fails at its masked stores, and the interpreter
that detects races fails at its reshaped refs. So the kernel is compiled everywhere, but only run on a TPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged
from jaxtyping import Array, Float, Int, Shaped

from cases.case import Case
from cases.storage_forms.paged_form import WHOLE_FEATURES
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import get_default_products, runs_on

NAME = "jax_ragged_paged_tpu"
LANES = 128
BLOCK_Q, BLOCK_KV = 32, 512
"""Queries and keys per block on a TPU, close to those of the library's table for most shapes."""
NO_TPU = "needs a TPU: JAX's interpreters of TPU kernels stop at its masked stores and at its reshaped refs"
_JUDGED_SIZES: dict[str, Any] = {"block_q": 8, "block_kv": 48}
UNSUPPORTED = {
    "f16": "the matrix unit multiplies no float16",
    "sinks": "takes no sinks",
    "v_head_dim": "needs values of the same depth as keys",
}


def attention(
    q: Float[Array, "total_q N H"],
    k_pages: Shaped[Array, "pages page_size K H"],
    v_pages: Shaped[Array, "pages page_size K V"],
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    k_scale: float | None = None,
    v_scale: float | None = None,
    window: tuple[int | None, int] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    block_q: int = BLOCK_Q,
    block_kv: int = BLOCK_KV,
) -> jax.Array:
    """Implement the paged call (docs/contract.md, section 8)."""
    pages, page_size, num_kv_heads, depth = k_pages.shape
    both = jnp.stack([k_pages, v_pages], axis=3).reshape(pages, page_size, 2 * num_kv_heads, depth)
    left = None if window is None else window[0]
    out: jax.Array = ragged.ragged_paged_attention(
        q,
        both,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        sm_scale=1 / math.sqrt(depth) if scale is None else float(scale),
        sliding_window=None if left is None else left + 1,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        num_kv_pages_per_block=min(-(-block_kv // page_size), page_indices.shape[1]),
        num_queries_per_block=block_q,
    )
    return out


def _find_case_limit(case: Case) -> str | None:
    if case.head_dim % LANES:
        return f"needs a head depth that is a multiple of {LANES}; H is {case.head_dim}"
    lanes = 2 * case.num_kv_heads // (1 if case.dtype == "f32" else 2)
    if lanes not in (1, 2, 4) and lanes % 8:
        return f"needs key/value heads whose tiles are whole; K is {case.num_kv_heads}"
    longer = [q for q, kv in zip(case.q_lengths, case.kv_lengths, strict=True) if q > kv]
    return f"needs as many keys as queries in each sequence; one of {longer[0]} queries has fewer" if longer else None


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        name=NAME,
        call=functools.partial(attention, **_JUDGED_SIZES),
        description="jax.experimental.pallas.ops.tpu.ragged_paged_attention",
        unsupported=UNSUPPORTED,
        offers=WHOLE_FEATURES,
        supports_case=_find_case_limit,
        # Keys and values times their scale are rounded to the dtype of q.
        arithmetic=Arithmetic(products=get_default_products(), cache="input"),
        residuals=frozenset(),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="undefined",
        storage="paged",
        refuses_by_signature=True,
        accelerator=Accelerator(
            platform="tpu",
            absent=None if runs_on("tpu") else NO_TPU,
            native=attention,
        ),
    ),
)
