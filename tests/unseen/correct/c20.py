"""Flash attention: the forward pass is a Pallas kernel, the backward pass is plain JAX from (out, logsumexp)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

HIGHEST = jax.lax.Precision.HIGHEST
BQ, BK = 32, 32


def visible(q, k, causal=False, window=None, mask=None, segment_ids=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
    if window is not None:
        left, right = window
        if left is not None:
            seen &= j >= at - left
        if right is not None:
            seen &= j <= at + right
    if segment_ids is not None:
        ids_q, ids_k = segment_ids
        seen = seen & (ids_q[:, None, :, None] == ids_k[:, None, None, :])
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def kernel(q_ref, k_ref, v_ref, ok_ref, o_ref, lse_ref, top_ref, *, scale, soft_cap, blocks):
    q = q_ref[...]

    def step(j, carry):
        m, l, acc = carry
        keys = pl.ds(j * BK, BK)
        ok = ok_ref[:, keys] != 0
        x = jnp.dot(q, k_ref[keys, :].T, precision=HIGHEST, preferred_element_type=jnp.float32) * scale
        x = jnp.where(ok, x, 0.0)
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(ok, x, -jnp.inf)
        new = jnp.maximum(m, x.max(axis=1, keepdims=True))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        alpha = jnp.exp(m - safe)
        p = jnp.exp(x - safe)
        l = l * alpha + p.sum(axis=1, keepdims=True)
        acc = acc * alpha + jnp.dot(p, v_ref[keys, :], precision=HIGHEST, preferred_element_type=jnp.float32)
        return new, l, acc

    start = (
        jnp.full((BQ, 1), -jnp.inf, jnp.float32),
        jnp.zeros((BQ, 1), jnp.float32),
        jnp.zeros(o_ref.shape, jnp.float32),
    )
    m, l, acc = jax.lax.fori_loop(0, blocks, step, start)
    empty = l == 0
    l = jnp.where(empty, 1.0, l)
    o_ref[...] = acc / l
    lse_ref[...] = jnp.where(empty, -jnp.inf, m + jnp.log(l))
    top_ref[...] = m


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def flash(q, k, v, ok, scale, soft_cap):
    return forward(q, k, v, ok, scale, soft_cap)[0]


def forward(q, k, v, ok, scale, soft_cap):
    b, n, t, h = q.shape
    heads, s, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    tile = lambda width: pl.BlockSpec((None, None, BQ, width), lambda x, y, i: (x, y, i, 0))
    whole = lambda width: pl.BlockSpec((None, None, s, width), lambda x, y, i: (x, y // g, 0, 0))
    call = pl.pallas_call(
        partial(kernel, scale=scale, soft_cap=soft_cap, blocks=s // BK),
        grid=(b, n, t // BQ),
        in_specs=[tile(h), whole(h), whole(d), tile(s)],
        out_specs=[tile(d), tile(1), tile(1)],
        out_shape=[jax.ShapeDtypeStruct((b, n, t, x), jnp.float32) for x in (d, 1, 1)],
        interpret=True,
    )
    out, lse, top = first_order(call)(q, k, v, ok.astype(jnp.int8))
    lse, top = lse[..., 0], top[..., 0]
    return (out, lse, top), (q, k, v, ok, out, lse)


def first_order(f):
    """Let f be called in a derivative rule, and refuse to differentiate it again."""
    g = jax.custom_jvp(f)

    @g.defjvp
    def _(primals, tangents):
        raise NotImplementedError("second derivatives of this kernel")

    return g


def gradients(scale, soft_cap, q, k, v, ok, out, lse, do, dlse):
    b, n, t, h = q.shape
    heads = k.shape[1]
    kk, vv = (jnp.repeat(x, n // heads, axis=1) for x in (k, v))
    x = jnp.einsum("bnth,bnsh->bnts", q, kk, precision=HIGHEST) * scale
    x = jnp.where(ok, x, 0)
    slope = 1.0
    if soft_cap is not None:
        y = jnp.tanh(x / soft_cap)
        x, slope = soft_cap * y, 1 - y * y
    p = jnp.where(ok, jnp.exp(x - jnp.where(lse == -jnp.inf, 0, lse)[..., None]), 0)
    dp = jnp.einsum("bntv,bnsv->bnts", do, vv, precision=HIGHEST)
    delta = (do * out).sum(-1) - dlse
    dx = jnp.where(ok, p * (dp - delta[..., None]) * slope, 0)
    dq = scale * jnp.einsum("bnts,bnsh->bnth", dx, kk, precision=HIGHEST)
    dk = scale * jnp.einsum("bnts,bnth->bnsh", dx, q, precision=HIGHEST)
    dv = jnp.einsum("bnts,bntv->bnsv", p, do, precision=HIGHEST)
    fold = lambda x: x.reshape(b, heads, n // heads, -1, x.shape[-1]).sum(2)
    return dq, fold(dk), fold(dv)


def backward(scale, soft_cap, saved, cotangents):
    do, dlse, _ = cotangents
    return *first_order(partial(gradients, scale, soft_cap))(*saved, do, dlse), None


flash.defvjp(forward, backward)


def attention(
    q, k, v, *, causal=False, window=None, mask=None, segment_ids=None, soft_cap=None, scale=None, save_residuals=False
):
    b, t, n, h = q.shape
    s, d = k.shape[1], v.shape[-1]
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, mask=mask, segment_ids=segment_ids)
    more_q, more_k = -t % BQ, -s % BK
    pad = lambda x, more: jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, more), (0, 0)))
    ok = jnp.pad(seen, ((0, 0), (0, 0), (0, more_q), (0, more_k)))
    out, lse, top = flash(
        pad(q.astype(jnp.float32), more_q),
        pad(clear(k, seen), more_k),
        pad(clear(v, seen), more_k),
        ok,
        scale,
        soft_cap,
    )
    out = out[:, :, :t].swapaxes(1, 2).astype(q.dtype)
    return (out, {"logsumexp": lse[..., :t], "max_logits": top[..., :t]}) if save_residuals else out
