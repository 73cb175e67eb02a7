"""Attention to listed keys over dense operands: the public calls."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cases.masks import Full, Listed, Mask, MaskFunction, has_formula, list_conjuncts
from impls.contract.implementation import validate_mask, validate_operands
from impls.explicit_sharding import accept_explicit_sharding
from impls.listed.listed_rows import Operands, RowsPlan, attend_rows

BLOCK = 64
"""Default number of queries that gather their keys together: reasoned, not measured."""


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    block: int = BLOCK,
) -> Any:
    """Compute softmax attention of each query to the keys of its list, as DeepSeek's sparse attention does.

    Only listed keys are read (DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1). So the work is proportional to the
    entries of the lists, and memory is linear in the lengths. q, k, v and sinks are differentiable in reverse mode. So
    is `logsumexp`; `max_logits` has gradient zero. The residuals of the backward pass are tagged `"out"` and
    `"logsumexp"` for `jax.checkpoint` policies.

    The operands and results are those of the contract (docs/contract.md, section 1).

    Args:
      mask: a `cases.masks.Listed`, whose array may be traced, joined by `&` with any masks that are formulas of
        positions. A query attends to the listed keys that these allow.
      block: queries that gather their keys together.

    Raises:
      ValueError: an operand, the mask or an option is invalid; the message names it.
      NotImplementedError: there is a bias, or the mask has no list of keys, or a part that is an array.
    """
    validate_operands(q, k, v, segment_ids=segment_ids, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale)
    if bias is not None:
        raise NotImplementedError("listed does not support bias: it gathers keys only")
    validate_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1], offers=("indices", "own_window"))
    if block < 1:
        raise ValueError(f"block must be positive, got {block}")
    lists, allows = split_lists(mask)
    options: dict[str, Any] = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "scale": scale}
    found = _attend(q, k, v, indices=lists.indices, allows=allows, block=block, **options)
    return (found[0], {"logsumexp": found[1], "max_logits": found[2]}) if save_residuals else found[0]


@accept_explicit_sharding
def _attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    indices: Any,
    allows: MaskFunction,
    segment_ids: Any,
    soft_cap: float | None,
    sinks: Any,
    scale: float | None,
    block: int,
) -> tuple[Any, Any, Any]:
    """Return `out [B, T, N, V]`, `logsumexp` and `max_logits [B, N, T]` of validated operands."""
    indices = jnp.asarray(indices, jnp.int32)
    batch, q_length, num_q_heads, head_dim = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    b, i = jnp.arange(batch, dtype=jnp.int32)[:, None, None], jnp.arange(q_length, dtype=jnp.int32)[:, None]
    sees = (indices >= 0) & allows(b, 0, i, indices)
    if segment_ids is not None:
        q_ids, kv_ids = map(jnp.asarray, segment_ids)
        sees &= kv_ids[b, jnp.maximum(indices, 0)] == q_ids[..., None]
    plan = RowsPlan(
        num_kv_heads=num_kv_heads,
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        block=min(block, batch * q_length),
    )
    rows = jnp.where(sees, b * kv_length + indices, -1)
    flat_q, flat_k, flat_v = (jnp.asarray(x).reshape(-1, *x.shape[2:]) for x in (q, k, v))
    sinks = None if sinks is None else jnp.asarray(sinks)
    found = attend_rows(plan, Operands(flat_q, flat_k, flat_v, rows.reshape(batch * q_length, -1), sinks))
    logsumexp, max_logits = (x.reshape(batch, q_length, -1).swapaxes(1, 2) for x in (found.logsumexp, found.max_logits))
    return found.out.reshape(batch, q_length, num_q_heads, -1), logsumexp, max_logits


def split_lists(mask: Mask) -> tuple[Listed, MaskFunction]:
    """Split a mask into lists of keys and a function of places.

    Raises:
      NotImplementedError: the mask has no list of keys or several, or a part that is an array.
    """
    parts = list_conjuncts(mask)
    lists = [part for part in parts if isinstance(part, Listed)]
    others = [part for part in parts if not isinstance(part, Listed)]
    if len(lists) != 1:
        raise NotImplementedError("indices: this implementation takes a mask with one Listed, joined by & with others")
    wrong = next((part for part in others if not has_formula(part)), None)
    if wrong is not None:
        raise NotImplementedError(f"{wrong.features[0]}: this implementation joins lists with formulas of places only")
    rest: Mask = Full()
    for part in others:
        rest &= part
    return lists[0], MaskFunction(rest)


def latent_attention(
    q: Float[Array, "B T N H"], latent: Float[Array, "B S H"], *, value_dim: int, scale: float, **options: Any
) -> Any:
    """Attend from all query heads to listed latents (docs/contract.md, section 8), with gradients.

    Args:
      q: queries `[B, T, N, H]`.
      latent: the latents, `[B, S, H]`.
      value_dim: number of leading coordinates of a latent that are its value, at most `H`.
      scale: factor of `<q, latent>`.
      options: further arguments of `attention`, such as the mask.

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
