"""Compensated (Kahan) sums over small key blocks, with an optional choice of chunks by gates."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, causal=False, mask=None, shift=0):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None] + shift
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
    if mask is not None:
        seen = seen & mask
    return jnp.broadcast_to(seen, (b, n, t, s))


def clear(x, seen):
    """Zero rows of keys or values that no query of their group sees, in float32."""
    b, n, t, s = seen.shape
    live = seen.reshape(b, x.shape[2], -1, s).any(2)
    return jnp.where(live.swapaxes(1, 2)[..., None], x, 0).astype(jnp.float32)


def chosen_chunks(q, k, chunk, topk, shift):
    b, t, n, h = q.shape
    s, heads = k.shape[1], k.shape[2]
    count = -(-s // chunk)
    kf = jnp.pad(k.astype(jnp.float32), ((0, 0), (0, count * chunk - s), (0, 0), (0, 0)))
    sizes = jnp.asarray([min(chunk, s - c * chunk) for c in range(count)], jnp.float32)
    mean = kf.reshape(b, count, chunk, heads, h).sum(2) / sizes[:, None, None]
    gate = jnp.einsum(
        "btkgh,bckh->bkgtc", q.astype(jnp.float32).reshape(b, t, heads, n // heads, h), mean, precision=HIGHEST
    ).reshape(b, n, t, count)
    c = jnp.arange(count)
    own = ((jnp.arange(t) + shift) // chunk)[:, None]
    earlier = c < own
    better = (gate[..., None, :] > gate[..., :, None]) | ((gate[..., None, :] == gate[..., :, None]) & (c < c[:, None]))
    rank = (better & earlier[:, None, :]).sum(-1)
    chosen = (earlier & (rank < topk - 1)) | (c == own)
    return jnp.repeat(chosen, chunk, axis=-1)[..., :s]


def kahan(total, error, part):
    part = part - error
    new = total + part
    return new, (new - total) - part


def attention(q, k, v, *, causal=False, mask=None, moba=None, sinks=None, scale=None, save_residuals=False):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal or moba is not None, mask=mask, shift=s - t)
    if moba is not None:
        seen = seen & jax.lax.stop_gradient(chosen_chunks(q, k, *moba, s - t))
    kf, vf = (jnp.repeat(clear(x, seen), n // heads, axis=2) for x in (k, v))
    qf = q.astype(jnp.float32)
    size = 8
    pad = -s % size
    kb, vb = (
        jnp.moveaxis(jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, -1, size, n, x.shape[-1]), 1, 0)
        for x in (kf, vf)
    )
    okb = jnp.moveaxis(jnp.pad(seen, ((0, 0),) * 3 + ((0, pad),)).reshape(b, n, t, -1, size), 3, 0)

    def step(carry, operands):
        m, l, l_error, acc, acc_error = carry
        kj, vj, ok = operands
        x = jnp.where(ok, jnp.einsum("btnh,bsnh->bnts", qf, kj, precision=HIGHEST) * scale, -jnp.inf)
        new = jnp.maximum(m, jax.lax.stop_gradient(x.max(-1)))
        safe = jnp.where(new == -jnp.inf, 0, new)
        a = jnp.exp(m - safe)
        p = jnp.where(ok, jnp.exp(x - safe[..., None]), 0)
        l, l_error = kahan(l * a, l_error * a, p.sum(-1))
        a = a[..., None]
        acc, acc_error = kahan(acc * a, acc_error * a, jnp.einsum("bnts,bsnv->bntv", p, vj, precision=HIGHEST))
        return (new, l, l_error, acc, acc_error), None

    zero, zeros = jnp.zeros((b, n, t), jnp.float32), jnp.zeros((b, n, t, d), jnp.float32)
    start = (zero - jnp.inf, zero, zero, zeros, zeros)
    (top, l, _, acc, _), _ = jax.lax.scan(step, start, (kb, vb, okb))
    m = top
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, None]
        m = jnp.maximum(top, jax.lax.stop_gradient(sink))
        safe = jnp.where(m == -jnp.inf, 0, m)
        l = l * jnp.exp(top - safe) + jnp.exp(sink - safe)
        acc = acc * jnp.exp(top - safe)[..., None]
    empty = l == 0
    l = jnp.where(empty, 1, l)
    out = (acc / l[..., None]).swapaxes(1, 2).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.where(empty, -jnp.inf, m + jnp.log(l)), "max_logits": top}
    return out
