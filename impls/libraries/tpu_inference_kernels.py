"""Adapters of tpu-inference (vLLM on TPUs): ragged paged attention (v3), and the same over latents (MLA, v1).

Both kernels write the tokens of their queries into pages, and the adapters return these pages. Pages have the kernels'
layouts, in which servers keep them. Keys and values alternate by head, `[pages, page_size, 2 K / packing, packing, H]`.
Rank and rotary part of a latent are each padded to
whole lanes. Leading sequences with a single query are counted separately, since the kernels have a different program
for them. Windows include the query's own key. There are no residuals, no sinks, and no sequences without queries.

For bf16 the first kernel also keeps its sums in bf16, rounding after each block, as its callers configure it.

Importing the package imports vLLM. The two modules of the kernels depend only on each other, so they are imported
without the package. They are private modules of version 0.32.0, for which this adapter was written. The package pins a
version of JAX and needs vLLM, so it is in no extra here. Neither of JAX's interpreters can run these kernels: both fail
at reshaped refs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from cases.case import Case
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation
from impls.jax_compat import get_default_products, runs_on

RAGGED, LATENT = "tpu_inference_ragged_paged_tpu", "tpu_inference_latent_tpu"
LANES = 128
BLOCK_Q, BLOCK_KV = 32, 512
BLOCK_Q_LATENT = 8
"""`BLOCK_Q`, `BLOCK_KV` and `BLOCK_Q_LATENT` are queries and keys per block on a TPU.

With these sizes both kernels compile for every generation, for 64 and 128 heads in bf16.
"""
VMEM_LIMIT_BYTES = 64 << 20
ABSENT = "tpu-inference is not installed: pip install --no-deps tpu-inference==0.32.0"
NO_TPU = "needs a TPU: JAX's interpreters of TPU kernels stop at its reshaped refs"
_PACKAGE = "tpu_inference"
_JUDGED_SIZES: dict[str, Any] = {"block_q": 8, "block_kv": 32}
UNSUPPORTED = {
    "f16": "the matrix unit multiplies no float16",
    "sinks": "takes no sinks",
    "v_head_dim": "needs values of the same depth as keys",
}


def attention(
    q: Float[Array, "total_q N H"],
    k: Float[Array, "total_q K H"],
    v: Float[Array, "total_q K V"],
    k_pages: Float[Array, "pages page_size K H"],
    v_pages: Float[Array, "pages page_size K V"],
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    window: tuple[int | None, int] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    block_q: int = BLOCK_Q,
    block_kv: int = BLOCK_KV,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implement the call that writes pages (docs/contract.md, section 8).

    Raises:
      ImportError: tpu-inference is not installed.
    """
    pages, page_size, num_kv_heads, depth = k_pages.shape
    library = _load_module("ragged_paged_attention.v3.kernel")
    shape = library.get_kv_cache_shape(pages, page_size, num_kv_heads, depth, k_pages.dtype)
    both = jnp.stack([k_pages, v_pages], axis=3).reshape(pages, page_size, 2 * num_kv_heads, depth)
    cache = _pad_axis(_pad_axis(both, 3, shape[4]), 2, shape[2] * shape[3]).reshape(shape)
    keys = -(-block_kv // page_size) * page_size
    out, cache = library.ragged_paged_attention(
        q,
        k,
        v,
        cache,
        kv_lens,
        page_indices.reshape(-1),
        cu_q_lens,
        _build_distribution(cu_q_lens, num_seqs),
        sm_scale=1 / math.sqrt(depth) if scale is None else float(scale),
        sliding_window=_count_window_keys(window),
        soft_cap=soft_cap,
        d_block_sizes=(1, keys, 1, keys),
        m_block_sizes=(block_q, keys, block_q, keys),
        vmem_limit_bytes=VMEM_LIMIT_BYTES,
    )
    both = cache.reshape(pages, page_size, -1, shape[4])[:, :, : 2 * num_kv_heads, :depth]
    both = both.reshape(pages, page_size, num_kv_heads, 2, depth)
    return out, both[:, :, :, 0], both[:, :, :, 1]


def latent_attention(
    q_nope: Float[Array, "total_q N V"],
    q_pe: Float[Array, "total_q N R"],
    c_kv: Float[Array, "total_q V"],
    k_pe: Float[Array, "total_q R"],
    latent_pages: Float[Array, "pages page_size V+R"],
    *,
    scale: float,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    window: tuple[int | None, int] | None = None,
    soft_cap: float | None = None,
    block_q: int = BLOCK_Q_LATENT,
    block_kv: int = BLOCK_KV,
) -> tuple[jax.Array, jax.Array]:
    """Implement the call that writes latents into pages (docs/contract.md, section 8).

    In bf16 the kernel needs an even number of tokens. The number of heads must be a multiple of the queries per block.

    Raises:
      ImportError: tpu-inference is not installed.
    """
    (pages, page_size, _), total, rank = latent_pages.shape, len(q_nope), q_nope.shape[2]
    tokens = (_pad_axis(x, 0, total + total % 2) for x in (q_nope, q_pe, c_kv, k_pe))
    library = _load_module("mla.v1.kernel")
    parts = (latent_pages[..., :rank], latent_pages[..., rank:])
    cache = jnp.concatenate([_pad_axis(x, 2, _round_to_lanes(x.shape[2])) for x in parts], axis=2)
    shape = library.get_kv_cache_shape(pages, page_size, cache.shape[2], cache.dtype)
    out, written = library.mla_ragged_paged_attention(
        *tokens,
        cache.reshape(shape),
        kv_lens,
        page_indices.reshape(-1),
        cu_q_lens,
        _build_distribution(cu_q_lens, num_seqs),
        sm_scale=float(scale),
        sliding_window=_count_window_keys(window),
        soft_cap=soft_cap,
        num_kv_pages_per_block=-(-block_kv // page_size),
        num_queries_per_block=math.gcd(block_q, q_nope.shape[1]),
        vmem_limit_bytes=VMEM_LIMIT_BYTES,
    )
    written = written.reshape(cache.shape)
    first = _round_to_lanes(rank)
    return out[:total], jnp.concatenate([written[..., :rank], written[..., first : first + q_pe.shape[2]]], axis=2)


def _round_to_lanes(depth: int) -> int:
    return -(-depth // LANES) * LANES


def _pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Pad `x` with zeros at the end of `axis` to `size`."""
    return jnp.pad(x, [(0, size - x.shape[axis] if n == axis else 0) for n in range(x.ndim)])


def _count_window_keys(window: tuple[int | None, int] | None) -> int | None:
    """Count the keys that a query sees, its own included; None without a left bound."""
    return None if window is None or window[0] is None else window[0] + 1


def _build_distribution(cu_q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
    """Build int32 `[3]`: number of leading sequences with one query, the same number again, number of all sequences."""
    count = num_seqs[0].astype(jnp.int32)
    leading = jnp.cumprod((jnp.diff(cu_q_lens) == 1).astype(jnp.int32), dtype=jnp.int32).sum(dtype=jnp.int32)
    first = jnp.minimum(leading, count)
    return jnp.stack([first, first, count])


@contextlib.contextmanager
def _skip_package_init() -> Iterator[None]:
    """Let submodules be imported without running the package's `__init__`, unless it is imported already."""
    spec = importlib.util.find_spec(_PACKAGE)
    if _PACKAGE in sys.modules or spec is None:
        yield
        return
    bare = ModuleType(_PACKAGE)
    bare.__path__ = [str(Path(str(spec.origin)).parent)]
    before = set(sys.modules)
    sys.modules[_PACKAGE] = bare
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == _PACKAGE:
                del sys.modules[name]


@functools.cache
def _load_module(name: str) -> ModuleType:
    """Load a module of the library's kernels when a call needs it."""
    with _skip_package_init():
        return importlib.import_module(f"{_PACKAGE}.kernels.{name}")


def _find_case_limit(case: Case) -> str | None:
    page_size = (case.stored and case.stored.size) or 1
    packing = 1 if case.dtype == "f32" else 2
    if page_size % packing:
        return f"needs a page size that is a multiple of {packing} in {case.dtype}; it is {page_size}"
    for q, kv in zip(case.q_lengths, case.kv_lengths, strict=True):
        if not 0 < q <= kv:
            return f"needs a query in each sequence, and as many keys; one has {q} queries and {kv} keys"
    return None


def _find_latent_case_limit(case: Case) -> str | None:
    if case.dtype == "bf16" and not hasattr(pltpu, "reciprocal"):
        return "needs jax 0.11 in bf16, for pltpu.reciprocal"
    return _find_case_limit(case)


_IS_INSTALLED = importlib.util.find_spec(_PACKAGE) is not None


def _build_implementation(name: str, call: Callable[..., Any], **declared: Any) -> Implementation:
    absent = None if runs_on("tpu") else NO_TPU
    return Implementation(
        name=name,
        call=functools.partial(call, **_JUDGED_SIZES),
        residuals=frozenset(),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="undefined",
        behind_mask="finite",
        refuses_by_signature=True,
        accelerator=Accelerator(
            platform="tpu", absent=absent if _IS_INSTALLED else ABSENT, native=call if _IS_INSTALLED else None
        ),
        **declared,
    )


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _build_implementation(
        RAGGED,
        attention,
        description="ragged paged attention (v3) of tpu-inference, which writes new keys and values into pages",
        unsupported=UNSUPPORTED,
        supports_case=_find_case_limit,
        # In bf16 the maximum, the sum of weights and the weighted sum are rounded after each block of keys.
        arithmetic=Arithmetic(products=get_default_products(), softmax="input", block_sums=_JUDGED_SIZES["block_kv"]),
        storage="paged",
        writes_pages=True,
    ),
    _build_implementation(
        LATENT,
        latent_attention,
        description="ragged paged attention over latents (MLA, v1) of tpu-inference, which writes new latents",
        unsupported={name: reason for name, reason in UNSUPPORTED.items() if name != "v_head_dim"},
        supports_case=_find_latent_case_limit,
        arithmetic=Arithmetic(products=get_default_products()),
        storage="latent_pages",
        writes_pages=True,
    ),
)
