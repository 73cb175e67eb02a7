"""Dot-product attention straight from its formula, with all logits in memory.

    (1)  x_ij = score_mod(logit_scale scale <q_i, k_j> + bias_ij - alibi_slope |i + S - T - j|, b, n, i, j)
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (3)  z_ij = -inf, where i may not attend to j
    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j exp(z_ij - m_i) v_j / l_i, over the weights that dropout keeps, divided by 1 - dropout_rate
    (7)  logsumexp_i = m_i + log(l_i)

Inside, heads are split in key/value heads and groups: query head `n = k * G + g` reads key/value head `k`
(grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245), so k and v are never copied per query head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from cases.masks import Full, Mask
from impls.contract.implementation import validate_mask, validate_operands
from impls.dropout_bits import compute_keep_factor, draw_kept, validate_dropout

SegmentIds = tuple[Int[Array, "B T"], Int[Array, "B S"]]
AxisOrder = tuple[int, int, int, int]
ScoreMod = Callable[..., jax.Array]

# Einsum equations of <q, k> and of the weighted sum of values, by the order of axes.
EINSUMS: dict[AxisOrder, tuple[str, str]] = {
    (0, 1, 2, 3): ("btkgh,bskh->bkgts", "bkgts,bskv->btkgv"),
    (0, 2, 1, 3): ("bkgth,bksh->bkgts", "bkgts,bksv->bkgtv"),
}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask = Full(),
    segment_ids: SegmentIds | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    score_mod: ScoreMod | None = None,
    logit_scale: Float[Array, " N"] | None = None,
    dropout_rate: float | None = None,
    dropout_key: jax.Array | None = None,
    save_residuals: bool = False,
    further_results: Collection[str] = (),
    float32_logits: bool = True,
    float32_qk_product: bool = True,
    compute_axis_order: AxisOrder = (0, 1, 2, 3),
) -> Any:
    """Compute softmax attention with all logits in memory.

    The result is `out_i = sum_j softmax_j(cap(scale <q_i, k_j> + bias_ij)) v_j` over the allowed `j`. All operands
    except the slopes are differentiable. So is `logsumexp`; `max_logits` has gradient zero. A query that may attend to
    nothing gets `out = 0`, `logsumexp = -inf` (or its sink) and `max_logits = -inf`. It passes no gradient.

    The operands and results are those of the contract (docs/contract.md, section 1).

    Args:
      score_mod: `(score, b, n, i, j) -> score`, applied to scaled logits before the soft cap, with index arrays.
      logit_scale: `[N]`, a learned factor of `scale <q, k>` for each query head, applied before the bias (Liu et al.
        2021, arXiv:2111.09883, equation 2).
      dropout_rate: the share of the weights that is dropped after the softmax (`impls.dropout_bits`).
      dropout_key: the key of `jax.random` that decides which weights are dropped.
      further_results: what `save_residuals` also returns: `"head_max_logits"`, `"weights"` or `"dropped_weights"`.
      float32_logits: keep logits in f32. With this and `float32_qk_product` off, logits are rounded to the operands'
        dtype; in f16 that limits them to 65504.
      float32_qk_product: convert q and k to f32 before their product.
      compute_axis_order: axes of q, k and v during the products: `(0, 1, 2, 3)` leaves `[B, T, N, H]`,
        `(0, 2, 1, 3)` multiplies in `[B, N, T, H]`.

    Raises:
      ValueError: an operand, the mask or an option is invalid; the message names it.
    """
    options: dict[str, Any] = {"soft_cap": soft_cap, "sinks": sinks, "bias": bias, "alibi_slopes": alibi_slopes}
    options |= {"score_mod": score_mod, "logit_scale": logit_scale}
    validate_operands(q, k, v, segment_ids=segment_ids, scale=scale, **options)
    dropout_rate, dropout_key = validate_dropout(dropout_rate, dropout_key)
    validate_mask(mask, q.shape[0], q.shape[2], q.shape[1], k.shape[1], offers=("indices",))
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
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        save_residuals=save_residuals,
        further_results=further_results,
        float32_logits=float32_logits,
        float32_qk_product=float32_qk_product,
        compute_axis_order=compute_axis_order,
    )


def attend(
    q: Float[Array, "B T N H"],
    k: Shaped[Array, "B S K H"],
    v: Shaped[Array, "B S K V"],
    *,
    allowed: Bool[Array, "#B #K #G #T #S"] | None,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
    bias: Float[Array, "#B #N #T #S"] | None,
    scale: float | None,
    save_residuals: bool,
    further_results: Collection[str] = (),
    float32_logits: bool = True,
    float32_qk_product: bool = True,
    compute_axis_order: AxisOrder = (0, 1, 2, 3),
    kv_scales: tuple[Float32[Array, " B #S K"], Float32[Array, " B #S K"]] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    score_mod: ScoreMod | None = None,
    logit_scale: Float[Array, " N"] | None = None,
    dropout_rate: float | None = None,
    dropout_key: jax.Array | None = None,
) -> Any:
    """Compute `attention` of validated operands, with mask and segment ids combined into booleans.

    Arguments that are not listed are those of `attention`.

    Args:
      allowed: booleans `[b, k, g, T, S]`, which may be traced. Axes have size 1 where nothing differs. None: all pairs.
      kv_scales: f32 `[b, s, K]` of k and of v. The keys are `k * k_scale` and the values `v * v_scale`. Probabilities
        then stay in f32.
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
    logits = _multiply(qk, *operands) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)  # equation (1)
    if k_scales is not None:
        logits = logits * k_scales
    if logit_scale is not None:
        factor = jnp.asarray(logit_scale, jnp.float32).reshape(num_kv_heads, -1, 1, 1)
        logits = logits * factor
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
        logits = jnp.where(allowed, logits, -jnp.inf)  # mask, equation (3)

    sink = None if sinks is None else jnp.asarray(sinks, jnp.float32).reshape(1, num_kv_heads, -1, 1)
    probabilities, logsumexp, max_logits = _compute_softmax(logits, sink)
    weights = probabilities
    if dropout_rate is not None:
        batch, _, group, q_length, kv_length = probabilities.shape
        kept = draw_kept(dropout_key, dropout_rate, (batch, num_kv_heads * group, q_length, kv_length))
        keep = jnp.where(_split_heads(kept, num_kv_heads), compute_keep_factor(dropout_rate), 0.0)
        probabilities = probabilities * keep
    # The output, equation (6).
    if v_scales is None:
        out = _multiply(pv, probabilities.astype(dtype), v)
    else:
        out = _multiply(pv, probabilities * v_scales, v.astype(jnp.float32))
    if compute_axis_order == (0, 2, 1, 3):
        out = out.transpose(0, 3, 1, 2, 4)
    out = out.astype(dtype).reshape(*out.shape[:2], -1, out.shape[-1])  # [B, T, N, V]
    if not save_residuals:
        return out
    residuals = {"logsumexp": _join_heads(logsumexp), "max_logits": _join_heads(max_logits)}
    further = {
        "head_max_logits": lambda: residuals["max_logits"].max(axis=(0, 2)),
        "weights": lambda: _join_heads(weights),
        "dropped_weights": lambda: _join_heads(probabilities),
    }
    return out, residuals | {name: further[name]() for name in further_results}


def _multiply(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _compute_alibi(slopes: Float[Array, " N"], shape: tuple[int, ...]) -> Float32[Array, "K G T S"]:
    """Compute the ALiBi penalty `[K, G, T, S]`; the last query has the position of the last key."""
    *_, num_kv_heads, group, q_length, kv_length = shape
    i, j = jnp.arange(q_length, dtype=jnp.int32)[:, None], jnp.arange(kv_length, dtype=jnp.int32)
    distance = jnp.abs(i + (kv_length - q_length) - j).astype(jnp.float32)
    slopes = lax.stop_gradient(jnp.asarray(slopes, jnp.float32))
    return slopes.reshape(num_kv_heads, group, 1, 1) * distance


def _apply_score_mod(
    logits: Float32[Array, "B K G T S"], allowed: Bool[Array, "#B #K #G #T #S"] | None, score_mod: ScoreMod
) -> jax.Array:
    """Apply `score_mod` to logits `[B, K, G, T, S]`."""
    batch, num_kv_heads, group, q_length, kv_length = logits.shape
    if allowed is not None:
        # As in `_apply_soft_cap`: a bias behind the mask may be NaN, and the derivative there would be NaN too.
        logits = jnp.where(allowed, logits, 0.0)
    n = jnp.arange(num_kv_heads * group).reshape(num_kv_heads, group, 1, 1)
    b, i, j = jnp.arange(batch).reshape(-1, 1, 1, 1, 1), jnp.arange(q_length)[:, None], jnp.arange(kv_length)
    return score_mod(logits, b, n, i, j)


def _apply_soft_cap(
    logits: Float[Array, "B K G T S"], allowed: Bool[Array, "#B #K #G #T #S"] | None, soft_cap: float | None
) -> Float[Array, "B K G T S"]:
    if soft_cap is None:
        return logits
    if allowed is not None:
        # A bias behind the mask may be NaN. The derivative of tanh there is NaN, and 0 * NaN would reach a gradient.
        logits = jnp.where(allowed, logits, 0.0)
    return soft_cap * jnp.tanh(logits / soft_cap)


def _round_to_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    # XLA may drop a pair of converts (xla_allow_excess_precision), but it must keep reduce_precision.
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _compute_softmax(
    logits: Float[Array, "B K G T S"], sink: Float32[Array, "1 K G 1"] | None
) -> tuple[Float[Array, "B K G T S"], Float[Array, "B K G T"], Float[Array, "B K G T"]]:
    """Compute probabilities, logsumexp and maximum of the logits of each row; a sink joins the denominator."""
    max_logits = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    shift = max_logits if sink is None else jnp.maximum(max_logits, lax.stop_gradient(sink))  # equation (4)
    shift = jnp.where(shift == -jnp.inf, 0.0, shift)
    weights = jnp.exp(logits - shift[..., None])
    total = weights.sum(axis=-1)  # the softmax sum l, equation (5)
    if sink is not None:
        total = total + jnp.exp(sink - shift)
    # An empty row has total 0. Both branches of a select are differentiated: neither may divide by it or take its log.
    has_keys = total != 0
    total = jnp.where(has_keys, total, 1.0)
    logsumexp = jnp.where(has_keys, shift + jnp.log(total), -jnp.inf)  # logsumexp, equation (7)
    return weights / total[..., None], logsumexp, max_logits


def _zero_unseen_rows(
    x: Shaped[Array, "B S K D"], allowed: Bool[Array, "#B #K #G #T #S"] | None
) -> Shaped[Array, "B S K D"]:
    """Zero the rows of `x [B, S, K, D]` that no query attends to: they may be NaN, and `0 * NaN` is not 0."""
    if allowed is None:
        return x
    seen = allowed.any(axis=(2, 3)).transpose(0, 2, 1)  # [b, S, k]
    return jnp.where(seen[..., None], x, jnp.zeros((), x.dtype))


def _broadcast_scales(
    scales: Float32[Array, " B #S K"],
    k: Shaped[Array, "B S K D"],
    allowed: Bool[Array, "#B #K #G #T #S"] | None,
) -> Float32[Array, "B K 1 1 S"]:
    """Broadcast scales `[b, s, K]` of keys or values to `[B, K, 1, 1, S]`."""
    each = jnp.broadcast_to(scales, k.shape[:3])[..., None]
    return _zero_unseen_rows(each, allowed).transpose(0, 2, 3, 1)[:, :, None]


def compute_allowed_pairs(
    mask: Mask, segment_ids: SegmentIds | None, q_length: int, kv_length: int, num_kv_heads: int
) -> Bool[Array, "b k g T S"] | None:
    """Combine mask and segment ids; None if every pair is allowed. An axis along which nothing differs has size 1."""
    if isinstance(mask, Full) and segment_ids is None:
        return None
    if mask.is_computed:
        # Computed by formula: a constant of T * S booleans would slow compilation down.
        found: Any = jnp.asarray(mask.allowed(jnp.arange(q_length)[:, None], jnp.arange(kv_length)[None, :]))[
            None, None
        ]
    else:
        found = mask.dense(q_length, kv_length)  # a NumPy array, or XLA would spend seconds folding constants
    if segment_ids is not None:
        q_ids, kv_ids = (jnp.asarray(ids) for ids in segment_ids)
        found = found & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
    return _split_heads(found, num_kv_heads)


def _split_heads(x: Shaped[Array, "b n *rest"], num_kv_heads: int) -> Shaped[Array, "b k g *rest"]:
    """Split the axis of query heads: `[b, n, ...]` to `[b, k, g, ...]`."""
    return x[:, :, None] if x.shape[1] == 1 else x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:])


def _join_heads(x: Shaped[Array, "B K G *rest"]) -> Shaped[Array, "B N *rest"]:
    """Join the axes of query heads: `[B, K, G, ...]` to `[B, N, ...]`."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])
