"""Compute attention in JAX, in any dtype, with either of two reference backward passes.

It is slow and easy to read, for users who want to compare with attention inside their own code. The checks do not use
it. They compare with the float64 oracle (`conformance.truth.oracle`), which shares no code with this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.masks import Full, Mask
from conformance.truth.oracle import Backward
from impls.contract.argument_validation import check_arguments
from impls.contract.implementation import FLOATS, validate_operands


def reference_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask | None = None,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    alibi_slopes: jax.Array | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: ScoreMod | None = None,
    save_residuals: bool = False,
    backward: Backward = "vanilla",
) -> Any:
    """Compute attention (docs/contract.md, section 2) with all `T * S` logits at once.

    It computes in f32, or in f64 for f64 operands.

    Args:
      q: `[B, T, N, H]`.
      k: `[B, S, K, H]`, `N % K == 0`.
      v: `[B, S, K, V]`.
      mask: the pairs of query and key that are allowed; all by default.
      segment_ids: int32 `[B, T]` and `[B, S]`. A query attends only to keys with the same id.
      soft_cap: logits become `soft_cap * tanh(x / soft_cap)`.
      sinks: `[N]`, one logit for each query head that joins the softmax denominator.
      bias: broadcastable to `[B, N, T, S]`, added after scaling.
      scale: factor of the logits, `1 / sqrt(H)` by default.
      alibi_slopes: `[N]`, constants: logits lose `slope * |i + S - T - j|` after scaling.
      mask_mod: `(b, n, i, j) -> booleans`, with `n` a query head. A pair must be allowed by both `mask_mod` and `mask`.
      score_mod: `(score, b, n, i, j) -> score`, applied to each scaled logit before the soft cap. Neither `mask_mod`
        nor `score_mod` may capture a traced array.
      save_residuals: also return `{"logsumexp", "max_logits"}`, both `[B, N, T]`; only `logsumexp` is differentiable.
      backward: `"vanilla"` differentiates the forward pass; `"flash"` recomputes the probabilities from the saved
        `logsumexp` and takes `D = <out, do>` from the saved, rounded `out` (arXiv:2205.14135, appendix B).

    Returns:
      `out [B, T, N, V]` in q's dtype, or `(out, residuals)`.

    Raises:
      ValueError: if an operand is wrong; the message names it.
      TypeError: if an argument has a wrong kind.
    """
    options: dict[str, Any] = {"segment_ids": segment_ids, "soft_cap": soft_cap, "sinks": sinks, "bias": bias}
    options |= {"scale": scale, "alibi_slopes": alibi_slopes, "score_mod": score_mod}
    validate_operands(q, k, v, **options, dtypes=(*FLOATS, "float64"))
    others = {"mask": mask, "mask_mod": mask_mod, "save_residuals": save_residuals, "backward": backward}
    check_arguments(reference_attention, others)
    allowed = jnp.asarray((mask or Full()).dense(q.shape[1], k.shape[1]))
    if segment_ids is not None:
        allowed = allowed & (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :])
    if mask_mod is not None:
        allowed = allowed & mask_mod(*_build_positions((*q.shape[:1], q.shape[2], q.shape[1], k.shape[1])))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    function = _attend if backward == "vanilla" else _attend_flash
    out, lse, top = function((q, k, v, sinks, bias, alibi_slopes), allowed, soft_cap, factor, score_mod)
    if not save_residuals:
        return out
    return out, {"logsumexp": lse, "max_logits": jax.lax.stop_gradient(top)}


_Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]


ScoreMod = Callable[..., jax.Array]
"""A function `(score, b, n, i, j) -> score`."""


def _build_positions(shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Return the indices `b, n, i, j` of logits `[B, N, T, S]`, each as an array along its own axis."""
    axes = range(len(shape))
    return tuple(jnp.arange(shape[axis]).reshape([-1 if axis == other else 1 for other in axes]) for axis in axes)


def _split_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """Reshape `[B, T, N, D]` to `[B, K, G, T, D]`."""
    batch, length, heads, depth = x.shape
    return x.reshape(batch, length, num_kv_heads, heads // num_kv_heads, depth).transpose(0, 2, 3, 1, 4)


def _merge_heads(x: jax.Array) -> jax.Array:
    """Reshape `[B, K, G, T, D]` to `[B, T, N, D]`."""
    batch, kv_heads, group, length, depth = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, depth)


def _dot(spec: str, *operands: jax.Array) -> jax.Array:
    """Multiply by `einsum` in the highest precision."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=operands[0].dtype)


def _compute_logits(
    operands: _Operands, allowed: jax.Array, soft_cap: float | None, scale: float, score_mod: ScoreMod | None
) -> tuple[jax.Array, Any]:
    """Compute capped, unmasked logits `[B, N, T, S]`, and their derivative with respect to the scaled logits."""
    q, k, _, _, bias, slopes = operands
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    x = scale * _dot("bkgth,bskh->bkgts", _split_heads(q.astype(dtype), k.shape[2]), k.astype(dtype))
    x = x.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias is not None:
        x = x + bias.astype(dtype)
    if slopes is not None:
        distance = jnp.abs(jnp.arange(x.shape[2])[:, None] + (x.shape[3] - x.shape[2]) - jnp.arange(x.shape[3]))
        x = x - jax.lax.stop_gradient(slopes).astype(dtype)[:, None, None] * distance.astype(dtype)
    slope: Any = 1.0
    if score_mod is not None:
        places = _build_positions(x.shape)
        # A hidden logit may be NaN. Its derivative would be NaN, and stay NaN when multiplied by 0. So it is zeroed.
        x, pullback = jax.vjp(lambda x: jnp.asarray(score_mod(x, *places), dtype), jnp.where(allowed, x, 0))
        (slope,) = pullback(jnp.ones_like(x))
    if soft_cap is None:
        return x, slope
    tanh = jnp.tanh(x / soft_cap)
    return soft_cap * tanh, slope * (1 - tanh**2)


def _attend(
    operands: _Operands, allowed: jax.Array, soft_cap: float | None, scale: float, score_mod: ScoreMod | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `out`, `logsumexp` and `max_logits`; JAX differentiates this function."""
    q, k, v, sinks, bias, slopes = operands
    allowed = jnp.broadcast_to(allowed, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    # Without this, NaN in a hidden key or value would reach dq as 0 * NaN when JAX differentiates this function.
    k, v = _zero_hidden(k, allowed), _zero_hidden(v, allowed)
    z, _ = _compute_logits((q, k, v, sinks, bias, slopes), allowed, soft_cap, scale, score_mod)
    top = jnp.max(z, axis=-1, where=allowed, initial=-jnp.inf)
    sink = None if sinks is None else sinks.astype(z.dtype)[:, None]
    pivot = jax.lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
    pivot = jnp.where(jnp.isfinite(pivot), pivot, 0)
    # The inner `where` keeps hidden logits, which may be infinite or NaN, out of `exp` and its derivative.
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, z - pivot[..., None], 0)), 0)
    total = weights.sum(axis=-1)
    if sink is not None:
        total = total + jnp.exp(sink - pivot)
    safe = jnp.where(total > 0, total, 1)
    p = weights / safe[..., None]
    lse = jnp.where(total > 0, pivot + jnp.log(safe), -jnp.inf)
    shape = (q.shape[0], k.shape[2], -1, *p.shape[2:])
    out = _dot("bkgts,bskv->bkgtv", p.reshape(shape), v.astype(p.dtype))
    return _merge_heads(out).astype(q.dtype), lse, top


def _zero_hidden(x: jax.Array, allowed: jax.Array) -> jax.Array:
    """Zero the keys or values `[B, S, K, D]` that no query may attend to."""
    batch, length, kv_heads, _ = x.shape
    seen = allowed.any(axis=2).reshape(batch, kv_heads, -1, length).any(axis=2)  # [B, K, S]
    return jnp.where(seen.transpose(0, 2, 1)[..., None], x, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attend_flash(
    operands: _Operands, allowed: jax.Array, soft_cap: float | None, scale: float, score_mod: ScoreMod | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `out`, `logsumexp` and `max_logits`; `_flash_backward` is the derivative."""
    return _attend(operands, allowed, soft_cap, scale, score_mod)


def _attend_flash_forward(
    operands: _Operands, allowed: jax.Array, soft_cap: float | None, scale: float, score_mod: ScoreMod | None
) -> Any:
    """Compute the forward pass, and save `out` and `logsumexp` for the backward pass."""
    out, lse, top = _attend(operands, allowed, soft_cap, scale, score_mod)
    return (out, lse, top), (operands, allowed, out, lse)


def _attend_flash_backward(
    soft_cap: float | None, scale: float, score_mod: ScoreMod | None, saved: Any, cotangents: Any
) -> Any:
    """Compute the gradients: probabilities from the saved `logsumexp`, and `D = <out, do>` from the saved `out`."""
    operands, allowed, out, lse = saved
    do, dlse, _ = cotangents
    q, k, v, sinks, bias, _ = operands
    z, derivative = _compute_logits(operands, allowed, soft_cap, scale, score_mod)
    dtype, kv_heads = z.dtype, k.shape[2]
    allowed = jnp.broadcast_to(allowed, z.shape)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)[..., None]
    p = jnp.where(allowed, jnp.exp(jnp.where(allowed, z - finite, 0)), 0)
    grouped_do = _split_heads(do.astype(dtype), kv_heads)
    seen_v = _zero_hidden(v, allowed).astype(dtype)
    seen_k = _zero_hidden(k, allowed).astype(dtype)
    dp = _dot("bkgtv,bskv->bkgts", grouped_do, seen_v).reshape(z.shape)
    d = jnp.einsum("btnv,btnv->bnt", out.astype(dtype), do.astype(dtype))
    dx = jnp.where(allowed, derivative * p * (dp - d[..., None] + dlse[..., None]), 0)
    by_group = (q.shape[0], kv_heads, -1, *z.shape[2:])
    dx_grouped = dx.reshape(by_group)
    dq = scale * _merge_heads(_dot("bkgts,bskh->bkgth", dx_grouped, seen_k))
    dk = scale * _dot("bkgts,bkgth->bskh", dx_grouped, _split_heads(q.astype(dtype), kv_heads))
    dv = _dot("bkgts,bkgtv->bskv", p.reshape(by_group), grouped_do)
    dsinks = dbias = None
    if sinks is not None:
        p_sink = jnp.exp(sinks.astype(dtype)[:, None] - lse)
        dsinks = (p_sink * (dlse - d)).sum(axis=(0, 2)).astype(sinks.dtype)
    if bias is not None:
        axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        dbias = dx.sum(axis=axes, keepdims=True).astype(bias.dtype)
    gradients = (dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks, dbias, None)
    return gradients, None


_attend_flash.defvjp(_attend_flash_forward, _attend_flash_backward)
