"""Attention to listed keys over dense operands: the public calls."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from cases.masks import (
    HeadWindow,
    Listed,
    ListParts,
    Mask,
    MaskFunction,
    OwnWindow,
    VaryingWindow,
    Window,
    has_formula,
    iter_leaves,
    list_conjuncts,
    split_lists,
)
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
        positions and the same for all heads. A query attends to the listed keys that these allow. A window with two
        sides may be joined with the lists by `|`: a query then attends to its keys too, to each key once.
      block: queries that gather their keys together.

    Raises:
      ValueError: an operand, the mask or an option is invalid; the message names it.
      NotImplementedError: there is a bias, or the mask has no list of keys, or a part that is an array or differs by
        head.
    """
    validate_operands(q, k, v, segment_ids=segment_ids, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale)
    if bias is not None:
        raise NotImplementedError("listed does not support bias: it gathers keys only")
    validate_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1], offers=("indices", "own_window"))
    if block < 1:
        raise ValueError(f"block must be positive, got {block}")
    parts = split_mask(mask)
    options: dict[str, Any] = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "scale": scale}
    allows = MaskFunction(parts.rest)
    found = _attend(q, k, v, indices=parts.lists.indices, allows=allows, local=parts.local, block=block, **options)
    return (found[0], {"logsumexp": found[1], "max_logits": found[2]}) if save_residuals else found[0]


@accept_explicit_sharding
def _attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    indices: Any,
    allows: MaskFunction,
    local: Any,
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
    if local is not None:
        first = jnp.asarray(local.positions)[:, None, None] if isinstance(local, OwnWindow) else local.offset
        indices = add_local_window(indices, first + i, (local.left, getattr(local, "right", 0)))
        indices = jnp.where(indices < kv_length, indices, -1)
    sees = (indices >= 0) & allows(b, 0, i, indices)  # all heads are as head 0: `split_mask` has refused others
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


def split_mask(mask: Mask) -> ListParts:
    """Split a mask into lists of keys, formulas of places beside them, and a local window.

    Raises:
      NotImplementedError: the mask is of another form, has several lists, or has a part that is an array or differs by
        head.
    """
    parts = split_lists(mask)
    if parts is None or sum(isinstance(leaf, Listed) for leaf in iter_leaves(mask)) != 1:
        raise NotImplementedError("indices: this implementation takes a mask with one Listed, joined by & with others")
    wrong = next((part for part in list_conjuncts(parts.rest) if not has_formula(part)), None)
    if wrong is not None:
        raise NotImplementedError(f"{wrong.features[0]}: this implementation joins lists with formulas of places only")
    if any(isinstance(leaf, HeadWindow | VaryingWindow) for leaf in iter_leaves(parts.rest)):
        raise NotImplementedError("dense_head: this implementation joins lists with masks that all heads share")
    if parts.local is not None and not _is_closed(parts.local):
        raise NotImplementedError("local_window: this implementation joins lists with a window of two sides")
    return parts


def _is_closed(local: Mask) -> bool:
    """Return whether a window has two sides, and no first tokens besides."""
    if isinstance(local, Window):
        return local.left is not None and local.right is not None
    return isinstance(local, OwnWindow) and local.left is not None and not local.first


def add_local_window(
    lists: Int32[Array, "*rows e"], position: Int32[Array, "*rows 1"], sides: tuple[int, int]
) -> Int32[Array, "*rows e+w"]:
    """Add the keys of a window to lists, whose own entries in the window become -1, so that each key occurs once.

    Places before the first key become -1. Places past the last key are left in.
    """
    left, right = sides
    is_within = (lists >= position - left) & (lists <= position + right)
    near = jnp.maximum(position + jnp.arange(-left, right + 1, dtype=jnp.int32), -1)
    near = jnp.broadcast_to(near, (*lists.shape[:-1], near.shape[-1]))
    return jnp.concatenate([jnp.where(is_within, -1, lists), near], axis=-1)


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
