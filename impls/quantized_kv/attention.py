"""Attention over a quantised cache: scale the products, or dequantise the cache first."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from cases.masks import Full, Mask
from impls.contract.implementation import validate_mask, validate_operands
from impls.dot_product.attention import attend, compute_allowed_pairs
from impls.explicit_sharding import accept_explicit_sharding
from impls.jax_compat import widen_int4

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
        # On a CPU, the maximum of a large array drops NaN (findings/jax-max-drops-nan.sh), and int8 cannot hold one.
        peak = jnp.where(jnp.isnan(x).any(axis=-1), jnp.nan, jnp.abs(x).max(axis=-1))
        scales = jnp.where(peak == 0, 1.0, peak / _MAX_VALUES[kind])
    scaled = x / scales[..., None]
    if kind != "fp8":
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, -_MAX_VALUES[kind], _MAX_VALUES[kind]).astype(_DTYPES[kind]), scales


Scales = tuple[Float32[Array, "#B #S K"], Float32[Array, "#B #S K"]]


@accept_explicit_sharding
def attention(
    q: Float[Array, "B T N H"],
    k: Shaped[Array, "B S K H"],
    v: Shaped[Array, "B S K V"],
    *,
    kv_scales: Scales | None = None,
    mask: Mask = Full(),
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    dequantize: bool = False,
) -> Any:
    """Attend over keys `k * k_scale` and values `v * v_scale`, with all logits in memory.

    Scales are factored out of both products, `<q, k_j> k_scale_j` and `sum_j (p_j v_scale_j) v_j`. So the products
    multiply the stored numbers in f32. This is possible because the scales are constant along the depth.

    The operands and results are those of the contract (docs/contract.md, section 1).

    Args:
      k: stored keys `[B, S, K, H]`, int8, int4 or float8_e4m3fn.
      v: stored values `[B, S, K, V]`, of one of these dtypes too.
      kv_scales: scales of k and of v, f32 `[B or 1, S or 1, K]`: per token, or per head.
      dequantize: multiply k and v by their scales first, and round them to q's dtype.

    Raises:
      ValueError: an operand is invalid; the message names it.
      NotImplementedError: there are no `kv_scales`; use `impls.dot_product`.
    """
    options: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks, "bias": bias, "scale": scale}
    validate_operands(q, k, v, segment_ids=segment_ids, kv_scales=kv_scales, **options)
    validate_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if kv_scales is None:
        raise NotImplementedError("kv_scales: only quantised caches; impls.dot_product takes plain keys and values")
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    k, v = (widen_int4(x) for x in (k, v))
    allowed = compute_allowed_pairs(mask, segment_ids, q.shape[1], k.shape[1], k.shape[2])
    options |= {"allowed": allowed, "save_residuals": save_residuals}
    if dequantize:
        k, v = (_dequantize(x, s).astype(q.dtype) for x, s in zip((k, v), kv_scales, strict=True))
        return attend(q, k, v, **options)
    k_scales, v_scales = (jnp.asarray(s, jnp.float32) for s in kv_scales)
    return attend(q, k, v, kv_scales=(k_scales, v_scales), **options)


def _dequantize(stored: jax.Array, scales: Any) -> jax.Array:
    return stored.astype(jnp.float32) * jnp.asarray(scales, jnp.float32)[..., None]
