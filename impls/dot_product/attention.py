"""Dot-product attention from its formula, with all logits in memory.

    (1)  x_ij = score_mod(scale <q_i, k_j> + bias_ij - alibi_slope |i + S - T - j|, b, n, i, j)
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (3)  z_ij = -inf, where i may not attend to j
    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

Inside, heads are split in key/value heads and groups: query head `n = k * G + g` reads key/value head `k`
(grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245), so k and v are never copied per query head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cases.masks import Full, Mask
from conformance.contract import validate_mask, validate_operands

SegmentIds = tuple[jax.Array, jax.Array]
AxisOrder = tuple[int, int, int, int]
ScoreMod = Callable[..., jax.Array]

# Axis order to the two products, and to the axes that bring the second one back to [B, T, K, G, V].
EINSUMS: dict[AxisOrder, tuple[str, str]] = {
    (0, 1, 2, 3): ("btkgh,bskh->bkgts", "bkgts,bskv->btkgv"),
    (0, 2, 1, 3): ("bkgth,bksh->bkgts", "bkgts,bksv->bkgtv"),
}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask = Full(),  # noqa: B008  a frozen value, the same for every call
    segment_ids: SegmentIds | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    alibi_slopes: jax.Array | None = None,
    score_mod: ScoreMod | None = None,
    save_residuals: bool = False,
    float32_logits: bool = True,
    float32_qk_product: bool = True,
    compute_axis_order: AxisOrder = (0, 1, 2, 3),
) -> Any:
    """Softmax attention, `out_i = sum_j softmax_j(cap(scale <q_i, k_j> + bias_ij)) v_j` over the allowed `j`.

    Every operand but the slopes is differentiable, and `logsumexp` is; `max_logits` has gradient zero. A query that may
    attend to nothing gets `out = 0`, `logsumexp = -inf` (or its sink) and `max_logits = -inf`, and passes no gradient.

    Args:
      q: queries `[B, T, N, H]`.
      k: keys `[B, S, K, H]`, `N % K == 0`.
      v: values `[B, S, K, V]`.
      mask: which pairs may attend.
      segment_ids: int32 `[B, T]` and `[B, S]`; a pair attends only where they are equal.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
      sinks: `[N]`, one more logit in each query head's softmax denominator.
      bias: broadcastable to `[B, N, T, S]`, added after the scale and before the soft cap.
      scale: factor of `<q, k>`, default `1 / sqrt(H)`.
      alibi_slopes: `[N]`, constants: logits lose `slope * |i + S - T - j|` where the bias is added (Press et al. 2021,
        arXiv:2108.12409; queries are counted from the end, as Dao's flash-attention has it).
      score_mod: `(score, b, n, i, j) -> score`, of scaled logits before the soft cap, with places along the axes.
      save_residuals: also return `logsumexp` and `max_logits`.
      float32_logits: softmax in f32. With this and `float32_qk_product` off, logits are rounded to the operands' dtype;
        in f16 that limits them to 65504.
      float32_qk_product: convert q and k to f32 before their product.
      compute_axis_order: axes of q, k and v during the products: `(0, 1, 2, 3)` leaves `[B, T, N, H]`,
        `(0, 2, 1, 3)` multiplies in `[B, N, T, H]`.

    Returns:
      `out [B, T, N, V]` in q's dtype, or `(out, {"logsumexp": ..., "max_logits": ...})`, both f32 `[B, N, T]`.

    Raises:
      ValueError: an operand, the mask or an option is not as above; the message names it.
    """
    options: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks, "bias": bias, "alibi_slopes": alibi_slopes}
    options["score_mod"] = score_mod
    validate_operands(q, k, v, segment_ids=segment_ids, scale=scale, **options)
    validate_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if compute_axis_order not in EINSUMS:
        raise ValueError(f"compute_axis_order must be one of {tuple(EINSUMS)}, got {compute_axis_order}")
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    return attend(
        q,
        k,
        v,
        allowed=compute_allowed_pairs(mask, segment_ids, q.shape[1], k.shape[1], k.shape[2]),
        scale=scale,
        **options,
        save_residuals=save_residuals,
        float32_logits=float32_logits,
        float32_qk_product=float32_qk_product,
        compute_axis_order=compute_axis_order,
    )


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    allowed: jax.Array | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    bias: jax.Array | None,
    scale: float | None,
    save_residuals: bool,
    float32_logits: bool = True,
    float32_qk_product: bool = True,
    compute_axis_order: AxisOrder = (0, 1, 2, 3),
    kv_scales: tuple[jax.Array, jax.Array] | None = None,
    alibi_slopes: jax.Array | None = None,
    score_mod: ScoreMod | None = None,
) -> Any:
    """`attention` of valid operands, with mask and segment ids as booleans.

    `allowed` is `[b, k, g, T, S]`, an axis of size 1 where nothing differs, none if all pairs are; it may be traced.
    With `kv_scales`, f32 `[b, s, K]` of k and of v, these stand for `k * k_scale` and `v * v_scale`, and probabilities
    stay in f32.
    """
    dtype, num_kv_heads = q.dtype, k.shape[2]
    k_scales, v_scales = (None, None) if kv_scales is None else (_broadcast_scales(x, k, allowed) for x in kv_scales)
    k, v = (_zero_unseen_rows(x, allowed) for x in (k, v))
    q = q.reshape(*q.shape[:2], num_kv_heads, -1, q.shape[3])  # [B, T, K, G, H]
    if compute_axis_order == (0, 2, 1, 3):
        q = q.transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
        k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))  # [B, K, S, ·]
    qk, pv = EINSUMS[compute_axis_order]

    operands = (q.astype(jnp.float32), k.astype(jnp.float32)) if float32_qk_product else (q, k)
    logits = _multiply(qk, *operands) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)  # (1)
    if k_scales is not None:
        logits = logits * k_scales
    if bias is not None:
        logits = logits + _split_heads(jnp.asarray(bias, jnp.float32), num_kv_heads)
    if alibi_slopes is not None:
        logits = logits - _compute_alibi(alibi_slopes, logits.shape)
    if score_mod is not None:
        logits = _apply_score_mod(logits, allowed, score_mod)
    logits = _apply_soft_cap(logits, allowed, soft_cap)  # (2)
    if not (float32_logits or float32_qk_product):
        logits = _round_to_dtype(logits, dtype)
    if allowed is not None:
        logits = jnp.where(allowed, logits, -jnp.inf)  # (3)

    sink = None if sinks is None else jnp.asarray(sinks, jnp.float32).reshape(1, num_kv_heads, -1, 1)
    probabilities, logsumexp, max_logits = _compute_softmax(logits, sink)
    # (6)
    if v_scales is None:
        out = _multiply(pv, probabilities.astype(dtype), v)
    else:
        out = _multiply(pv, probabilities * v_scales, v.astype(jnp.float32))
    if compute_axis_order == (0, 2, 1, 3):
        out = out.transpose(0, 3, 1, 2, 4)
    out = out.astype(dtype).reshape(*out.shape[:2], -1, out.shape[-1])  # [B, T, N, V]
    if not save_residuals:
        return out
    return out, {"logsumexp": _join_heads(logsumexp), "max_logits": _join_heads(max_logits)}


def _multiply(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _compute_alibi(slopes: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """By how much logits `[B, K, G, T, S]` fall with the distance, `[K, G, T, S]`; a last query is at the last key."""
    *_, num_kv_heads, group, q_length, kv_length = shape
    i, j = jnp.arange(q_length, dtype=jnp.int32)[:, None], jnp.arange(kv_length, dtype=jnp.int32)
    distance = jnp.abs(i + (kv_length - q_length) - j).astype(jnp.float32)
    slopes = lax.stop_gradient(jnp.asarray(slopes, jnp.float32))
    return slopes.reshape(num_kv_heads, group, 1, 1) * distance


def _apply_score_mod(logits: jax.Array, allowed: jax.Array | None, score_mod: ScoreMod) -> jax.Array:
    """Logits `[B, K, G, T, S]` as the function has them."""
    batch, num_kv_heads, group, q_length, kv_length = logits.shape
    if allowed is not None:
        logits = jnp.where(allowed, logits, 0.0)  # as below
    n = jnp.arange(num_kv_heads * group).reshape(num_kv_heads, group, 1, 1)
    b, i, j = jnp.arange(batch).reshape(-1, 1, 1, 1, 1), jnp.arange(q_length)[:, None], jnp.arange(kv_length)
    return score_mod(logits, b, n, i, j)


def _apply_soft_cap(logits: jax.Array, allowed: jax.Array | None, soft_cap: float | None) -> jax.Array:
    if soft_cap is None:
        return logits
    if allowed is not None:
        # tanh has derivative NaN at NaN, and 0 * NaN would carry what is behind the mask (bias) into a gradient.
        logits = jnp.where(allowed, logits, 0.0)
    return soft_cap * jnp.tanh(logits / soft_cap)


def _round_to_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    # XLA may drop a pair of converts (xla_allow_excess_precision), reduce_precision it must keep.
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]  # JAX leaves it untyped
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _compute_softmax(logits: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Probabilities of `logits [B, K, G, T, S]`, their logsumexp and maximum `[B, K, G, T]`; `sink [1, K, G, 1]`."""
    max_logits = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    shift = max_logits if sink is None else jnp.maximum(max_logits, lax.stop_gradient(sink))  # (4)
    shift = jnp.where(shift == -jnp.inf, 0.0, shift)
    weights = jnp.exp(logits - shift[..., None])
    total = weights.sum(axis=-1)  # (5)
    if sink is not None:
        total = total + jnp.exp(sink - shift)
    # An empty row has total 0. Both branches of a select are differentiated: neither may divide by it or take its log.
    some = total != 0
    total = jnp.where(some, total, 1.0)
    logsumexp = jnp.where(some, shift + jnp.log(total), -jnp.inf)  # (7)
    return weights / total[..., None], logsumexp, max_logits


def _zero_unseen_rows(x: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Rows of `x [B, S, K, D]` that no query attends to, replaced by zeros: `0 * NaN` is not 0."""
    if allowed is None:
        return x
    seen = allowed.any(axis=(2, 3)).transpose(0, 2, 1)  # [b, S, k]
    return jnp.where(seen[..., None], x, jnp.zeros((), x.dtype))


def _broadcast_scales(scales: jax.Array, k: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Scales `[b, s, K]` of the keys, or of the values, as `[B, K, 1, 1, S]`."""
    each = jnp.broadcast_to(scales, k.shape[:3])[..., None]
    return _zero_unseen_rows(each, allowed).transpose(0, 2, 3, 1)[:, :, None]


def compute_allowed_pairs(
    mask: Mask, segment_ids: SegmentIds | None, q_length: int, kv_length: int, num_kv_heads: int
) -> jax.Array | None:
    """Mask and segment ids as booleans `[b, k, g, T, S]`, an axis of size 1 where nothing differs; none if all true."""
    if isinstance(mask, Full) and segment_ids is None:
        return None
    if mask.is_computed:
        # As a formula: a constant of T * S booleans would only slow compilation down.
        found: Any = jnp.asarray(mask.allowed(jnp.arange(q_length)[:, None], jnp.arange(kv_length)[None, :]))[
            None, None
        ]
    else:
        found = mask.dense(q_length, kv_length)  # stays on the host, or XLA would fold constants for seconds
    if segment_ids is not None:
        q_ids, kv_ids = (jnp.asarray(ids) for ids in segment_ids)
        found = found & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    return _split_heads(found, num_kv_heads)


def _split_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """`[b, n, ...]` to `[b, k, g, ...]`."""
    return x[:, :, None] if x.shape[1] == 1 else x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])


def _join_heads(x: jax.Array) -> jax.Array:
    """`[B, K, G, T]` to `[B, N, T]`."""
    return x.reshape(x.shape[0], -1, x.shape[-1])
