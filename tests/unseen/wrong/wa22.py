"""Attention with a batching rule: an outer vmap folds its axis into the batch of one kernel call."""

import functools

import jax
import jax.numpy as jnp


def _dot(eq, a, b):
    return jnp.einsum(eq, a, b, precision="highest", preferred_element_type=jnp.float32)


def _logits(q, k, lengths, scale, causal):
    x = scale * _dot("btkgh,bskh->bkgts", q, k)
    j = jnp.arange(x.shape[-1])
    seen = (j < lengths[:, None])[:, None, None, None]
    if causal:
        seen = seen & (j <= jnp.arange(x.shape[-2])[:, None])
    return jnp.where(seen, x, -jnp.inf)


@functools.lru_cache(maxsize=None)
def _kernel(scale, causal):
    @jax.custom_batching.custom_vmap
    def run(q, k, v, lengths):
        x = _logits(q, k, lengths, scale, causal)
        m = x.max(-1)
        m = jnp.where(jnp.isfinite(m), m, 0.0)
        w = jnp.exp(x - m[..., None])
        l = w.sum(-1)
        total = jnp.where(l > 0, l, 1.0)
        out = _dot("bkgts,bskv->btkgv", w / total[..., None], v.astype(jnp.float32)).astype(q.dtype)
        return out, jnp.where(l > 0, m + jnp.log(total), -jnp.inf)

    @run.def_vmap
    def rule(axis_size, in_batched, *args):
        def fold(x, batched):
            if batched:
                return x.reshape(-1, *x.shape[2:])
            return jnp.repeat(x, axis_size, axis=0)

        results = run(*(fold(x, batched) for x, batched in zip(args, in_batched)))
        return tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results), (True, True)

    @jax.custom_vjp
    def attend(q, k, v, lengths):
        return run(q, k, v, lengths)

    def fwd(q, k, v, lengths):
        out, lse = run(q, k, v, lengths)
        return (out, lse), (q, k, v, lengths, out, lse)

    def bwd(res, cotangents):
        q, k, v, lengths, out, lse = res
        do, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
        pivot = jnp.where(jnp.isfinite(lse), lse, jnp.inf)
        p = jnp.exp(_logits(q, k, lengths, scale, causal) - pivot[..., None])
        dp = _dot("btkgv,bskv->bkgts", do, v.astype(jnp.float32))
        delta = _dot("btkgv,btkgv->bkgt", do, out.astype(jnp.float32)) - dlse
        ds = jnp.where(p > 0, p * (dp - delta[..., None]), 0.0)
        dq = scale * _dot("bkgts,bskh->btkgh", ds, k.astype(jnp.float32))
        dk = scale * _dot("bkgts,btkgh->bskh", ds, q.astype(jnp.float32))
        dv = _dot("bkgts,btkgv->bskv", p, do)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None

    attend.defvjp(fwd, bwd)
    return attend


def attention(q, k, v, *, causal=False, kv_lengths=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, kv = k.shape[1], k.shape[2]
    scale = h**-0.5 if scale is None else scale
    lengths = jnp.full((b,), s, jnp.int32) if kv_lengths is None else jnp.asarray(kv_lengths)
    out, lse = _kernel(scale, bool(causal))(q.reshape(b, t, kv, n // kv, h), k, v, lengths)
    out = out.reshape(b, t, n, v.shape[-1])
    return (out, {"logsumexp": lse.reshape(b, n, t)}) if save_residuals else out
