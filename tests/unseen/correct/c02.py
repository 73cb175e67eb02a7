"""Online softmax over key blocks, from the last block to the first."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


def visible(q, k, causal=False, window=None, mask=None, segment_ids=None, shift=0):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None] + shift
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


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    mask=None,
    segment_ids=None,
    soft_cap=None,
    sinks=None,
    scale=None,
    save_residuals=False,
    block=48,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, window=window, mask=mask, segment_ids=segment_ids, shift=s - t)
    kf, vf = (jnp.repeat(clear(x, seen), n // heads, axis=2) for x in (k, v))
    qf = q.astype(jnp.float32)
    blocks = -(-s // block)
    pad = blocks * block - s
    kb = jnp.pad(kf, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, blocks, block, n, h).swapaxes(0, 1)
    vb = jnp.pad(vf, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, blocks, block, n, d).swapaxes(0, 1)
    mb = jnp.moveaxis(jnp.pad(seen, ((0, 0), (0, 0), (0, 0), (0, pad))).reshape(b, n, t, blocks, block), 3, 0)

    def step(carry, operands):
        top, total, acc = carry
        kj, vj, ok = operands
        x = jnp.einsum("btnh,bsnh->bnts", qf, kj, precision=HIGHEST) * scale
        x = jnp.where(ok, x, 0)
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(ok, x, -jnp.inf)
        new = jnp.maximum(top, jax.lax.stop_gradient(x.max(-1)))
        safe = jnp.where(new == -jnp.inf, 0, new)
        shrink = jnp.exp(top - safe)
        weights = jnp.where(ok, jnp.exp(x - safe[..., None]), 0)
        total = total * shrink + weights.sum(-1)
        acc = acc * shrink[..., None] + jnp.einsum("bnts,bsnv->bntv", weights, vj, precision=HIGHEST)
        return (new, total, acc), None

    start = (
        jnp.full((b, n, t), -jnp.inf, jnp.float32),
        jnp.zeros((b, n, t), jnp.float32),
        jnp.zeros((b, n, t, d), jnp.float32),
    )
    (top, total, acc), _ = jax.lax.scan(step, start, (kb, vb, mb), reverse=True)
    pivot = top
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, None]
        pivot = jnp.maximum(top, jax.lax.stop_gradient(sink))
        safe = jnp.where(pivot == -jnp.inf, 0, pivot)
        shrink = jnp.exp(top - safe)
        total = total * shrink + jnp.exp(sink - safe)
        acc = acc * shrink[..., None]
    empty = total == 0
    divisor = jnp.where(empty, 1, total)
    out = (acc / divisor[..., None]).swapaxes(1, 2).astype(q.dtype)
    if save_residuals:
        lse = jnp.where(empty, -jnp.inf, jnp.where(empty, 0, pivot) + jnp.log(divisor))
        return out, {"logsumexp": lse, "max_logits": top}
    return out
