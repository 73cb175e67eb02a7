"""Block-sparse flash attention: the public call and its derivative rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from cases.masks import Full, Indexer, Mask, iter_leaves, relax_to_known
from impls.block_flash.backward import backward
from impls.block_flash.block_schedule import BlockFlashPlan
from impls.block_flash.block_sizes import look_up
from impls.block_flash.forward import Outputs, forward
from impls.block_flash.operand_blocks import Operands
from impls.captured_arrays import split_function
from impls.contract.implementation import validate_mask, validate_operands
from impls.dropout_bits import validate_dropout
from impls.explicit_sharding import accept_explicit_sharding
from impls.varying_axes import find_varying_axes, mark_varying


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
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    score_mod: Callable[..., jax.Array] | None = None,
    dropout_rate: float | None = None,
    dropout_key: jax.Array | None = None,
    save_residuals: bool = False,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Any:
    """Compute softmax attention block by block, skipping blocks that the mask hides.

    The result is `out_i = sum_j softmax_j(cap(scale <q_i, k_j> + bias_ij)) v_j` over the allowed `j`. Blocks follow Dao
    et al. 2022, arXiv:2205.14135. Memory is linear in the lengths if the mask is a formula of positions, not an array.
    Blocks that the mask leaves empty are never computed; segment ids only mask inside blocks. Query heads share
    key/value heads (Ainslie et al. 2023, arXiv:2305.13245) without copies of k and v.

    All operands except the slopes are differentiable in reverse mode, and so are arrays that `score_mod` captures. So
    is `logsumexp`; `max_logits` has gradient zero. The residuals of the backward pass are tagged `"out"` and
    `"logsumexp"` for `jax.checkpoint` policies. A query that may attend to nothing gets `out = 0`, `logsumexp = -inf`
    (or its sink) and `max_logits = -inf`. It passes no gradient.

    The operands and results are those of the contract (docs/contract.md, section 1).

    Args:
      mask: which pairs may attend. An `Indexer` in it may be traced: then blocks without a selected key are skipped at
        run time.
      score_mod: `(score, b, n, i, j) -> score`, applied to scaled logits before the soft cap. Called once per pair of
        blocks, with index arrays that broadcast. If it is a pytree, such as a `jax.tree_util.Partial`, its leaves are
        operands: they may be traced and have gradients.
      dropout_rate: the share of the weights that is dropped after the softmax (`impls.dropout_bits`).
      dropout_key: the key of `jax.random` that decides which weights are dropped.
      block_q: queries per block, at most all of them; the last block is padded internally. The default was measured for
        the device and the lengths (`block_sizes.TABLE`), or is 128 where nothing was measured.
      block_kv: keys per block, at most all of them, with a default chosen in the same way.

    Raises:
      ValueError: an operand, the mask or a block size is invalid; the message names it.
    """
    options: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks, "bias": bias, "alibi_slopes": alibi_slopes}
    validate_operands(q, k, v, segment_ids=segment_ids, scale=scale, score_mod=score_mod, **options)
    dropout_rate, dropout_key = validate_dropout(dropout_rate, dropout_key)
    batch, q_length, num_q_heads, head_dim = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    validate_mask(mask, batch, num_q_heads, q_length, kv_length)
    sizes = look_up(q_length, kv_length)
    selected = None
    if any(isinstance(leaf, Indexer) for leaf in iter_leaves(mask)):
        selected = jnp.asarray(mask.dense(q_length, kv_length))
    score, captured = split_function(score_mod)
    plan = BlockFlashPlan(
        mask=relax_to_known(mask),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        q_length=q_length,
        kv_length=kv_length,
        block_q=min(sizes["block_q"] if block_q is None else block_q, q_length),
        block_kv=min(sizes["block_kv"] if block_kv is None else block_kv, kv_length),
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        masked_at_run_time=segment_ids is not None or selected is not None,
        score_mod=score,
        dropout_rate=dropout_rate,
    )
    given = Operands(q, k, v, bias, alibi_slopes, sinks, segment_ids, selected, dropout_key, captured)
    operands = jax.tree.map(jnp.asarray, given)
    outputs = _attend(plan, mark_varying(operands, find_varying_axes(operands)))
    if not save_residuals:
        return outputs.out
    return outputs.out, {"logsumexp": outputs.logsumexp, "max_logits": outputs.max_logits}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: BlockFlashPlan, operands: Operands) -> Outputs:
    return forward(plan, operands)


def _flash_forward(plan: BlockFlashPlan, operands: Operands) -> tuple[Outputs, tuple[Operands, jax.Array, jax.Array]]:
    outputs = forward(plan, operands)
    out = checkpoint_name(outputs.out, "out")
    logsumexp = checkpoint_name(outputs.logsumexp, "logsumexp")
    return Outputs(out, logsumexp, outputs.max_logits), (operands, out, logsumexp)


def _flash_backward(
    plan: BlockFlashPlan, residuals: tuple[Operands, jax.Array, jax.Array], cotangents: Outputs
) -> tuple[Operands]:
    return (backward(plan, *residuals, cotangents.out, cotangents.logsumexp),)


_flash.defvjp(_flash_forward, _flash_backward)

# Jitted so that calls outside `jit` compile once for each plan, not once a call.
_attend = jax.jit(_flash, static_argnums=0)


def latent_attention(
    q: Float[Array, "B T N H"], latent: Float[Array, "B S H"], *, value_dim: int, scale: float, **options: Any
) -> Any:
    """Attend from all query heads to one latent vector per key (docs/contract.md, section 8), with gradients.

    Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) with the up-projections absorbed into
    q and into the layers after `out`. The gradient of the latent is the gradient of the keys plus, in the first
    `value_dim` coordinates, the gradient of the values. Both gradients are rounded to the latent's dtype before they
    are added. Memory is linear in the lengths.

    Args:
      q: queries `[B, T, N, H]`. The first `value_dim` coordinates multiply the compressed latent, the others its rotary
        part.
      latent: the compressed keys and values with their rotary part, `[B, S, H]`.
      value_dim: number of coordinates of the latent that are the value (its rank), at most `H`.
      scale: factor of `<q, latent>`. It belongs to the heads before absorption, so it does not follow from `H`.
      options: further arguments of `impls.block_flash.attention`, such as mask and segment ids.

    Returns:
      The results of `impls.block_flash.attention`, with `out [B, T, N, value_dim]`.

    Raises:
      ValueError: `latent`, `value_dim` or an option is invalid; the message names it.
      NotImplementedError: an option is not supported.
    """
    if latent.ndim != 3:
        raise ValueError(f"latent must have the axes [batch, length, depth], got shape {latent.shape}")
    if not 0 < value_dim <= latent.shape[2]:
        raise ValueError(f"value_dim must be from 1 to the depth of latent, {latent.shape[2]}, got {value_dim}")
    k = latent[:, :, None]
    return attention(q, k, k[..., :value_dim], scale=scale, **options)
