"""Adapters of the attention kernels of MaxText that do not need its models.

Their docstrings are the documentation: https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/kernels/attention
Callers scale the queries, as MaxText's models do.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from maxtext.kernels.attention.jax_flash_attention import SegmentIds, flash_attention_block_masked
from maxtext.kernels.attention.ragged_attention import ragged_gqa, ragged_mha

from conformance import declare

_RANGE = "takes a length for each sequence, and no other mask"
_ONE_QUERY = "takes one query for each sequence"
_RAGGED = {
    "train": f"{_ONE_QUERY}, and has no gradients",
    "prefill": _ONE_QUERY,
    **dict.fromkeys(("window", "chunked", "bidirectional", "balanced", "dense_head", "dense_batch", "indexer"), _RANGE),
    "dense": _RANGE,
    "v_head_dim": "has one array of statistics for queries and values of one depth",
}
_NO_GROUPS = "has as many key/value heads as query heads; ragged_gqa has fewer"
_BLOCK = 128


@declare(
    logits="input",
    softmax="input",
    group_sums="input",
    block_sums=_BLOCK,
    scaled_q=True,
    residuals="input",
    behind_mask="finite",
    differentiable_residuals=False,
    unsupported={"dense_head": "takes one mask for all heads"},
)
def flash(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    segment_ids: Any = None,
    soft_cap: Any = None,
    scale: Any = None,
    save_residuals: bool = False,
) -> Any:
    """`flash_attention_block_masked` with logits in the dtype of the queries, as documented for full precision.

    Logits are not fused, since that does not support gradients. All sums are in the dtype of the queries.
    """
    q_length, kv_length = q.shape[1], k.shape[1]
    pairs = jnp.ones((q_length, kv_length), bool)
    if mask is not None:
        pairs = jnp.broadcast_to(mask, (q.shape[0], 1, q_length, kv_length))[:, 0]
    found = flash_attention_block_masked(
        *(jnp.swapaxes(x, 1, 2) for x in (_scale(q, scale), k, v)),
        None if segment_ids is None else SegmentIds(*segment_ids),
        _find_block(kv_length),
        _find_block(q_length),
        pairs,
        -0.7 * float(jnp.finfo(q.dtype).max),  # type: ignore[no-untyped-call] # untyped upstream
        soft_cap,
        save_residuals,
        logits_dtype=q.dtype,
        loop_unroll=False,
        fuse_logits=False,
    )
    out, residuals = found if save_residuals else (found, None)
    out = jnp.swapaxes(out, 1, 2)
    return (out, residuals) if save_residuals else out


@declare(scaled_q=True, behind_mask="finite", unsupported={**_RAGGED, "gqa": _NO_GROUPS, "mqa": _NO_GROUPS})
def mha(q: Any, k: Any, v: Any, *, mask: Any = None, scale: Any = None) -> Any:
    """`ragged_mha` in the interpreter of Pallas, over a cache of which each sequence fills the first keys."""
    return _call_ragged(ragged_mha, q, k, v, mask, scale)


@declare(scaled_q=True, behind_mask="finite", unsupported=_RAGGED)
def gqa(q: Any, k: Any, v: Any, *, mask: Any = None, scale: Any = None) -> Any:
    """`ragged_gqa` in the interpreter of Pallas, over a cache of which each sequence fills the first keys."""
    return _call_ragged(ragged_gqa, q, k, v, mask, scale)


def _call_ragged(kernel: Any, q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
    lengths = jnp.full(k.shape[0], k.shape[1], jnp.int32)
    if mask is not None:
        lengths = jnp.broadcast_to(mask.sum(axis=(1, 2, 3), dtype=jnp.int32), lengths.shape)
    out, _, total = kernel(_scale(q, scale), k, v, lengths, interpret=True)
    return (out / total).astype(q.dtype)


def _scale(q: Any, scale: Any) -> Any:
    return q * (q.shape[-1] ** -0.5 if scale is None else scale)


def _find_block(length: int) -> int:
    """Find the largest block that divides the length: the library refuses others."""
    return next(size for size in range(min(length, _BLOCK), 0, -1) if length % size == 0)
