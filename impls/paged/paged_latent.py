"""Multi-head latent attention in absorbed form over paged latents: the public call, and the checks of its operands."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from impls.contract.implementation import FLOATS
from impls.jax_compat import Interpret, resolve_interpret
from impls.paged.attention import (
    BLOCK_KV,
    BLOCK_Q,
    SCALED_DTYPES,
    check_options,
    check_tables,
    compute_results,
    refuse_f16,
)
from impls.paged.page_copies import choose_block_kv, choose_block_q
from impls.paged.paged_plan import Operands, PagedPlan

BLOCK_ROWS = 256
"""Default number of rows (queries times heads) that are computed at a time: the side of the largest matrix unit.

By the compiler's schedule, four sequences of 4,096 latents in pages of 64, with 512 queries each, take on v5e and v6e:

- with 128 rows, 22,660 and 11,769 kilocycles;
- with 256 rows, 22,322 and 9,023;
- with 512 rows, 21,328 and 8,077. This size was not compiled for other chips.
"""


def latent_attention(
    q: Float[Array, "total_q N H"],
    latent_pages: Shaped[Array, "pages page_size H"],
    *,
    value_dim: int,
    scale: float,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    latent_scales: Float32[Array, "pages page_size"] | None = None,
    latent_scale: float | None = None,
    window: tuple[int | None, int] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    save_residuals: bool = False,
    backend: Literal["portable", "tpu"] = "portable",
    block_q: int | None = None,
    block_kv: int | None = None,
    block_rows: int = BLOCK_ROWS,
    interpret: Interpret = None,
) -> Any:
    """Attend causally from packed queries to paged latents shared by all heads (docs/contract.md, section 8).

    Latent `j` of a sequence is its key `j`, and the first `value_dim` coordinates are its value (DeepSeek-AI 2024,
    arXiv:2405.04434, section 2.1, with the up-projections absorbed into q and into what follows `out`). A block of
    pages is read once, for keys and values.

    The other operands and the results are those of the contract for latents in pages (docs/contract.md, section 8).

    Args:
      value_dim: the rank, at most `H`.
      latent_scales: for latents in int8 or float8_e4m3fn, the scale of each row; in plain JAX only.
      latent_scale: one scale for all latents, a number, in place of `latent_scales`.
      backend: `"portable"` JAX, or the Pallas kernel for `"tpu"`. The TPU kernel reads pages in place if XLA lays them
        out row by row: if `H` is a multiple of 128 and `page_size` a multiple of 8. Otherwise all pages are copied
        first. So latents of 512 + 64 coordinates are best padded with zeros to 640, and q too. This takes no more
        memory.
      block_q: queries per tile.
      block_kv: latents that are read together, rounded up to whole pages.
      block_rows: queries times heads that are computed at a time on a TPU, a multiple of 16.
      interpret: as `pallas_call` takes it; by default true unless the process runs on a TPU.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: differentiation, or float16 or scales on a TPU.
    """
    if backend == "tpu" and not (latent_scales is None and latent_scale is None):
        raise NotImplementedError("paged_latent supports scales with backend='portable' only")
    _check_scales(latent_pages, latent_scales, latent_scale)
    is_scaled = latent_scales is not None or latent_scale is not None
    _check_operands(q, latent_pages, value_dim, scale, sinks, window, block_q, block_kv, is_scaled=is_scaled)
    check_tables(kv_lens, page_indices, cu_q_lens, num_seqs)
    if backend not in ("portable", "tpu"):
        raise ValueError(f"backend must be portable or tpu, got {backend!r}")
    if block_rows <= 0 or block_rows % 16:
        raise ValueError(f"block_rows must be a positive multiple of 16, got {block_rows}")
    if backend == "tpu":
        refuse_f16(q)
        block_q = block_q or choose_block_q(*q.shape[:2], latent=True)
        block_kv = block_kv or choose_block_kv(1, latent_pages.shape[2:], q.dtype.itemsize)
    block_q, block_kv = block_q or BLOCK_Q, block_kv or BLOCK_KV
    plan = PagedPlan(
        left=None if window is None else window[0],
        scale=float(scale) * (1.0 if latent_scale is None else latent_scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        block_q=min(block_q, q.shape[0]),
        block_pages=min(-(-block_kv // latent_pages.shape[1]), page_indices.shape[1]),
        value_dim=value_dim,
        block_rows=block_rows,
    )
    tables = (jnp.asarray(x, jnp.int32) for x in (kv_lens, page_indices, cu_q_lens, num_seqs))
    of_rows = None if latent_scales is None else jnp.asarray(latent_scales)[..., None]
    operands = Operands(jnp.asarray(q), jnp.asarray(latent_pages)[:, :, None], None, *tables)._replace(k_scales=of_rows)
    return compute_results(
        plan,
        backend,
        resolve_interpret(interpret, backend),
        operands,
        sinks,
        save_residuals=save_residuals,
        v_scale=1.0 if latent_scale is None else latent_scale,
    )


def _check_scales(latent: Any, scales: Any, scale: float | None) -> None:
    if scales is not None and (scales.shape != latent.shape[:2] or scales.dtype != jnp.float32):
        raise ValueError(f"latent_scales must be float32 {list(latent.shape[:2])}, got {scales.dtype} {scales.shape}")
    if scale is not None and not (scales is None and isinstance(scale, int | float)):
        raise ValueError(f"latent_scale must be a number, in place of latent_scales, got {scale!r}")


def _check_operands(
    q: Any,
    latent: Any,
    value_dim: int,
    scale: float,
    sinks: Any,
    window: Any,
    *blocks: int | None,
    is_scaled: bool = False,
) -> None:
    for name, x, axes in (
        ("q", q, "[total_q, heads, depth]"),
        ("latent_pages", latent, "[pages, page_size, depth]"),
    ):
        if x.ndim != 3 or 0 in x.shape:
            raise ValueError(f"{name} must have the axes {axes}, none of them of size 0, got shape {x.shape}")
    if q.shape[2] != latent.shape[2]:
        raise ValueError(f"latent_pages has depth {latent.shape[2]}, q has {q.shape[2]}: they must be equal")
    if is_scaled and str(q.dtype) in FLOATS and str(latent.dtype) in SCALED_DTYPES:
        pass
    elif not (q.dtype == latent.dtype and str(q.dtype) in FLOATS):
        raise ValueError(f"q and latent_pages must have one dtype of {FLOATS}, got {q.dtype} and {latent.dtype}")
    if not 0 < value_dim <= latent.shape[2]:
        raise ValueError(f"value_dim must be from 1 to the depth of latent_pages, {latent.shape[2]}, got {value_dim}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    check_options(q.shape[1], sinks, window, *blocks)
    if window is not None and window[1] != 0:
        raise ValueError(f"window must be (left, 0), got {window}")
