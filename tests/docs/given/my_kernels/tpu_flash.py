"""A small Pallas attention for TPUs, forward only, as the how-to pages import it."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

BLOCK = 128
FEATURES = {"f32", "bf16", "train", "prefill", "mha", "gqa", "mqa", "full", "v_head_dim", "unequal_lengths", "scale"}


def attention(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, V]
    *,
    mask: Any,
    scale: float | None = None,
    save_residuals: bool = False,
    interpret: Any = False,
    **operands: Any,
) -> Any:
    """Compute `out [B, T, N, V]` without a mask, a block of queries against all keys at a time.

    Raises:
      NotImplementedError: for a mask, another operand, or lengths that are not whole blocks.
    """
    if type(mask).__name__ != "Full" or any(x is not None for x in operands.values()):
        raise NotImplementedError("no mask and no other operand")
    if q.shape[1] % BLOCK or k.shape[1] % BLOCK or q.dtype == jnp.float16:
        raise NotImplementedError(f"lengths are multiples of {BLOCK}, in f32 or bf16")
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    batch, heads, length, depth = q.shape
    (kv_length, depth_v) = v.shape[2:]
    out = pl.pallas_call(
        functools.partial(_attend, scale=factor),
        grid=(batch, heads, length // BLOCK),
        in_specs=[
            pl.BlockSpec((None, None, BLOCK, depth), lambda b, n, i: (b, n, i, 0)),
            pl.BlockSpec((None, None, kv_length, depth), lambda b, n, i: (b, n // group, 0, 0)),
            pl.BlockSpec((None, None, kv_length, depth_v), lambda b, n, i: (b, n // group, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, BLOCK, depth_v), lambda b, n, i: (b, n, i, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, length, depth_v), q.dtype),
        interpret=interpret,
    )(q, k, v)
    out = out.transpose(0, 2, 1, 3)
    return (out, {}) if save_residuals else out


def _attend(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, *, scale: float) -> None:
    x = _multiply(q_ref[...], k_ref[...], ((1,), (1,))) * scale
    weights = jnp.exp(x - x.max(axis=1, keepdims=True))
    out = _multiply(weights.astype(v_ref.dtype), v_ref[...], ((1,), (0,)))
    out_ref[...] = (out / weights.sum(axis=1, keepdims=True)).astype(out_ref.dtype)


def _multiply(a: jax.Array, b: jax.Array, contracted: Any) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)
