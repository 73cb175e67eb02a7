"""Attention over pages that are quantised in one of several ways: the public call for plain JAX.

It takes everything that `impls.paged.attention.attention` takes. It adds scales of sequences, as FlashAttention 3 has
them, scales of blocks, and scales of channels with zero points (docs/contract.md, section 8).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from impls.paged.attention import SCALED_DTYPES, attention
from impls.paged.paged_plan import PageScales

_BLOCKS = {"float8_e4m3fn": ("float8_e8m0fnu", 32), "float4_e2m1fn": ("float8_e4m3fn", 16)}
"""The dtype of scales of blocks and the size of a block, by the dtype of pages."""


def attend_quantized(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    k_descale: jax.Array | None = None,
    v_descale: jax.Array | None = None,
    q_descale: jax.Array | None = None,
    k_block_scales: jax.Array | None = None,
    v_block_scales: jax.Array | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    k_channel_scales: jax.Array | None = None,
    k_channel_zeros: jax.Array | None = None,
    v_token_scales: jax.Array | None = None,
    v_token_zeros: jax.Array | None = None,
    out_dtype: Any = None,
    **options: Any,
) -> Any:
    """Compute attention over quantised pages, and return what `attention` returns.

    Args:
      q: queries `[total_q, N, H]`, in float8_e4m3fn with `q_descale`.
      k_pages: keys `[pages, page_size, K, H]`.
      v_pages: values `[pages, page_size, K, V]`.
      k_descale: with `v_descale`, f32 `[max_seqs, K]`: the scale of a key is that of the sequence that reads it.
      q_descale: f32 `[max_seqs, K]`, the scale of a sequence's queries that share a key/value head.
      k_block_scales: with `v_block_scales`, scales of blocks of a row, `[pages, page_size, K, blocks]`. They are in
        float8_e8m0fnu with blocks of 32 for pages in float8_e4m3fn, and in float8_e4m3fn with blocks of 16 for
        float4_e2m1fn.
      k_global_scale: with `v_global_scale` and fp4, a number that multiplies all keys.
      k_channel_scales: with the next three and pages in uint8, f32 `[pages, K, H]`: scales of keys.
      k_channel_zeros: f32 `[pages, K, H]`, added to scaled keys.
      v_token_scales: f32 `[pages, page_size, K]`, scales of values.
      v_token_zeros: f32 `[pages, page_size, K]`, added to scaled values.
      out_dtype: the dtype of `out` for queries in float8_e4m3fn, bfloat16 by default.

    Raises:
      ValueError: scales of a wrong shape or dtype; the message names them.
    """
    options |= {"out_dtype": out_dtype}
    if k_block_scales is not None or v_block_scales is not None:
        _check_pages(k_pages, v_pages, tuple(_BLOCKS))
        dtype, size = _BLOCKS[str(k_pages.dtype)]
        of_keys, of_values = (
            _check_scales(name, x, (*pages.shape[:3], pages.shape[3] // size), dtype)
            for name, x, pages in (
                ("k_block_scales", k_block_scales, k_pages),
                ("v_block_scales", v_block_scales, v_pages),
            )
        )
        if (k_global_scale is None) != (v_global_scale is None):
            raise ValueError("k_global_scale and v_global_scale must be given together, as numbers")
        if k_global_scale is not None:
            options |= {"k_scale": k_global_scale, "v_scale": v_global_scale}
        return attention(q, k_pages, v_pages, stored=(PageScales(of_keys), PageScales(of_values)), **options)
    if any(x is not None for x in (k_channel_scales, k_channel_zeros, v_token_scales, v_token_zeros)):
        _check_pages(k_pages, v_pages, ("uint8",))
        of_channels, of_tokens = (k_pages.shape[0], *k_pages.shape[2:]), k_pages.shape[:3]
        of_keys, k_zeros = (
            _check_scales(name, x, of_channels)[:, None]
            for name, x in (("k_channel_scales", k_channel_scales), ("k_channel_zeros", k_channel_zeros))
        )
        of_values, v_zeros = (
            _check_scales(name, x, of_tokens)[..., None]
            for name, x in (("v_token_scales", v_token_scales), ("v_token_zeros", v_token_zeros))
        )
        stored = PageScales(of_keys, k_zeros), PageScales(of_values, v_zeros)
        return attention(q, k_pages, v_pages, stored=stored, **options)
    if k_descale is None and v_descale is None and q_descale is None:
        return attention(q, k_pages, v_pages, **options)
    _check_pages(k_pages, v_pages, SCALED_DTYPES)
    shape = (len(options["kv_lens"]), k_pages.shape[2])
    of_keys, of_values = (
        _check_scales(name, x, shape) for name, x in (("k_descale", k_descale), ("v_descale", v_descale))
    )
    if q_descale is not None:
        # The scale of queries multiplies the same logits, so it joins the scale of keys. Queries keep their numbers.
        of_keys, options["q_scale"] = of_keys * _check_scales("q_descale", q_descale, shape), 1.0
    stored = (PageScales(sequences=of_keys), PageScales(sequences=of_values))
    return attention(q, k_pages, v_pages, stored=stored, **options)


def _check_pages(k_pages: Any, v_pages: Any, dtypes: tuple[str, ...]) -> None:
    if not (k_pages.dtype == v_pages.dtype and str(k_pages.dtype) in dtypes):
        raise ValueError(
            f"k_pages and v_pages must have one dtype of {dtypes} with these scales, got {k_pages.dtype} and "
            f"{v_pages.dtype}"
        )


def _check_scales(name: str, x: Any, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """Return scales as an array. Raises `ValueError` unless they have this shape and dtype."""
    if x is None:
        raise ValueError(f"{name} must be given like the other scales, {dtype} {list(shape)}, got none")
    if x.shape != shape or str(x.dtype) != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}")
    return jnp.asarray(x)
