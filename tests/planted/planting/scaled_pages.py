"""Kernels over pages with scales of sequences, blocks and channels: correct ones in two styles, with steps for bugs.

`build_at_once` dequantises all keys and values of a query first. `build_by_page` adds one page after another to an
online softmax, and multiplies by scales after the products of stored numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from impls.contract.implementation import Implementation

Array = jax.Array
Step = Callable[..., Any]


def _read_exponents(scales: Array) -> Array:
    return scales.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSteps:
    """Steps from stored numbers to keys and values; the defaults are correct."""

    descales: Step = lambda k, v, q: (k, v, q)  # scales of sequences, [max_seqs, K] each
    sequence: Step = lambda sequence: sequence  # the row of the scales of a sequence
    heads: Step = lambda scales, group: jnp.repeat(scales, group, axis=-1)  # [..., K] to [..., N]
    numbers: Step = lambda x: x.astype(jnp.float32)  # what stored numbers mean
    blocks: Step = _read_exponents  # what scales of blocks [page_size, K, blocks] mean
    spread: Step = lambda scales, size: jnp.repeat(scales, size, axis=-1)  # [..., blocks] to [..., D]
    globals: Step = lambda k, v: (k, v)  # global scales, numbers
    of_page: Step = lambda pages: pages  # where the scales and zero points of keys lie, from page numbers
    zeros: Step = lambda zeros, scales: zeros  # what is added to scaled numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scales:
    """The scales of one call, as the kernel gets them; all are None or arrays, and the last pair numbers."""

    k_descale: Any = None
    v_descale: Any = None
    q_descale: Any = None
    k_block_scales: Any = None
    v_block_scales: Any = None
    k_channel_scales: Any = None
    k_channel_zeros: Any = None
    v_token_scales: Any = None
    v_token_zeros: Any = None
    k_global_scale: float = 1.0
    v_global_scale: float = 1.0


def _scale_keys(steps: ScaleSteps, scales: _Scales, x: Array, page: Array) -> Array:
    """Dequantise keys `[page_size, K, H]` of a page, except for scales of sequences and global scales."""
    x = steps.numbers(x)
    if scales.k_block_scales is not None:
        of_blocks = steps.blocks(scales.k_block_scales[page])
        x = x * steps.spread(of_blocks, x.shape[-1] // of_blocks.shape[-1])
    if scales.k_channel_scales is not None:
        of_channels, zeros = (y[steps.of_page(page)] for y in (scales.k_channel_scales, scales.k_channel_zeros))
        x = x * of_channels + steps.zeros(zeros, of_channels)
    return x


def _scale_values(steps: ScaleSteps, scales: _Scales, x: Array, page: Array) -> Array:
    x = steps.numbers(x)
    if scales.v_block_scales is not None:
        of_blocks = steps.blocks(scales.v_block_scales[page])
        x = x * steps.spread(of_blocks, x.shape[-1] // of_blocks.shape[-1])
    if scales.v_token_scales is not None:
        of_tokens, zeros = (y[page][..., None] for y in (scales.v_token_scales, scales.v_token_zeros))
        x = x * of_tokens + steps.zeros(zeros, of_tokens)
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """One query, and what it sees."""

    q: Array  # [N, H], times the factor of logits
    sequence: Array
    first: Array  # the first key that it sees
    end: Array  # one past the last
    pages: Array  # [pages_per_seq]


def _iter_descales(steps: ScaleSteps, scales: _Scales, row: _Row, heads: int) -> tuple[Array, Array]:
    """Return the factors of logits and of `out` by query head, `[N]`: scales of sequences and global scales."""
    of_keys, of_values = (jnp.full(heads, x, jnp.float32) for x in steps.globals(*_list_globals(scales)))
    if scales.k_descale is None:
        return of_keys, of_values
    at = steps.sequence(row.sequence)
    queries = jnp.ones_like(scales.k_descale) if scales.q_descale is None else scales.q_descale
    named = (x[at] for x in steps.descales(scales.k_descale, scales.v_descale, queries))
    k, v, q = (steps.heads(x, heads // len(x)) for x in named)
    return of_keys * (k * q), of_values * v


def _list_globals(scales: _Scales) -> tuple[float, float]:
    return scales.k_global_scale, scales.v_global_scale


def _attend_at_once(steps: ScaleSteps, scales: _Scales, row: _Row, k_pages: Array, v_pages: Array, cap: Any) -> Any:
    """Dequantise every key and value that one query sees: unnormalised `out [N, V]`, maximum and sum `[N]`."""
    size, heads = k_pages.shape[1], row.q.shape[0]
    j = jnp.arange(len(row.pages) * size)
    seen = (j >= row.first) & (j < row.end)
    pages = jnp.clip(row.pages, 0, len(k_pages) - 1)
    k, v = (
        jax.vmap(lambda page, x=x, scale=scale: scale(steps, scales, x[page], page))(pages)
        for x, scale in ((k_pages, _scale_keys), (v_pages, _scale_values))
    )
    k, v = (jnp.where(seen[:, None, None], x.reshape(-1, *x.shape[2:]), 0) for x in (k, v))
    of_keys, of_values = _iter_descales(steps, scales, row, heads)
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    x = cap(jnp.einsum("nh,snh->ns", row.q, k * of_keys[:, None], precision="highest"))
    x = jnp.where(seen, x, -jnp.inf)
    top = x.max(axis=-1)
    weights = jnp.where(seen, jnp.exp(x - jnp.where(jnp.isfinite(top), top, 0)[:, None]), 0)
    out = jnp.einsum("ns,snv->nv", weights, v * of_values[:, None], precision="highest")
    return out, top, weights.sum(axis=-1)


def _attend_by_page(steps: ScaleSteps, scales: _Scales, row: _Row, k_pages: Array, v_pages: Array, cap: Any) -> Any:
    """Add one page after another; scales multiply products, and zero points are added to logits and to `out`."""
    size, heads = k_pages.shape[1], row.q.shape[0]
    num_kv_heads = k_pages.shape[2]
    q = row.q.reshape(num_kv_heads, -1, row.q.shape[1])  # [K, G, H]
    of_keys, of_values = _iter_descales(steps, scales, row, heads)

    def multiply_keys(rows: Array, page: Array) -> Array:
        """Return `[K, G, page_size]` products of the query and keys."""
        rows = steps.numbers(rows)
        if scales.k_block_scales is not None:
            of_blocks = steps.blocks(scales.k_block_scales[page])
            wide = steps.spread(of_blocks, rows.shape[-1] // of_blocks.shape[-1])
            parts = q[:, :, None] * rows.swapaxes(0, 1)[:, None]
            return (parts * wide.swapaxes(0, 1)[:, None]).sum(axis=-1)
        if scales.k_channel_scales is not None:
            of_channels, zeros = (y[steps.of_page(page)] for y in (scales.k_channel_scales, scales.k_channel_zeros))
            folded = q * of_channels[:, None]
            added = (q * steps.zeros(zeros, of_channels)[:, None]).sum(axis=-1, keepdims=True)
            return jnp.einsum("kgh,skh->kgs", folded, rows, precision="highest") + added
        return jnp.einsum("kgh,skh->kgs", q, rows, precision="highest")

    def multiply_values(weights: Array, rows: Array, page: Array, seen: Array) -> Array:
        if scales.v_token_scales is None:
            x = jnp.where(seen[:, None, None], _scale_values(steps, scales, rows, page), 0)
            return jnp.einsum("kgs,skv->kgv", weights, x, precision="highest")
        of_tokens, zeros = (y[page].T[:, None] for y in (scales.v_token_scales, scales.v_token_zeros))  # [K, 1, s]
        of_tokens, zeros = (jnp.where(weights > 0, y, 0) for y in (of_tokens, zeros))
        x = jnp.einsum("kgs,skv->kgv", weights * of_tokens, steps.numbers(rows), precision="highest")
        return x + (weights * steps.zeros(zeros, of_tokens)).sum(axis=-1, keepdims=True)

    def add(slot: Array, old: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = old
        page = jnp.clip(row.pages[slot], 0, len(k_pages) - 1)
        j = slot * size + jnp.arange(size)
        seen = (j >= row.first) & (j < row.end)
        products = multiply_keys(jnp.where(seen[:, None, None], k_pages[page], jnp.zeros((), k_pages.dtype)), page)
        x = cap(products.reshape(heads, size) * of_keys[:, None])
        x = jnp.where(seen, x, -jnp.inf)
        new = jnp.maximum(top, x.max(axis=-1))
        shift = jnp.where(jnp.isfinite(new), new, 0)
        weights = jnp.where(seen, jnp.exp(x - shift[:, None]), 0)
        decay = jnp.where(jnp.isfinite(top), jnp.exp(top - shift), 0)
        rows = jnp.where(seen[:, None, None], v_pages[page], jnp.zeros((), v_pages.dtype))
        more = multiply_values(weights.reshape(num_kv_heads, -1, size), rows, page, seen).reshape(heads, -1)
        more = jnp.where(seen.any(), more, 0)
        return out * decay[:, None] + more, new, total * decay + weights.sum(axis=-1)

    nothing = jnp.zeros((heads, v_pages.shape[3])), jnp.full(heads, -jnp.inf), jnp.zeros(heads)
    out, top, total = jax.lax.fori_loop(0, len(row.pages), add, nothing)
    return out * of_values[:, None], top, total


def _build(attend: Step, name: str, steps: ScaleSteps, features: frozenset[str]) -> Implementation:
    def attention(
        q: Array,
        k_pages: Array,
        v_pages: Array,
        *,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        out_dtype: Any = None,
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        save_residuals: bool = False,
        **options: Any,
    ) -> Any:
        scales = _Scales(**options)
        dtype = q.dtype if out_dtype is None else out_dtype
        starts = jnp.where(jnp.arange(1, len(cu_q_lens)) <= num_seqs[0], cu_q_lens[1:], len(q) + 1)
        token = jnp.arange(len(q))
        sequence = jnp.minimum((token[:, None] >= starts).sum(axis=1), len(kv_lens) - 1)
        is_real = token < cu_q_lens[num_seqs[0]]
        position = kv_lens[sequence] - cu_q_lens[sequence + 1] + token
        first = jnp.zeros_like(position) if window is None else position - window[0]
        factor = q.shape[-1] ** -0.5 if scale is None else scale

        def cap(x: Array) -> Array:
            return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)

        def attend_row(q: Array, sequence: Array, first: Array, end: Array, pages: Array) -> Any:
            row = _Row(q=q, sequence=sequence, first=first, end=end, pages=pages)
            return attend(steps, scales, row, k_pages, v_pages, cap)

        wide = jnp.where(is_real[:, None, None], q.astype(jnp.float32), 0) * factor
        end = jnp.where(is_real, jnp.minimum(position + 1, kv_lens[sequence]), 0)
        out, top, total = jax.vmap(attend_row)(wide, sequence, first, end, page_indices[sequence])
        shift = jnp.where(jnp.isfinite(top), top, 0)
        sink: Any = 0.0
        if sinks is not None:  # the pivot is the larger of the sink and the largest logit
            new = jnp.maximum(top, sinks)
            old, shift = shift, jnp.where(jnp.isfinite(new), new, 0)
            decay = jnp.where(jnp.isfinite(top), jnp.exp(old - shift), 0)
            out, total, sink = out * decay[..., None], total * decay, jnp.exp(sinks - shift)
        total = total + sink
        some = jnp.where(total > 0, total, 1)
        found = (out / some[..., None]).astype(dtype)
        if not save_residuals:
            return found
        return found, {"logsumexp": jnp.where(total > 0, shift + jnp.log(some), -jnp.inf), "max_logits": top}

    return Implementation(
        name=name,
        call=attention,
        storage="paged",
        offers=features,
        supports_case=lambda case: None if case.kv_cache else "pages without scales",
        gradients=frozenset(),
        differentiable_residuals=frozenset(),
        empty_rows="zero",
        unsupported={"train": "a cache is read, not differentiated"},
        refuses_by_signature=True,
    )


def build_at_once(name: str, steps: ScaleSteps = ScaleSteps(), *, features: frozenset[str]) -> Implementation:
    """Build the kernel that dequantises all keys and values of a query first."""
    return _build(_attend_at_once, name, steps, features)


def build_by_page(name: str, steps: ScaleSteps = ScaleSteps(), *, features: frozenset[str]) -> Implementation:
    """Build the kernel that multiplies by scales after the products of stored numbers, page by page."""
    return _build(_attend_by_page, name, steps, features)
