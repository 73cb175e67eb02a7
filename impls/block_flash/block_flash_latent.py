"""Absorbed latent attention by block flash: one key for all heads, whose first coordinates are the value."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from impls.block_flash.attention import attention


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
