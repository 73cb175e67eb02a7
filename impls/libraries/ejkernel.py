"""Adapters of the attention functions of ejkernel that run on every platform (its `_xla` back end).

Their docstrings are the documentation: https://ejkernel.readthedocs.io/en/latest/api/
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from ejkernel.kernels._xla.attention import attention as ejkernel_attention
from ejkernel.kernels._xla.blocksparse_attention import blocksparse_attention
from ejkernel.kernels._xla.flash_attention import flash_attention
from ejkernel.kernels._xla.ring_attention import ring_attention
from ejkernel.kernels._xla.unified_attention import unified_attention

from impls.contract.declarations import declare

_DEPTHS = {"v_head_dim": "documents one head_dim for queries, keys and values, and its type check refuses another"}


@declare(
    logits="input",
    group_sums="input",
    block_sums=128,
    empty_rows="mean",
    behind_mask="finite",
    open_sides="length",
    negative_ids="padding",
    unsupported=_DEPTHS,
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
    bias: Any = None,
    scale: Any = None,
) -> Any:
    """`ejkernel.kernels._xla.flash_attention`, with sinks as documented: `[num_sinks]` or `[num_heads, num_sinks]`.

    Products are in the dtype of the operands, and the scans over blocks of 128 are differentiated by JAX.
    """
    q_segment_ids, kv_segment_ids = (None, None) if segment_ids is None else segment_ids
    return flash_attention(
        q,
        k,
        v,
        attention_mask=_share_mask(mask, q),
        bias=_broadcast_pairs(bias, q, k),
        softmax_scale=scale,
        causal=causal,
        sliding_window=window,
        logits_soft_cap=soft_cap,
        softmax_aux=None if sinks is None else sinks if sinks.shape[0] == 1 else sinks[:, None],
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
    )


@declare(
    soft_cap="before_bias",
    empty_rows="zero",
    behind_mask="finite",
    open_sides="length",
    negative_ids="padding",
    unsupported=_DEPTHS,
)
def ring(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    segment_ids: Any = None,
    soft_cap: Any = None,
    bias: Any = None,
    scale: Any = None,
) -> Any:
    """`ejkernel.kernels._xla.ring_attention` on one device.

    It has no sinks here, since the documented ones are for all heads together. Its documentation lists the bias after
    the soft cap.
    """
    q_segment_ids, kv_segment_ids = (None, None) if segment_ids is None else segment_ids
    return ring_attention(
        q,
        k,
        v,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        bias=_broadcast_pairs(bias, q, k),
        sliding_window=window,
        causal=causal,
        logits_soft_cap=soft_cap,
        softmax_scale=scale,
    )


@declare(
    logits="input",
    scaled_q=True,
    soft_cap="before_bias",
    empty_rows="mean",
    behind_mask="finite",
    open_sides="length",
    dropout_shared=("batch", "heads"),
)
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    bias: Any = None,
    scale: Any = None,
    dropout_rate: float | None = None,
    dropout_key: Any = None,
) -> Any:
    """`ejkernel.kernels._xla.attention`, which computes in `dtype` and documents that a bias replaces the mask.

    Its documentation lists the bias after the soft cap.
    """
    if bias is not None and mask is not None:
        raise NotImplementedError("ejkernel.attention documents that a bias takes precedence over the mask")
    out, _ = ejkernel_attention(
        q,
        k,
        v,
        attention_mask=_share_mask(mask, q),
        bias=_broadcast_pairs(bias, q, k),
        softmax_aux=sinks,
        softmax_scale=scale,
        logits_soft_cap=soft_cap,
        dtype=q.dtype,
        causal=causal,
        sliding_window=window,
        deterministic=not dropout_rate,
        dropout_rng=dropout_key,
        dropout_prob=dropout_rate or 0.0,
    )
    return out


@declare(
    logits="input",
    scaled_q=True,
    group_sums="input",
    empty_rows="zero",
    behind_mask="finite",
    open_sides="length",
    negative_ids="padding",
)
def blocksparse(
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
    """`ejkernel.kernels._xla.blocksparse_attention`, the reference of its kernels for GPUs and TPUs."""
    q_segment_ids, kv_segment_ids = (None, None) if segment_ids is None else segment_ids
    out = blocksparse_attention(
        *(jnp.swapaxes(x, 1, 2) for x in (q, k, v)),
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        softmax_aux=sinks,
        attention_mask=_share_mask(mask, q),
        logits_soft_cap=soft_cap,
        softmax_scale=scale,
        sliding_window=window,
        causal=causal,
    )
    return jnp.swapaxes(out, 1, 2)


@declare(empty_rows="zero", behind_mask="finite", unsupported={"v_head_dim": "checks that both caches have one shape"})
def unified(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    window: Any = None,
    soft_cap: Any = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    scale: Any = None,
) -> Any:
    """`ejkernel.kernels._xla.unified_attention`: queries see the last `sliding_window` keys, their own among them.

    Slopes multiply the place of a key after the sequence's first query, as in vLLM, and not its distance. The softmax
    cancels the difference unless there is a sink or a soft cap.
    """
    if alibi_slopes is not None and (sinks is not None or soft_cap is not None):
        raise NotImplementedError("alibi_slopes with sinks or a soft cap have another meaning than in the contract")
    return unified_attention(
        q,
        k_pages,
        v_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        alibi_slopes=alibi_slopes,
        softmax_aux=sinks,
        softmax_scale=scale,
        sliding_window=None if window is None else window[0] + 1,
        logits_soft_cap=soft_cap,
    )


def _share_mask(mask: Any, q: Any) -> Any:
    """Return the mask with four axes and the batch size of the queries; None without a mask."""
    return None if mask is None else jnp.broadcast_to(mask, (q.shape[0], *((1, 1, 1, *mask.shape)[-3:])))


def _broadcast_pairs(x: Any, q: Any, k: Any) -> Any:
    """Broadcast a bias to `[batch, num_heads, seq_len_q, seq_len_k]`, the only documented shape."""
    return None if x is None else jnp.broadcast_to(x, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
