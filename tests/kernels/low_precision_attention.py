"""A correct blocked kernel for bf16 and f16 with a custom backward pass, and variants that round too much.

The error of every variant is below one rounding of the output dtype in most elements.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare

BLOCK = 64
Rounding = Callable[[jax.Array, Any], jax.Array]


def keep_f32(x: jax.Array, dtype: Any) -> jax.Array:
    """Return `x` in f32."""
    return x


def round_to_nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """Return `x` rounded to the significand of `dtype`, in f32.

    XLA may remove a pair of converts, but not `reduce_precision`. With the exponent of f16 it would flush subnormal
    numbers, so the exponent of f32 is kept.
    """
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=jnp.finfo(dtype).nmant)


def round_towards_zero(x: jax.Array, dtype: Any) -> jax.Array:
    """Return `x` truncated to the significand of `dtype`, in f32."""
    kept = 23 - jnp.finfo(dtype).nmant
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> kept << kept
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roundings:
    """How intermediate values are rounded; the defaults are correct.

    A correct kernel keeps sums in f32 and rounds results to nearest.
    """

    accumulator: Rounding = keep_f32  # the sum over key blocks, after each
    total: Rounding = keep_f32  # the softmax denominator, after each block
    out: Rounding = round_to_nearest
    dq: Rounding = round_to_nearest
    dq_sum: Rounding = keep_f32  # dq, after each key block
    group_sum: Rounding = keep_f32  # dk and dv, after each head of the group


def build_kernel(roundings: Roundings) -> Callable[..., Any]:
    """Build the attention function with these roundings."""
    attend = jax.custom_vjp(functools.partial(_attend, roundings))
    attend.defvjp(functools.partial(_forward, roundings), functools.partial(_backward, roundings))

    @declare(behind_mask="finite")
    def attention(q: Any, k: Any, v: Any) -> Any:
        """Compute blocked attention; the number of keys is a multiple of the block."""
        return attend(q, k, v)

    return attention


def _attend(roundings: Roundings, q: Any, k: Any, v: Any) -> Any:
    return _forward(roundings, q, k, v)[0]


def _group_heads(x: jax.Array, kv_heads: int) -> jax.Array:
    """Reshape `[B, T, N, D]` to `[B, K, G, T, D]`, in f32."""
    batch, length, _, depth = x.shape
    return x.astype(jnp.float32).reshape(batch, length, kv_heads, -1, depth).transpose(0, 2, 3, 1, 4)


def _ungroup_heads(x: jax.Array) -> jax.Array:
    batch, kv_heads, group, length, depth = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, depth)


def _multiply(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b.astype(jnp.float32), precision="highest")


def _compute_logits(q: jax.Array, k: jax.Array) -> jax.Array:
    return q.shape[-1] ** -0.5 * _multiply("bkgth,bskh->bkgts", q, k)


def _forward(roundings: Roundings, q: Any, k: Any, v: Any) -> Any:
    """Compute `out` and what the backward pass needs."""
    dtype, queries = q.dtype, _group_heads(q, k.shape[2])
    shape = queries.shape[:-1]
    m, total, acc = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1]))
    for start in range(0, k.shape[1], BLOCK):
        z = _compute_logits(queries, k[:, start : start + BLOCK])
        new_m = jnp.maximum(m, z.max(axis=-1))
        alpha, e = jnp.exp(m - new_m), jnp.exp(z - new_m[..., None])
        m, total = new_m, roundings.total(total * alpha + e.sum(axis=-1), dtype)
        update = _multiply("bkgts,bskv->bkgtv", round_to_nearest(e, dtype), v[:, start : start + BLOCK])
        acc = roundings.accumulator(acc * alpha[..., None] + update, dtype)
    out = _ungroup_heads(roundings.out(acc / total[..., None], dtype)).astype(dtype)
    return out, (q, k, v, out, m + jnp.log(total))


def _backward(roundings: Roundings, saved: Any, do: Any) -> Any:
    """Compute `dq dk dv` from the saved `out` and `logsumexp`."""
    q, k, v, out, lse = saved
    dtype, scale, kv_heads = q.dtype, q.shape[-1] ** -0.5, k.shape[2]
    queries, cotangents = _group_heads(q, kv_heads), _group_heads(do, kv_heads)
    d = (_group_heads(out, kv_heads) * cotangents).sum(axis=-1)
    p = jnp.exp(_compute_logits(queries, k) - lse[..., None])
    dz = round_to_nearest(p * (_multiply("bkgtv,bskv->bkgts", cotangents, v) - d[..., None]), dtype)
    p = round_to_nearest(p, dtype)
    dq = jnp.zeros(queries.shape)
    for start in range(0, k.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        dq = roundings.dq_sum(dq + _multiply("bkgts,bskh->bkgth", dz[..., block], k[:, block]), dtype)
    dk = dv = jnp.zeros(())
    for head in range(queries.shape[2]):
        dk_head = scale * _multiply("bkts,bkth->bskh", dz[:, :, head], queries[:, :, head])
        dv_head = _multiply("bkts,bktv->bskv", p[:, :, head], cotangents[:, :, head])
        dk = roundings.group_sum(dk + roundings.group_sum(dk_head, dtype), dtype)
        dv = roundings.group_sum(dv + roundings.group_sum(dv_head, dtype), dtype)
    return _ungroup_heads(roundings.dq(scale * dq, dtype)).astype(dtype), dk.astype(dtype), dv.astype(dtype)
