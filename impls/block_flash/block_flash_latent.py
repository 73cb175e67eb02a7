"""Latent attention in its absorbed form by block flash: one key for all heads, whose first part is the value."""

from __future__ import annotations

from typing import Any

import jax

from impls.block_flash.attention import attention


def latent_attention(q: jax.Array, latent: jax.Array, *, value_dim: int, scale: float, **options: Any) -> Any:
    """Softmax attention of every query head to one latent (docs/contract.md, section 8), with gradients.

    Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) with the up-projections absorbed into
    q and into what follows `out`. The gradient of the latent is that of the keys and, in its first `value_dim`
    coordinates, that of the values too. Both are rounded to its dtype before they are added. Memory is linear in the
    lengths.

    Args:
      q: queries `[B, T, N, H]`: those of the rank, then those of the rotary part.
      latent: `[B, S, H]`.
      value_dim: the rank, at most `H`.
      scale: factor of `<q, latent>`: that of the heads that the latent stands for, whatever `H` is.
      options: those of `impls.block_flash.attention`: mask, segment ids and so on.

    Returns:
      As `impls.block_flash.attention`, with `out [B, T, N, value_dim]`.

    Raises:
      ValueError: `latent` or `value_dim` is not as above, or what that raises.
      NotImplementedError: what that raises.
    """
    if latent.ndim != 3:
        raise ValueError(f"latent must have the axes [batch, length, depth], got shape {latent.shape}")
    if not 0 < value_dim <= latent.shape[2]:
        raise ValueError(f"value_dim must be from 1 to the depth of latent, {latent.shape[2]}, got {value_dim}")
    k = latent[:, :, None]
    return attention(q, k, k[..., :value_dim], scale=scale, **options)
