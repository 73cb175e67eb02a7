"""Attention that first writes the keys and values, or the latents, of its queries' tokens into pages, as servers do.

The token of query `i` of sequence `b` is key `j = kv_len - q_len + i` of the sequence. It lies in row `j % page_size`
of page `page_indices[b, j // page_size]`. The call returns new arrays of pages, which differ from its operands only in
these rows. Under `jax.jit` with `donate_argnames=("k_pages", "v_pages")`, or `("latent_pages",)`, they reuse the
operands' memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from cases.quantization import find_largest
from impls.paged.attention import attention, check_paged_operands, check_tables, widen_queries
from impls.paged.paged_latent import latent_attention

_MAX_INT32 = 2**31 - 1  # larger than the index of every token


def attention_with_update(
    q: Shaped[Array, "total_q N H"],
    k: Float[Array, "total_q K H"],
    v: Float[Array, "total_q K V"],
    k_pages: Shaped[Array, "pages page_size K H"],
    v_pages: Shaped[Array, "pages page_size K V"],
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    k_scales: Float32[Array, "pages page_size K"] | None = None,
    v_scales: Float32[Array, "pages page_size K"] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    update_kv_cache: bool = True,
    q_scale: float | None = None,
    out_dtype: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    **options: Any,
) -> Any:
    """Write new keys and values into pages, then attend to them and to what was there (docs/contract.md, section 8).

    The operands are those of calls that write pages (docs/contract.md, section 8).

    Args:
      k_scales: the scales of int8 or float8_e4m3fn pages, if each token and head has its own. Those of new keys are
        computed, and written as the keys are.
      v_scales: the same for values.
      k_scale: one scale for all keys, by which new keys are divided before they are rounded.
      v_scale: the same for values.
      update_kv_cache: if False, the pages already hold the new tokens: `k` and `v` are ignored, and nothing is written.
      q_scale: the scale of queries in float8_e4m3fn, a number.
      out_dtype: the dtype of `out` for such queries, bfloat16 by default.
      scale: the factor of `<q, k>`, by default `1 / sqrt(H)`.
      options: other ones of `impls.paged.attention.attention`.

    Returns:
      `(out, k_pages, v_pages)`, or `(out, {"logsumexp": ..., "max_logits": ...}, k_pages, v_pages)`; `out
      [total_q, N, V]` and residuals are those of `impls.paged.attention.attention`. With `k_scales` and `v_scales`,
      these follow the pages.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: differentiation.
    """
    tables: dict[str, Any] = {
        "kv_lens": kv_lens,
        "page_indices": page_indices,
        "cu_q_lens": cu_q_lens,
        "num_seqs": num_seqs,
    }
    q, scale = widen_queries(q, q_scale, scale, out_dtype)
    by_token, of_all = (k_scales, v_scales), (k_scale, v_scale)
    check_paged_operands(q, k_pages, v_pages, None, None, None, None, scales=by_token, of_all=of_all)
    check_tables(**tables)
    page, row = _find_slots(len(q), k_pages, **{name: jnp.asarray(x, jnp.int32) for name, x in tables.items()})
    pools: list[Any] = [k_pages, v_pages]
    scale_pools: list[Any] = list(by_token)
    for n, (name, x) in enumerate((("k", k), ("v", v)) if update_kv_cache else ()):
        scales: Any = of_all[n]
        if by_token[n] is not None:
            scales = _compute_scales(x, pools[n])
            scale_pools[n] = jnp.asarray(by_token[n]).at[page, row].set(scales, mode="drop")
        pools[n] = _write_rows(name, _quantize(name, x, pools[n], scales), pools[n], page, row)
    found = attention(
        q,
        pools[0],
        pools[1],
        **tables,
        k_scales=scale_pools[0],
        v_scales=scale_pools[1],
        k_scale=k_scale,
        v_scale=v_scale,
        scale=scale,
        save_residuals=save_residuals,
        **options,
    )
    returned = (*pools, *(x for x in scale_pools if x is not None))
    return (*found, *returned) if save_residuals else (found, *returned)


def _compute_scales(x: Any, pool: Any) -> jax.Array:
    """Compute the scale of each token and head, f32 `[total_q, K]`; 1 where all is zero."""
    peak = jnp.abs(jnp.asarray(x, jnp.float32)).max(axis=-1)
    return jnp.where(peak == 0, 1.0, peak / _get_largest(pool))


def _get_largest(pool: Any) -> float:
    largest = find_largest(pool.dtype)
    assert largest is not None  # `check_paged_operands` has refused other dtypes
    return largest


def _quantize(name: str, x: Any, pool: Any, scales: Any) -> Any:
    """Divide new tokens by their scales, if there are any, and round to the nearest number that the pool can hold.

    `scales` is a number for all tokens, or `[total_q, K]`.
    """
    if scales is None:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating-point, since {name}_scale quantises it, got {x.dtype}")
    largest = _get_largest(pool)
    divided = jnp.asarray(x, jnp.float32) / jnp.asarray(scales, jnp.float32)[..., None]
    clipped = jnp.clip(divided, -largest, largest)  # JAX casts what is larger than 448 to NaN
    return (jnp.round(clipped) if pool.dtype == jnp.int8 else clipped).astype(pool.dtype)


def latent_attention_with_update(
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
    save_residuals: bool = False,
    **options: Any,
) -> Any:
    """Write new latents into pages, then attend to them and to what was there (docs/contract.md, section 8).

    Queries and new latents come in two parts: the compressed part, which is the value too, and the rotary part. A row
    of a page holds both parts, in this order.

    Args:
      options: those of `impls.paged.paged_latent.latent_attention`.

    Returns:
      `(out, latent_pages)`, or `(out, {"logsumexp": ..., "max_logits": ...}, latent_pages)`.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: differentiation.
    """
    for name, x, content in (("q_pe", q_pe, q_nope), ("k_pe", k_pe, c_kv)):
        if x.shape[:-1] != content.shape[:-1] or x.dtype != content.dtype:
            must = f"{content.dtype}{list(content.shape[:-1])} as its compressed part"
            raise ValueError(f"{name} must be {must} in all axes but the last, got {x.dtype}{list(x.shape)}")
    tables: dict[str, Any] = {
        "kv_lens": kv_lens,
        "page_indices": page_indices,
        "cu_q_lens": cu_q_lens,
        "num_seqs": num_seqs,
    }
    check_tables(**tables)
    q, latent = (jnp.concatenate(parts, axis=-1) for parts in ((q_nope, q_pe), (c_kv, k_pe)))
    page, row = _find_slots(len(q), latent_pages, **{name: jnp.asarray(x, jnp.int32) for name, x in tables.items()})
    latent_pages = _write_rows("latent", latent, latent_pages, page, row)
    asked: dict[str, Any] = {"value_dim": q_nope.shape[-1], "scale": scale, "save_residuals": save_residuals}
    found = latent_attention(q, latent_pages, **asked, **tables, **options)
    return (*found, latent_pages) if save_residuals else (found, latent_pages)


def write_tokens(
    name: str,
    x: Float[Array, "total_q K D"],
    pool: Float[Array, "pages page_size K D"],
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
) -> jax.Array:
    """Return `pool` with the tokens of `x` in the rows that the tables say; `name` is for messages.

    Raises:
      ValueError: `x` has another shape or dtype than one token for each query.
    """
    tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    page, row = _find_slots(len(x), pool, **{n: jnp.asarray(table, jnp.int32) for n, table in tables.items()})
    return _write_rows(name, x, pool, page, row)


def _find_slots(
    total: int,
    pool: jax.Array,
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
) -> tuple[jax.Array, jax.Array]:
    """Find the page and the row of each of `total` tokens, int32 `[total]`; out of bounds for tokens not written."""
    pages, page_size = pool.shape[:2]
    most = len(kv_lens)
    token = jnp.arange(total, dtype=jnp.int32)
    # Entries past the last sequence may be any integers, but the search needs ascending ones.
    ends = jnp.where(jnp.arange(most) < num_seqs[0], cu_q_lens[1:], _MAX_INT32)
    sequence = jnp.minimum(jnp.searchsorted(ends, token, side="right"), most - 1).astype(jnp.int32)
    j = kv_lens[sequence] - cu_q_lens[sequence + 1] + token
    there = (token < cu_q_lens[num_seqs[0]]) & (j >= 0)
    page = page_indices[sequence, jnp.maximum(j, 0) // page_size]
    return jnp.where(there, page, pages), j % page_size


def _write_rows(name: str, x: Any, pool: Any, page: jax.Array, row: jax.Array) -> jax.Array:
    """Write the tokens of `x` to row `row` of page `page` of the pool."""
    if x.shape != (len(page), *pool.shape[2:]) or x.dtype != pool.dtype:
        must = f"one token of {name}_pages for each query, {pool.dtype}{[len(page), *pool.shape[2:]]}"
        raise ValueError(f"{name} must be {must}, got {x.dtype}{list(x.shape)}")
    return jnp.asarray(pool).at[page, row].set(jnp.asarray(x), mode="drop")
