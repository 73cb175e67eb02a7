"""Splash attention by the call of the contract: it builds a kernel for the mask, caches it, and runs it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cases.masks import Full, Indexer, Mask, iter_leaves
from impls.contract.implementation import validate_mask, validate_operands
from impls.dropout_bits import validate_dropout
from impls.explicit_sharding import accept_explicit_sharding
from impls.jax_compat import Interpret
from impls.splash_tpu.splash_kernel import Splash, make_splash, make_splash_dynamic
from impls.splash_tpu.splash_plan import BlockSizes, Depths, Layouts, Precision
from impls.splash_tpu.splash_tuning import look_up

UNSUPPORTED = {
    "bias": "takes no bias",
    "f16": "the matrix unit multiplies bfloat16 and float32, not float16",
}


@accept_explicit_sharding
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask = Full(),
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Any = None,
    scale: float | None = None,
    dropout_rate: float | None = None,
    dropout_key: jax.Array | None = None,
    save_residuals: bool = False,
    block_sizes: BlockSizes | None = None,
    layouts: Layouts = Layouts(),
    precision: Precision = "exact",
    interpret: Interpret = None,
) -> Any:
    """Compute softmax attention on a TPU, skipping blocks that the mask hides.

    The result is `out_i = sum_j softmax_j(cap(scale <q_i, k_j>)) v_j` over the allowed `j`, by the algorithm of Dao
    2023, arXiv:2307.08691. Query heads share key/value heads without copies of k and v. Every operand is differentiable
    in reverse mode. So is `logsumexp`; `max_logits` has gradient zero. The residuals of the backward pass are tagged
    `"splash_residuals"` for `jax.checkpoint` policies. A query that may attend to nothing gets `out = 0`,
    `logsumexp = -inf` (or its sink) and `max_logits = -inf`.

    Operands in bf16 or f32 and results are those of the contract (docs/contract.md, section 1).

    Args:
      mask: which pairs may attend. An `Indexer` may be traced.
      dropout_rate: the share of the weights that is dropped after the softmax (`impls.dropout_bits`).
      dropout_key: the key of `jax.random` that decides which weights are dropped.
      block_sizes: block sizes of each phase, by default those of the table for the target chip
        (`splash_tuning.look_up`). If their `fused_backward` is None, the table decides that too.
      layouts: which axis of q, k and v is innermost in memory.
      precision: whether products of f32 operands are `"exact"`, or round the operands to `"bf16"`.
      interpret: as for `pallas_call`; by default true unless the process runs on a TPU.

    Raises:
      NotImplementedError: there is a bias, or operands are float16.
      ValueError: an operand, the mask or a block size is invalid; the message names it.
    """
    validate_operands(q, k, v, segment_ids=segment_ids, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale)
    dropout_rate, dropout_key = validate_dropout(dropout_rate, dropout_key)
    if bias is not None:
        raise NotImplementedError(f"splash_tpu does not support bias: {UNSUPPORTED['bias']}")
    if q.dtype == jnp.float16:
        raise NotImplementedError(f"splash_tpu does not support f16: {UNSUPPORTED['f16']}")
    batch, q_length, num_q_heads, _ = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    validate_mask(mask, batch, num_q_heads, q_length, kv_length)
    if block_sizes is None or block_sizes.fused_backward is None:
        depths = Depths(q.shape[3], v.shape[3], q.dtype.itemsize)
        plain = mask.is_computed and segment_ids is None and soft_cap is None
        kept = look_up(mask, kv_length, depths, plain=plain)
        own = kept if block_sizes is None else block_sizes
        block_sizes = dataclasses.replace(own, fused_backward=kept.fused_backward)
    options: dict[str, Any] = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "block_sizes": block_sizes,
        "layouts": layouts,
        "scale": scale,
        "soft_cap": soft_cap,
        "precision": precision,
        "dropout_rate": dropout_rate,
        # Always computed, so that calls with and without residuals share one kernel. One more row per head is cheap.
        "save_max_logits": True,
        "checkpoint_name": "splash_residuals",
        "interpret": interpret,
    }
    if any(isinstance(leaf, Indexer) for leaf in iter_leaves(mask)):
        kernel = make_splash_dynamic(jnp.asarray(mask.dense(q_length, kv_length)), **options)
    else:
        kernel = _build_kernel(mask, q_length, kv_length, **options)
    heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
    result = kernel(
        *heads_first, segment_ids=segment_ids, sinks=sinks, dropout_key=dropout_key, save_residuals=save_residuals
    )
    if not save_residuals:
        return result.swapaxes(1, 2)
    return result[0].swapaxes(1, 2), result[1]


@functools.lru_cache(maxsize=256)
def _build_kernel(mask: Mask, q_length: int, kv_length: int, **options: Any) -> Splash:
    """Build a kernel, or return it from the cache: the same call does not build its schedule again."""
    return make_splash(mask, q_length, kv_length, **options)
