import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

HI = jax.lax.Precision.HIGHEST
F32 = jnp.float32
BLOCK_Q = BLOCK_K = 32


class Config(NamedTuple):
    scale: float
    cap: float | None
    causal: bool
    left: int | None
    right: int | None


def _pad(x, axis, block):
    extra = -x.shape[axis] % block
    return jnp.pad(x, [(0, extra if a == axis else 0) for a in range(x.ndim)])


def _heads_first(x, block):
    b, t, n, h = x.shape
    return _pad(x.swapaxes(1, 2).reshape(b * n, t, h), 1, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(cfg, q, k, v, sinks, masks):
    return _attend_fwd(cfg, q, k, v, sinks, masks)[0]


def _kernel(length_ref, sink_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, *, cfg, heads, keys, ragged):
    head, row = pl.program_id(0), pl.program_id(1)
    q = q_ref[0].astype(F32)
    length = length_ref[head // heads]
    i = row * BLOCK_Q + jax.lax.broadcasted_iota(jnp.int32, (BLOCK_Q, BLOCK_K), 0)

    def body(block, carry):
        m, total, acc = carry
        k = k_ref[0, pl.ds(block * BLOCK_K, BLOCK_K), :].astype(F32)
        v = v_ref[0, pl.ds(block * BLOCK_K, BLOCK_K), :].astype(F32)
        z = jnp.dot(q, k.T, precision=HI) * cfg.scale
        if cfg.cap is not None:
            z = cfg.cap * jnp.tanh(z / cfg.cap)
        j = block * BLOCK_K + jax.lax.broadcasted_iota(jnp.int32, (BLOCK_Q, BLOCK_K), 1)
        see = j <= i if cfg.causal else j < length
        if cfg.causal and ragged:
            see &= j < length
        if cfg.left is not None:
            see &= j >= i - cfg.left
        if cfg.right is not None:
            see &= j - cfg.right <= i
        z = jnp.where(see, z, -jnp.inf)
        high = jnp.maximum(m, z.max(axis=1))
        pivot = jnp.where(jnp.isfinite(high), high, 0)
        old = jnp.exp(m - pivot)
        w = jnp.exp(z - pivot[:, None])
        return high, total * old + w.sum(axis=1), acc * old[:, None] + jnp.dot(w, v, precision=HI)

    sink = sink_ref[head % heads]
    m = jnp.full((BLOCK_Q,), sink, F32)
    total = jnp.where(sink > -jnp.inf, jnp.ones((BLOCK_Q,), F32), 0)
    acc = jnp.zeros((BLOCK_Q, v_ref.shape[2]), F32)
    stop = keys // BLOCK_K
    if cfg.causal:
        stop = jnp.minimum(stop, ((row + 1) * BLOCK_Q + BLOCK_K - 1) // BLOCK_K)
    m, total, acc = jax.lax.fori_loop(0, stop, body, (m, total, acc))
    safe = jnp.where(total == 0, 1, total)
    out_ref[0] = (acc / safe[:, None]).astype(out_ref.dtype)
    lse_ref[0] = jnp.where(total == 0, -jnp.inf, jnp.where(jnp.isfinite(m), m, 0) + jnp.log(safe))


def _attend_fwd(cfg, q, k, v, sinks, masks):
    b, t, n, h = q.shape
    s, heads, depth = v.shape[1:]
    lengths = masks[1] if len(masks) == 2 else jnp.full((b,), s, jnp.int32)
    sink = jnp.full((n,), -jnp.inf, F32) if sinks is None else sinks.astype(F32)
    qf, kf, vf = _heads_first(q, BLOCK_Q), _heads_first(k, BLOCK_K), _heads_first(v, BLOCK_K)
    padded, keys = qf.shape[1], kf.shape[1]
    g = n // heads
    whole = lambda x: pl.BlockSpec(x.shape, lambda i, r: (0,) * x.ndim)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, cfg=cfg, heads=n, keys=keys, ragged=len(masks) == 2),
        grid=(b * n, padded // BLOCK_Q),
        in_specs=[
            whole(lengths),
            whole(sink),
            pl.BlockSpec((1, BLOCK_Q, h), lambda i, r: (i, r, 0)),
            pl.BlockSpec((1, keys, h), lambda i, r: (i // g, 0, 0)),
            pl.BlockSpec((1, keys, depth), lambda i, r: (i // g, 0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((1, BLOCK_Q, depth), lambda i, r: (i, r, 0)),
            pl.BlockSpec((1, BLOCK_Q), lambda i, r: (i, r)),
        ],
        out_shape=[jax.ShapeDtypeStruct((b * n, padded, depth), q.dtype), jax.ShapeDtypeStruct((b * n, padded), F32)],
        interpret=True,
    )(lengths, sink, qf, kf, vf)
    out = out[:, :t].reshape(b, n, t, depth).swapaxes(1, 2)
    lse = lse[:, :t].reshape(b, n, t)
    return (out, lse), (q, k, v, sinks, masks, out, lse)


def _attend_bwd(cfg, saved, cotangents):
    q, k, v, sinks, (see, *_), out, lse = saved
    do, dlse = cotangents
    b, t, n, h = q.shape
    s, heads = k.shape[1:3]
    g = n // heads
    split = lambda x: x.astype(F32).reshape(b, t, heads, g, -1)
    qg, og, dog = split(q), split(out), split(do)
    row = jnp.where(jnp.isfinite(lse), lse, 0).reshape(b, heads, g, t, 1)
    x = jnp.einsum("btkgh,bskh->bkgts", qg, k.astype(F32), precision=HI) * cfg.scale
    z = x if cfg.cap is None else cfg.cap * jnp.tanh(x / cfg.cap)
    seen = see[:, None, None]
    p = jnp.exp(jnp.where(seen, z, -jnp.inf) - row)
    dp = jnp.einsum("btkgv,bskv->bkgts", dog, v.astype(F32), precision=HI)
    delta = (og * dog).sum(axis=-1).transpose(0, 2, 3, 1)[..., None]
    dlse = dlse.reshape(b, heads, g, t, 1)
    slope = 1 if cfg.cap is None else 1 - (z / cfg.cap) ** 2
    dx = jnp.where(seen, p * (dp - delta + dlse) * slope, 0)
    dq = cfg.scale * jnp.einsum("bkgts,bskh->btkgh", dx, k.astype(F32), precision=HI).reshape(q.shape)
    dk = cfg.scale * jnp.einsum("bkgts,btkgh->bskh", dx, qg, precision=HI)
    dv = jnp.einsum("bkgts,btkgv->bskv", p, dog, precision=HI)
    dsinks = None
    if sinks is not None:
        weight = jnp.exp(sinks.astype(F32).reshape(1, heads, g, 1, 1) - row)
        dsinks = (weight * (dlse - delta)).sum(axis=(0, 3, 4)).reshape(n).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _visible(b, t, s, causal, left, right, kv_lengths):
    i = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    see = jnp.ones((b, t, s), bool)
    if causal:
        see &= j <= i
    if left is not None:
        see &= j >= i - left
    if right is not None:
        see &= j - right <= i
    if kv_lengths is not None:
        see &= j < kv_lengths[:, None, None]
    return see


def attention(
    q, k, v, *, causal=False, window=None, kv_lengths=None, soft_cap=None, sinks=None, scale=None, save_residuals=False
):
    b, t, _, h = q.shape
    s = k.shape[1]
    left, right = (None, None) if window is None else window
    see = _visible(b, t, s, causal, left, right, kv_lengths)
    live = see.any(axis=1)[:, :, None, None]
    k, v = jnp.where(live, k, 0), jnp.where(live, v, 0)
    cfg = Config(h**-0.5 if scale is None else scale, soft_cap, bool(causal), left, right)
    masks = (see,) if kv_lengths is None else (see, kv_lengths.astype(jnp.int32))
    out, lse = _attend(cfg, q, k, v, sinks, masks)
    return (out, {"logsumexp": lse}) if save_residuals else out
