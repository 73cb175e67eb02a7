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
from jaxtyping import Array, Float, Int

from cases.storage_forms.paged_form import SCALES, WHOLE_SCALES
from impls.paged.attention import attention, check_paged_operands, check_tables
from impls.paged.paged_latent import latent_attention

_MAX_INT32 = 2**31 - 1  # larger than the index of every token


def attention_with_update(
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
    save_residuals: bool = False,
    **options: Any,
) -> Any:
    """Write new keys and values into pages, then attend to them and to what was there (docs/contract.md, section 8).

    The operands are those of calls that write pages (docs/contract.md, section 8).

    Args:
      options: those of `impls.paged.attention.attention`.

    Returns:
      `(out, k_pages, v_pages)`, or `(out, {"logsumexp": ..., "max_logits": ...}, k_pages, v_pages)`; `out
      [total_q, N, V]` and residuals are those of `impls.paged.attention.attention`.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: differentiation, or pages with scales, which can be read but not written.
    """
    if any(options.get(name) is not None for name in (*SCALES, *WHOLE_SCALES)):
        raise NotImplementedError("k_scales: new keys are not quantised, so pages with scales can only be read")
    tables: dict[str, Any] = {
        "kv_lens": kv_lens,
        "page_indices": page_indices,
        "cu_q_lens": cu_q_lens,
        "num_seqs": num_seqs,
    }
    check_paged_operands(q, k_pages, v_pages, None, None, None, None)
    check_tables(**tables)
    page, row = _find_slots(len(q), k_pages, **{name: jnp.asarray(x, jnp.int32) for name, x in tables.items()})
    k_pages, v_pages = _write_rows("k", k, k_pages, page, row), _write_rows("v", v, v_pages, page, row)
    found = attention(q, k_pages, v_pages, **tables, save_residuals=save_residuals, **options)
    return (*found, k_pages, v_pages) if save_residuals else (found, k_pages, v_pages)


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
