"""Adapters of the attention of MaxText: its kernels, and the operation `AttentionOp` of its models.

Their docstrings are the documentation: https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/kernels/attention
and `src/maxtext/layers/attention_op.py`. Callers scale the queries, as MaxText's models do. `AttentionOp` gets a
configuration that has only the fields that it reads, with the values of MaxText's `base.yml`. Products are exact,
as with `matmul_precision: highest`.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from maxtext.common.common_types import DEFAULT_MASK_VALUE, MODEL_MODE_TRAIN, AttentionType, ShardMode
from maxtext.kernels.attention.jax_flash_attention import SegmentIds, flash_attention_block_masked
from maxtext.kernels.attention.ragged_attention import ragged_gqa, ragged_mha
from maxtext.layers.attention_op import AttentionOp

from impls.contract.declarations import declare

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
_PARAMETERS = inspect.signature(AttentionOp.__call__).parameters
# Up to 0.2.4 the logits always had the dtype of the queries, and were never fused.
_HAS_LOGITS_DTYPE = "logits_dtype" in inspect.signature(flash_attention_block_masked).parameters


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
        pairs = _share_mask(mask, q, k) if _HAS_LOGITS_DTYPE else _share_batch(mask)
    found = flash_attention_block_masked(
        *(jnp.swapaxes(x, 1, 2) for x in (_scale(q, scale), k, v)),
        None if segment_ids is None else SegmentIds(*segment_ids),
        _find_block(kv_length),
        _find_block(q_length),
        pairs,
        -0.7 * float(jnp.finfo(q.dtype).max),
        soft_cap,
        save_residuals,
        **({"logits_dtype": q.dtype, "loop_unroll": False, "fuse_logits": False} if _HAS_LOGITS_DTYPE else {}),
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


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    behind_mask="finite",
    negative_ids="padding",
    unsupported={"dense_head": "an indexer mask is for all heads"},
)
def dot_product(
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
    """`AttentionOp` with `attention: dot_product`, in training; other masks are passed as an indexer mask."""
    left, right = (None, 0 if causal else None) if window is None else window
    if (left, right) != (None, None) and not causal and right != 0:
        raise NotImplementedError("a sliding window is causal")
    kind = (
        AttentionType.FULL if right is None else AttentionType.GLOBAL if left is None else AttentionType.LOCAL_SLIDING
    )
    if segment_ids is not None and "decoder_segment_ids_kv" not in _PARAMETERS:
        raise NotImplementedError("before 0.2.4, queries and keys have one array of segment ids")
    ids = {} if segment_ids is None else {"decoder_segment_ids_kv": segment_ids[1]}
    if mask is not None:
        ids["indexer_mask"] = jnp.where(_share_mask(mask, q, k), 0.0, DEFAULT_MASK_VALUE)
    options = {"attention_type": kind, "sliding_window_size": None if left is None else left + 1}
    operation = _build_operation(q, k, soft_cap, moba=None, **options)
    q_ids = None if segment_ids is None else segment_ids[0]
    return operation(_scale(q, scale), k, v, q_ids, None, MODEL_MODE_TRAIN, sinks=sinks, **ids)


@declare(
    logits="input",
    softmax="input",
    scaled_q=True,
    behind_mask="finite",
    unsupported={"full": "MoBA masks only"},
)
def moba(q: Any, k: Any, v: Any, *, moba: Any, soft_cap: Any = None, sinks: Any = None, scale: Any = None) -> Any:
    """`AttentionOp` with `moba: true` and `attention: dot_product`, in training: a mask of the chosen blocks."""
    if moba is None:
        raise NotImplementedError("a MoBA mask only")
    operation = _build_operation(q, k, soft_cap, moba=moba, attention_type=AttentionType.GLOBAL)
    return operation(_scale(q, scale), k, v, None, None, MODEL_MODE_TRAIN, sinks=sinks)


def _share_mask(mask: Any, q: Any, k: Any) -> Any:
    """Return a mask that all heads share as `[B, T, S]`."""
    return jnp.broadcast_to(mask, (q.shape[0], 1, q.shape[1], k.shape[1]))[:, 0]


def _share_batch(mask: Any) -> Any:
    """Return a mask `[T, S]` that all batch rows share, as the kernel takes it up to 0.2.4."""
    if mask.ndim > 2 and mask.shape[0] > 1:
        raise NotImplementedError("up to 0.2.4, all batch rows have one mask")
    return mask.reshape(mask.shape[-2:])


def _build_operation(q: Any, k: Any, soft_cap: Any, *, moba: Any, **options: Any) -> Any:
    chunk, topk = (1024, 8) if moba is None else moba
    config = types.SimpleNamespace(
        matmul_precision="highest",
        moba=moba is not None,
        moba_chunk_size=chunk,
        moba_topk=topk,
        ici_context_autoregressive_parallelism=0,
        context_parallel_strategy="all_gather",
        context_parallel_load_balance=True,
        context_parallel_size=1,
        logical_axis_rules=(),
        shard_mode=ShardMode.AUTO,
        debug_sharding=False,
    )
    return AttentionOp(
        config=config,
        mesh=jax.sharding.Mesh(np.array(jax.devices()), ("data",)),
        attention_kernel="dot_product",
        max_target_length=k.shape[1],
        num_query_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        dtype=q.dtype,
        attn_logits_soft_cap=soft_cap,
        **options,
    )


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
