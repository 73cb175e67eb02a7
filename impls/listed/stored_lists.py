"""Attention to listed keys over packed and paged operands: the public calls.

Lists name places within a query's own sequence. `_find_places` finds the sequence and position of each query, and each
call then turns places into rows of its memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from impls.contract.implementation import FLOATS
from impls.listed.attention import BLOCK, add_local_window
from impls.listed.listed_rows import Operands, RowsPlan, attend_rows
from impls.packed_sequences import Side, build_tables, check_packed_operands, resolve_window
from impls.paged.attention import check_options, check_paged_operands, check_tables
from impls.paged.paged_update import write_tokens


class _Places(NamedTuple):
    """The listed places of each query, and whether it attends to them."""

    sequence: Int32[Array, " R"]  # the sequence of each query; any for queries past the last
    place: Int32[Array, "R e"]
    sees: Bool[Array, "R e"]


def packed_attention(
    q: Float[Array, "total_q N H"],
    k: Float[Array, "total_kv K H"],
    v: Float[Array, "total_kv K V"],
    *,
    indices: Int[Array, "total_q e"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    cu_kv_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    causal: bool = False,
    window: tuple[Side, Side] | None = None,
    local_window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    block: int = BLOCK,
) -> Any:
    """Attend from packed queries to listed keys of their own sequences, with gradients.

    The operands and results are those of packed calls in the contract (docs/contract.md, section 8). With
    `local_window`, queries attend to the keys of this window too (section 3, lists of keys).

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
    """
    check_packed_operands(q, k, v, sinks, soft_cap, scale)
    tables = build_tables(cu_q_lens, cu_kv_lens, num_seqs)
    _check_indices(indices, q, block)
    kv_lens = jnp.diff(tables.cu_kv_lens)
    found = _find_places(
        indices, kv_lens, tables.cu_q_lens, tables.num_seqs, resolve_window(causal, window), local_window
    )
    rows = jnp.where(found.sees, tables.cu_kv_lens[found.sequence][:, None] + found.place, -1)
    return _attend(q, k, v, rows, sinks, scale, soft_cap, save_residuals, block)


def paged_attention(
    q: Float[Array, "total_q N H"],
    k_pages: Float[Array, "pages page_size K H"],
    v_pages: Float[Array, "pages page_size K V"],
    *,
    indices: Int[Array, "total_q e"],
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    window: tuple[int | None, int] | None = None,
    local_window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    block: int = BLOCK,
) -> Any:
    """Attend causally from packed queries to listed keys in pages.

    The operands and results are those of paged calls in the contract (docs/contract.md, section 8). With
    `local_window`, queries attend to the keys of this window too (section 3, lists of keys).

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
    """
    check_paged_operands(q, k_pages, v_pages, sinks, window, None, None)
    check_tables(kv_lens, page_indices, cu_q_lens, num_seqs)
    _check_indices(indices, q, block)
    tables = tuple(jnp.asarray(x, jnp.int32) for x in (kv_lens, page_indices, cu_q_lens, num_seqs))
    rows = _locate_in_pages(indices, tables, k_pages.shape[1], window, local_window)
    k, v = (jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in (k_pages, v_pages))
    return _attend(q, k, v, rows, sinks, scale, soft_cap, save_residuals, block)


def paged_attention_with_update(
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
    update_kv_cache: bool = True,
    save_residuals: bool = False,
    **options: Any,
) -> Any:
    """Write new keys and values into pages, then attend to listed keys, new ones too.

    The operands and results are those of calls that write pages (docs/contract.md, section 8). `options` are those of
    `paged_attention`.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
    """
    check_tables(kv_lens, page_indices, cu_q_lens, num_seqs)
    tables: dict[str, Any] = {
        "kv_lens": kv_lens,
        "page_indices": page_indices,
        "cu_q_lens": cu_q_lens,
        "num_seqs": num_seqs,
    }
    pools: tuple[Any, Any] = (k_pages, v_pages)
    if update_kv_cache:
        pools = (write_tokens("k", k, k_pages, **tables), write_tokens("v", v, v_pages, **tables))
    found = paged_attention(q, pools[0], pools[1], **tables, save_residuals=save_residuals, **options)
    return (*found, *pools) if save_residuals else (found, *pools)


def latent_pages_attention(
    q: Float[Array, "total_q N H"],
    latent_pages: Float[Array, "pages page_size H"],
    *,
    value_dim: int,
    scale: float,
    indices: Int[Array, "total_q e"],
    kv_lens: Int[Array, " max_seqs"],
    page_indices: Int[Array, "max_seqs pages_per_seq"],
    cu_q_lens: Int[Array, " max_seqs+1"],
    num_seqs: Int[Array, "1"],
    window: tuple[int | None, int] | None = None,
    local_window: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    save_residuals: bool = False,
    block: int = BLOCK,
) -> Any:
    """Attend causally from packed queries to listed latents in pages, which all heads share.

    The operands and results are those of the contract for latents in pages (docs/contract.md, section 8). With
    `local_window`, queries attend to the keys of this window too (section 3, lists of keys).

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
    """
    if latent_pages.ndim != 3:
        raise ValueError(f"latent_pages must have the axes [pages, page_size, depth], got shape {latent_pages.shape}")
    if not 0 < value_dim <= latent_pages.shape[2]:
        raise ValueError(f"value_dim must be from 1 to the depth of latent_pages, {latent_pages.shape[2]}")
    check_options(q.shape[1], sinks, window, None, None)
    check_tables(kv_lens, page_indices, cu_q_lens, num_seqs)
    _check_indices(indices, q, block)
    if not (q.dtype == latent_pages.dtype and str(q.dtype) in FLOATS):
        raise ValueError(f"q and latent_pages must have one dtype of {FLOATS}, got {q.dtype} and {latent_pages.dtype}")
    tables = tuple(jnp.asarray(x, jnp.int32) for x in (kv_lens, page_indices, cu_q_lens, num_seqs))
    rows = _locate_in_pages(indices, tables, latent_pages.shape[1], window, local_window)
    k = jnp.asarray(latent_pages).reshape(-1, 1, latent_pages.shape[2])
    return _attend(q, k, k[..., :value_dim], rows, sinks, scale, soft_cap, save_residuals, block)


def _find_places(
    indices: Any,
    kv_lens: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    sides: tuple[Side, Side],
    local_window: tuple[int, int] | None,
) -> _Places:
    """Find the sequence of each query, and which entries of its list it attends to, with `sides` of a window.

    Keys of `local_window` are further entries.
    """
    count, token = num_seqs[0], jnp.arange(len(indices), dtype=jnp.int32)
    exists = jnp.arange(len(kv_lens), dtype=jnp.int32) < count
    ends = jnp.where(exists, cu_q_lens[1:], cu_q_lens[count])
    sequence = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
    sequence = jnp.minimum(sequence, len(kv_lens) - 1)
    kv_len = kv_lens[sequence]
    position = (kv_len - (ends[sequence] - token))[:, None]
    place = jnp.asarray(indices, jnp.int32)
    if local_window is not None:
        place = add_local_window(place, position, local_window)
    sees = (place >= 0) & (place < kv_len[:, None]) & (token < cu_q_lens[count])[:, None]
    left, right = sides
    if left is not None:
        sees &= place >= position - left
    if right is not None:
        sees &= place <= position + right
    return _Places(sequence, place, sees)


def _locate_in_pages(
    indices: Any, tables: tuple[Array, ...], page_size: int, window: Any, local_window: Any
) -> Int32[Array, "R e"]:
    """Find the row of the pool, `page * page_size + row of the page`, of each entry that is attended to; else -1."""
    kv_lens, page_indices, cu_q_lens, num_seqs = tables
    found = _find_places(
        indices, kv_lens, cu_q_lens, num_seqs, (None if window is None else window[0], 0), local_window
    )
    slot = jnp.where(found.sees, found.place // page_size, 0)
    page = page_indices[found.sequence[:, None], slot]
    return jnp.where(found.sees, page * page_size + found.place % page_size, -1)


def _attend(
    q: Any, k: Any, v: Any, rows: Any, sinks: Any, scale: Any, soft_cap: Any, save_residuals: bool, block: int
) -> Any:
    plan = RowsPlan(
        num_kv_heads=k.shape[1],
        scale=1 / math.sqrt(q.shape[2]) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        block=min(block, len(q)),
    )
    q, k, v = map(jnp.asarray, (q, k, v))
    sinks = None if sinks is None else jnp.asarray(sinks)
    out, logsumexp, max_logits = attend_rows(plan, Operands(q, k, v, rows, sinks))
    return (out, {"logsumexp": logsumexp, "max_logits": max_logits}) if save_residuals else out


def _check_indices(indices: Any, q: Any, block: int) -> None:
    """Raise `ValueError` for lists of a wrong shape or dtype, or a block that is not positive."""
    if indices.ndim != 2 or len(indices) != len(q):
        raise ValueError(f"indices must have shape ({len(q)}, entries), got {indices.shape}")
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        raise ValueError(f"indices must be signed integers, got {indices.dtype}")
    if block < 1:
        raise ValueError(f"block must be positive, got {block}")
