"""Attention that first writes the keys and values of its queries' tokens into pages, as servers do.

The token of query `i` of sequence `b` is key `j = kv_len - q_len + i` of the sequence. It lies in row `j % page_size`
of page `page_indices[b, j // page_size]`. The call returns new arrays of pages, which differ from its operands only in
these rows. Under `jax.jit` with `donate_argnames=("k_pages", "v_pages")` they reuse the operands' memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from cases.storage_forms.paged_form import SCALES
from impls.paged.attention import attention, check_paged_operands, check_tables

_MAX_INT32 = 2**31 - 1  # larger than the index of every token


def attention_with_update(
    q: Float[Array, "total_q N H"],
    k: Float[Array, "total_q K H"],
    v: Float[Array, "total_q K V"],
    k_pages: Shaped[Array, "pages page_size K H"],
    v_pages: Shaped[Array, "pages page_size K V"],
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    k_scale: float | None = None,
    v_scale: float | None = None,
    save_residuals: bool = False,
    **options: Any,
) -> Any:
    """Write new keys and values into pages, then attend to them and to what was there (docs/contract.md, section 8).

    The operands are those of calls that write pages (docs/contract.md, section 8).

    Args:
      k_scale: for int8 or float8_e4m3fn pages, the number by which new keys are divided before they are rounded; also
        the factor of all keys.
      v_scale: the same for values.
      options: those of `impls.paged.attention.attention`.

    Returns:
      `(out, k_pages, v_pages)`, or `(out, {"logsumexp": ..., "max_logits": ...}, k_pages, v_pages)`; `out
      [total_q, N, V]` and residuals are those of `impls.paged.attention.attention`.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: differentiation, or a scale for each token and head, which can be read but not written.
    """
    if any(options.get(name) is not None for name in SCALES):
        raise NotImplementedError("k_scales: new scales are not computed, so pages with such scales can only be read")
    tables: dict[str, Any] = {
        "kv_lens": kv_lens,
        "page_indices": page_indices,
        "cu_q_lens": cu_q_lens,
        "num_seqs": num_seqs,
    }
    check_paged_operands(q, k_pages, v_pages, None, None, None, None, of_all=(k_scale, v_scale))
    k, v = _quantize("k", k, k_pages, k_scale), _quantize("v", v, v_pages, v_scale)
    check_tables(**tables)
    page, row = _find_slots(len(q), k_pages, **{name: jnp.asarray(x, jnp.int32) for name, x in tables.items()})
    k_pages, v_pages = _write_rows("k", k, k_pages, page, row), _write_rows("v", v, v_pages, page, row)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    found = attention(q, k_pages, v_pages, **tables, **scales, save_residuals=save_residuals, **options)
    return (*found, k_pages, v_pages) if save_residuals else (found, k_pages, v_pages)


def _quantize(name: str, x: Any, pool: Any, scale: float | None) -> Any:
    """Divide new tokens by the scale of the pool, if it has one, and round to the nearest number that it can hold."""
    if scale is None:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating-point, since {name}_scale quantises it, got {x.dtype}")
    divided = jnp.asarray(x, jnp.float32) / jnp.float32(scale)
    if pool.dtype == jnp.int8:
        return jnp.clip(jnp.round(divided), -127, 127).astype(jnp.int8)
    largest = float(jnp.finfo(pool.dtype).max)
    return jnp.clip(divided, -largest, largest).astype(pool.dtype)  # JAX casts what is larger to NaN


def _find_slots(
    total: int,
    k_pages: jax.Array,
    *,
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
) -> tuple[jax.Array, jax.Array]:
    """Find the page and the row of each of `total` tokens, int32 `[total]`; out of bounds for tokens not written."""
    pages, page_size = k_pages.shape[:2]
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
