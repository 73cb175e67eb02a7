"""Flash decoding: each program reads one split of the cache; the parts are merged afterwards."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

HIGHEST = jax.lax.Precision.HIGHEST
SPLIT = 32


def forward_only(f):
    """Refuse to differentiate f."""
    g = jax.custom_jvp(f)

    @g.defjvp
    def _(primals, tangents):
        raise NotImplementedError("derivatives of a decoding kernel")

    return g


def kernel(q_ref, k_ref, v_ref, length_ref, o_ref, m_ref, l_ref, *, scale, soft_cap, left, right, shift, group):
    rows = q_ref.shape[0]
    start = pl.program_id(2) * SPLIT
    key = start + jax.lax.broadcasted_iota(jnp.int32, (rows, SPLIT), 1)
    at = jax.lax.broadcasted_iota(jnp.int32, (rows, SPLIT), 0) // group + shift
    ok = key < length_ref[0, 0]
    if left is not None:
        ok = ok & (key >= at - left)
    if right is not None:
        ok = ok & (key <= at + right)
    live = ok.any(axis=0)[:, None]
    k = jnp.where(live, k_ref[...].astype(jnp.float32), 0.0)
    v = jnp.where(live, v_ref[...].astype(jnp.float32), 0.0)
    q = q_ref[...].astype(jnp.float32)
    x = jnp.dot(q, k.T, precision=HIGHEST, preferred_element_type=jnp.float32) * scale
    x = jnp.where(ok, x, 0.0)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    x = jnp.where(ok, x, -jnp.inf)
    m = x.max(axis=1, keepdims=True)
    e = jnp.exp(x - jnp.where(m == -jnp.inf, 0.0, m))
    m_ref[...] = m
    l_ref[...] = e.sum(axis=1, keepdims=True)
    o_ref[...] = jnp.dot(e, v, precision=HIGHEST, preferred_element_type=jnp.float32)


def attention(
    q, k, v, *, causal=False, window=None, kv_lengths=None, soft_cap=None, sinks=None, scale=None, save_residuals=False
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    g = n // heads
    scale = h**-0.5 if scale is None else scale
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    lengths = jnp.full((b,), s, jnp.int32) if kv_lengths is None else kv_lengths
    lengths = jnp.minimum(lengths, s)
    splits = -(-s // SPLIT)
    cache = lambda x: jnp.pad(x, ((0, 0), (0, splits * SPLIT - s), (0, 0), (0, 0))).swapaxes(1, 2)
    rows = q.reshape(b, t, heads, g, h).swapaxes(1, 2).reshape(b, heads, t * g, h)
    part = lambda width: pl.BlockSpec((None, None, None, t * g, width), lambda x, y, c: (c, x, y, 0, 0))
    kv = lambda width: pl.BlockSpec((None, None, SPLIT, width), lambda x, y, c: (x, y, c, 0))
    call = pl.pallas_call(
        partial(kernel, scale=scale, soft_cap=soft_cap, left=left, right=right, shift=s - t, group=g),
        grid=(b, heads, splits),
        in_specs=[
            pl.BlockSpec((None, None, t * g, h), lambda x, y, c: (x, y, 0, 0)),
            kv(h),
            kv(d),
            pl.BlockSpec((1, 1), lambda x, y, c: (x, 0)),
        ],
        out_specs=[part(d), part(1), part(1)],
        out_shape=[jax.ShapeDtypeStruct((splits, b, heads, t * g, width), jnp.float32) for width in (d, 1, 1)],
        interpret=True,
    )
    o, m, l = forward_only(call)(rows, cache(k), cache(v), lengths.astype(jnp.int32)[:, None])
    top = m.max(0)
    pivot = top
    if sinks is not None:
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(heads, 1, g), (1, t, 1)).reshape(heads, t * g, 1)
        pivot = jnp.maximum(top, sink)
    safe = jnp.where(pivot == -jnp.inf, 0, pivot)
    share = jnp.exp(m - safe)
    total = (l * share).sum(0)
    if sinks is not None:
        total = total + jnp.exp(sink - safe)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = (o * share).sum(0) / total
    back = lambda x: x.reshape(b, heads, t, g, -1).swapaxes(1, 2).reshape(b, t, n, -1)
    out = back(out).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(empty, -jnp.inf, safe + jnp.log(total))
        return out, {"logsumexp": back(lse)[..., 0].swapaxes(1, 2), "max_logits": back(top)[..., 0].swapaxes(1, 2)}
    return out
