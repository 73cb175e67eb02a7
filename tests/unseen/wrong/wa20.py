"""Pallas decode/prefill kernel: online softmax that rescales only when the maximum jumps."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

BLOCK = 128
JUMP = 8.0
NEG = -1e30


def _kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, *, scale, causal, length):
    q = q_ref[0, 0].astype(jnp.float32)
    t = q.shape[0]
    i = jax.lax.broadcasted_iota(jnp.int32, (t, BLOCK), 0)

    def body(block, carry):
        acc, l, pivot, top = carry
        j = block * BLOCK + jax.lax.broadcasted_iota(jnp.int32, (t, BLOCK), 1)
        k = k_ref[0, 0, pl.ds(block * BLOCK, BLOCK), :].astype(jnp.float32)
        v = v_ref[0, 0, pl.ds(block * BLOCK, BLOCK), :].astype(jnp.float32)
        seen = j < length
        if causal:
            seen &= j <= i
        x = jnp.where(seen, scale * jnp.dot(q, k.T, precision="highest"), NEG)
        new = jnp.maximum(top, x.max(axis=1, keepdims=True))
        moved = jnp.where(new - top > JUMP, new, pivot)
        alpha = jnp.exp(pivot - moved)
        w = jnp.where(seen, jnp.exp(x - moved), 0.0)
        acc = acc * alpha + jnp.dot(w, v, precision="highest")
        return acc, l * alpha + w.sum(axis=1, keepdims=True), moved, new

    init = (
        jnp.zeros((t, v_ref.shape[3]), jnp.float32),
        jnp.zeros((t, 1), jnp.float32),
        jnp.full((t, 1), NEG, jnp.float32),
        jnp.full((t, 1), NEG, jnp.float32),
    )
    acc, l, pivot, _ = jax.lax.fori_loop(0, k_ref.shape[2] // BLOCK, body, init)
    safe = jnp.where(l > 0, l, 1.0)
    o_ref[0, 0] = (acc / safe).astype(o_ref.dtype)
    lse_ref[0, 0] = jnp.where(l > 0, pivot + jnp.log(safe), -jnp.inf)[:, 0]


def attention(q, k, v, *, causal=False, scale=None, save_residuals=False):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    b, n, t, h = q.shape
    kv, s, d = k.shape[1], k.shape[2], v.shape[3]
    g = n // kv
    pad = -s % BLOCK
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale, causal=bool(causal), length=s),
        grid=(b, n),
        in_specs=[
            pl.BlockSpec((1, 1, t, h), lambda b, n: (b, n, 0, 0)),
            pl.BlockSpec((1, 1, s + pad, h), lambda b, n: (b, n // g, 0, 0)),
            pl.BlockSpec((1, 1, s + pad, d), lambda b, n: (b, n // g, 0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((1, 1, t, d), lambda b, n: (b, n, 0, 0)),
            pl.BlockSpec((1, 1, t), lambda b, n: (b, n, 0)),
        ],
        out_shape=[jax.ShapeDtypeStruct((b, n, t, d), q.dtype), jax.ShapeDtypeStruct((b, n, t), jnp.float32)],
        interpret=True,
    )(q, k, v)
    out = jnp.swapaxes(out, 1, 2)
    return (out, {"logsumexp": lse}) if save_residuals else out
