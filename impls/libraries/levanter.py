"""Adapters of the attention functions of Levanter that run on every platform.

Their docstrings are the documentation: https://github.com/marin-community/marin/tree/main/lib/levanter/src/levanter
"""

from __future__ import annotations

from typing import Any

import haliax as hax
import jax.numpy as jnp
from levanter.grug.attention import AttentionMask as GrugMask
from levanter.grug.attention._core import reference_attention
from levanter.grug.attention._xla_flash import xla_flash_attention
from levanter.layers.attention import AttentionBackend, default_ragged_paged_attention, dot_product_attention
from levanter.layers.attention_mask import AttentionMask

from impls.contract.declarations import declare

_BLOCK = 64
_ONE_DEPTH = {"v_head_dim": "names one axis for the depths of queries, keys and values"}
_ONE_MASK = {"dense_head": "takes masks [batch, queries, keys]"}


@declare(logits="input", softmax="input", scaled_q=True, group_sums="input", behind_mask="finite")
def vanilla(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    scale: Any = None,
) -> Any:
    """`levanter.layers.attention.dot_product_attention` with `AttentionBackend.VANILLA`."""
    return _call(
        AttentionBackend.VANILLA, None, q, k, v, causal, window, mask, segment_ids, soft_cap, sinks, bias, scale
    )


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    group_sums="input",
    block_sums=_BLOCK,
    behind_mask="finite",
    unsupported=_ONE_DEPTH,
)
def flash(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    scale: Any = None,
) -> Any:
    """The same with `AttentionBackend.JAX_FLASH`. It has no bias here, since the library refuses its gradient."""
    if q.shape[1] % _BLOCK or k.shape[1] % _BLOCK:
        raise NotImplementedError(f"levanter.flash needs lengths that blocks of {_BLOCK} divide")
    return _call(
        AttentionBackend.JAX_FLASH, _BLOCK, q, k, v, causal, window, mask, segment_ids, soft_cap, sinks, None, scale
    )


@declare(logits="input", softmax="input", scaled_q=True, behind_mask="finite", unsupported=_ONE_DEPTH)
def paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    soft_cap: Any = None,
    scale: Any = None,
) -> Any:
    """`default_ragged_paged_attention`, whose pages hold keys and values of each head next to each other."""
    tokens, heads, depth = q.shape
    pages, size, kv_heads, _ = k_pages.shape
    out = default_ragged_paged_attention(
        hax.named(
            q.reshape(tokens, kv_heads, heads // kv_heads, depth),
            ("position", "kv_head", "q_heads_per_group", "head_size"),
        ),
        hax.named(
            jnp.stack([k_pages, v_pages], axis=3).reshape(pages, size, 2 * kv_heads, depth),
            ("page", "slot", "kv_head", "head_size"),
        ),
        hax.named(kv_lens, ("seq",)),
        hax.named(page_indices, ("seq", "page")),
        cu_q_lens,
        num_seqs[0],
        sm_scale=depth**-0.5 if scale is None else scale,
        soft_cap=soft_cap,
    )
    return out.array.reshape(tokens, heads, depth).astype(q.dtype)


@declare(logits="input", scaled_q=True, group_sums="input", behind_mask="finite", unsupported=_ONE_MASK)
def grug(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
) -> Any:
    """`levanter.grug.attention.reference_attention` with logits in f32."""
    return reference_attention(
        q, k, v, _build_grug_mask(q, k, causal, window, mask, segment_ids), logits_dtype=jnp.float32
    )


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    group_sums="input",
    block_sums=16,
    behind_mask="finite",
    unsupported={**_ONE_MASK, **_ONE_DEPTH},
)
def grug_flash(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    segment_ids: Any = None,
) -> Any:
    """`levanter.grug.attention._xla_flash.xla_flash_attention`."""
    return xla_flash_attention(q, k, v, _build_grug_mask(q, k, causal, window, mask, segment_ids))


def _call(
    backend: Any,
    block: int | None,
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    window: Any,
    mask: Any,
    segment_ids: Any,
    soft_cap: Any,
    sinks: Any,
    bias: Any,
    scale: Any,
) -> Any:
    batch, q_length, heads, depth = q.shape
    kv_heads = k.shape[2]
    v_depth = "h" if backend == AttentionBackend.JAX_FLASH else "d"
    queries = hax.named(q.reshape(batch, q_length, kv_heads, heads // kv_heads, depth), ("b", "t", "k", "g", "h"))
    pairs = AttentionMask(is_causal=causal)
    if window is not None:
        left, right = window
        if left is None or right not in (0, left):
            raise NotImplementedError("levanter has windows of keys before the query, and symmetric ones")
        pairs = pairs.with_sliding_window(left + 1) if right == 0 else AttentionMask(causal, bidirectional_window=left)
    if segment_ids is not None:
        pairs = pairs.with_segment_ids(hax.named(segment_ids[0], ("b", "t")), hax.named(segment_ids[1], ("b", "s")))
    if mask is not None:
        pairs = pairs & AttentionMask.explicit(_name_pairs(mask, queries, k.shape[1]))
    out = dot_product_attention(
        "t",
        "s",
        "h",
        queries,
        hax.named(k, ("b", "s", "k", "h")),
        hax.named(v, ("b", "s", "k", v_depth)),
        mask=pairs,
        bias=None if bias is None else _name_pairs(bias, queries, k.shape[1]),
        attn_backend=backend,
        flash_block_size=block,
        logits_soft_cap=soft_cap,
        scaling_factor=scale,
        attn_sink=None if sinks is None else hax.named(sinks.reshape(kv_heads, -1), ("k", "g")),
    )
    array = out.rearrange(("b", "t", "k", "g", v_depth)).array
    return array.reshape(batch, q_length, heads, v.shape[3]).astype(q.dtype)


def _name_pairs(x: Any, queries: Any, kv_length: int) -> Any:
    """Name the axes of a mask or bias `[B, N, T, S]`, and leave out those along which it broadcasts."""
    names = ["b", "k", "g", "t", "s"]
    x = (
        x.reshape(x.shape[0], 1, 1, *x.shape[2:])
        if x.shape[1] == 1
        else x.reshape(x.shape[0], queries.axis_size("k"), queries.axis_size("g"), *x.shape[2:])
    )
    sizes = [*(queries.axis_size(name) for name in names[:4]), kv_length]
    kept = [i for i, size in enumerate(sizes) if x.shape[i] != 1 or size == 1]
    return hax.named(x.reshape([x.shape[i] for i in kept]), tuple(names[i] for i in kept))


def _build_grug_mask(q: Any, k: Any, causal: bool, window: Any, mask: Any, segment_ids: Any) -> Any:
    if mask is not None:
        if causal or window is not None or segment_ids is not None:
            raise NotImplementedError("grug takes a dense mask or a structured one, not both")
        return jnp.broadcast_to(mask, (q.shape[0], 1, q.shape[1], k.shape[1]))[:, 0]
    if window is not None and (window[0] is None or window[1] != 0):
        raise NotImplementedError("grug has windows of keys before the query only")
    pairs = GrugMask(is_causal=causal or window is not None, sliding_window=None if window is None else window[0] + 1)
    return pairs if segment_ids is None else pairs.with_segment_ids(*segment_ids)
