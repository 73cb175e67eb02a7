"""Quantise keys and values of a cache to int8, int4 or fp8, with scales."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

Kind = Literal["int8", "int4", "fp8"]
_DTYPES = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}
_MAX_VALUES = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


def quantize(
    x: Float[Array, "B S K D"], kind: Kind, scales: Float[Array, "..."] | None = None
) -> tuple[Shaped[Array, "B S K D"], Float32[Array, "..."]]:
    """Quantise keys or values to few bits, `round(x / scale)`.

    Args:
      x: keys or values `[B, S, K, D]`.
      kind: int8 and int4 keep `|x - stored * scale| <= scale / 2`; fp8 is float8_e4m3fn, with 4 significant bits.
      scales: f32, broadcastable to `[B, S, K]`, from a calibration; larger values are clipped. By default one per token
        and head, `max |x| / 127` (7 for int4, 448 for fp8).

    Returns:
      The stored numbers `[B, S, K, D]`, and the scales.

    Raises:
      ValueError: x does not have four axes, or `kind` is unknown.
    """
    if kind not in _DTYPES:
        raise ValueError(f"kind must be one of {', '.join(_DTYPES)}, got {kind!r}")
    if x.ndim != 4:
        raise ValueError(f"x must have 4 axes, [batch, length, heads, depth], got shape {x.shape}")
    x = x.astype(jnp.float32)
    if scales is None:
        peak = jnp.abs(x).max(axis=-1)
        scales = jnp.where(peak == 0, 1.0, peak / _MAX_VALUES[kind])
    scaled = x / scales[..., None]
    if kind != "fp8":
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -_MAX_VALUES[kind], _MAX_VALUES[kind]).astype(_DTYPES[kind]), scales
