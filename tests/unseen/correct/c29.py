"""Dense latents: one vector is key and, in its first coordinates, value. The backward pass recomputes."""

from functools import partial

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def logits(q, c, ok, bias, scale, soft_cap):
    x = jnp.einsum("btnh,bsh->bnts", q, c, precision=HIGHEST) * scale
    x = x if bias is None else x + bias
    x = jnp.where(ok, x, 0)
    slope = 1.0
    if soft_cap is not None:
        y = jnp.tanh(x / soft_cap)
        x, slope = y * soft_cap, 1 - y * y
    return jnp.where(ok, x, -jnp.inf), slope


def cut(x, axis, size):
    more = [(0, 0)] * x.ndim
    more[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, more)
    return jnp.moveaxis(x.reshape(x.shape[:axis] + (-1, size) + x.shape[axis + 1 :]), axis, 0)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def core(q, c, bias, sinks, ok, scale, soft_cap, value_dim, size):
    return forward(q, c, bias, sinks, ok, scale, soft_cap, value_dim, size)[0]


def forward(q, c, bias, sinks, ok, scale, soft_cap, value_dim, size):
    b, t, n, _ = q.shape

    def step(carry, operands):
        m, l, acc = carry
        cj, okj, biasj = operands
        x, _ = logits(q, cj, okj, biasj, scale, soft_cap)
        new = jnp.maximum(m, jax.lax.stop_gradient(x.max(-1)))
        safe = jnp.where(new == -jnp.inf, 0, new)
        alpha = jnp.exp(m - safe)
        p = jnp.where(okj, jnp.exp(x - safe[..., None]), 0)
        o = jnp.einsum("bnts,bsv->bntv", p, cj[..., :value_dim], precision=HIGHEST)
        return (new, l * alpha + p.sum(-1), acc * alpha[..., None] + o), None

    zero = jnp.zeros((b, n, t), jnp.float32)
    start = (zero - jnp.inf, zero, jnp.zeros((b, n, t, value_dim), jnp.float32))
    blocks = (cut(c, 1, size), cut(ok, 3, size), None if bias is None else cut(bias, 3, size))
    (top, l, acc), _ = jax.lax.scan(step, start, blocks)
    m = top
    if sinks is not None:
        m = jnp.maximum(top, jax.lax.stop_gradient(sinks)[:, None])
        safe = jnp.where(m == -jnp.inf, 0, m)
        l = l * jnp.exp(top - safe) + jnp.exp(sinks[:, None] - safe)
        acc = acc * jnp.exp(top - safe)[..., None]
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = acc / l[..., None]
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))
    return (out, lse, top), (q, c, bias, sinks, ok, out, lse)


def backward(scale, soft_cap, value_dim, size, saved, cotangents):
    q, c, bias, sinks, ok, out, lse = saved
    do, dlse, _ = cotangents
    delta = (out * do).sum(-1) - dlse
    shift = jnp.where(lse == -jnp.inf, 0, lse)

    def step(dq, operands):
        cj, okj, biasj = operands
        x, slope = logits(q, cj, okj, biasj, scale, soft_cap)
        p = jnp.exp(x - shift[..., None])
        dp = jnp.einsum("bntv,bsv->bnts", do, cj[..., :value_dim], precision=HIGHEST)
        dx = jnp.where(okj, p * (dp - delta[..., None]) * slope, 0)
        dq = dq + scale * jnp.einsum("bnts,bsh->btnh", dx, cj, precision=HIGHEST)
        dc = scale * jnp.einsum("bnts,btnh->bsh", dx, q, precision=HIGHEST)
        dc = dc.at[..., :value_dim].add(jnp.einsum("bnts,bntv->bsv", p, do, precision=HIGHEST))
        return dq, (dc, None if biasj is None else dx)

    blocks = (cut(c, 1, size), cut(ok, 3, size), None if bias is None else cut(bias, 3, size))
    dq, (dc, dbias) = jax.lax.scan(step, jnp.zeros_like(q), blocks)
    join = lambda x, axis, length: jax.lax.slice_in_dim(
        jnp.moveaxis(x, 0, axis).reshape(x.shape[1 : axis + 1] + (-1,) + x.shape[axis + 2 :]), 0, length, axis=axis
    )
    dbias = None if bias is None else join(dbias, 3, c.shape[1])
    dsinks = None if sinks is None else -(jnp.exp(sinks[:, None] - shift) * delta).sum((0, 2))
    return dq, join(dc, 1, c.shape[1]), dbias, dsinks, None


core.defvjp(forward, backward)


def attention(
    q,
    latent,
    *,
    value_dim,
    scale,
    causal=False,
    window=None,
    mask=None,
    segment_ids=None,
    soft_cap=None,
    sinks=None,
    bias=None,
    save_residuals=False,
    size=32,
):
    b, t, n, h = q.shape
    s = latent.shape[1]
    i, j = jnp.arange(t, dtype=jnp.int32)[:, None], jnp.arange(s, dtype=jnp.int32)
    ok = jnp.ones((b, n, t, s), bool) if mask is None else jnp.broadcast_to(mask, (b, n, t, s))
    left, right = (None, None) if window is None else window
    if causal:
        ok &= j <= i
    if left is not None:
        ok &= j >= i - left
    if right is not None:
        ok &= j <= i + right
    if segment_ids is not None:
        ok &= (segment_ids[0][:, :, None] == segment_ids[1][:, None, :])[:, None]
    c = jnp.where(ok.any((1, 2))[..., None], latent, 0).astype(jnp.float32)
    if bias is not None:
        bias = jnp.broadcast_to(bias.astype(jnp.float32), (b, n, t, s))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    out, lse, top = core(q.astype(jnp.float32), c, bias, sinks, ok, scale, soft_cap, value_dim, size)
    out = out.swapaxes(1, 2).astype(q.dtype)
    return (out, {"logsumexp": lse, "max_logits": top}) if save_residuals else out
