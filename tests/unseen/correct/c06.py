"""Online softmax with lazy rescaling: a row follows its maximum only if it rises by more than SLACK."""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
SLACK = 8.0


def visible(q, k, causal=False, mask=None, segment_ids=None):
    b, t, n, s = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    at = jnp.arange(t, dtype=jnp.int32)[:, None]
    j = jnp.arange(s, dtype=jnp.int32)[None, :]
    seen = jnp.ones((1, 1, t, s), bool)
    if causal:
        seen &= j <= at
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
    mask=None,
    segment_ids=None,
    bias=None,
    sinks=None,
    scale=None,
    save_residuals=False,
    block=32,
):
    b, t, n, h = q.shape
    s, heads, d = k.shape[1], k.shape[2], v.shape[-1]
    scale = h**-0.5 if scale is None else scale
    seen = visible(q, k, causal=causal, mask=mask, segment_ids=segment_ids)
    kf, vf = (jnp.repeat(clear(x, seen), n // heads, axis=2) for x in (k, v))
    blocks = -(-s // block)
    pad = blocks * block - s
    kb, vb = (
        jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, blocks, block, n, -1).swapaxes(0, 1) for x in (kf, vf)
    )
    last = lambda x: jnp.moveaxis(jnp.pad(x, ((0, 0),) * 3 + ((0, pad),)).reshape(b, n, t, blocks, block), 3, 0)
    operands = [kb, vb, last(seen)]
    if bias is not None:
        operands.append(last(jnp.broadcast_to(bias.astype(jnp.float32), (b, n, t, s))))
    qf = q.astype(jnp.float32)

    def step(carry, operands):
        pivot, top, total, acc = carry
        kj, vj, ok = operands[:3]
        x = jnp.einsum("btnh,bsnh->bnts", qf, kj, precision=HIGHEST) * scale
        if bias is not None:
            x = x + operands[3]
        x = jnp.where(ok, x, -jnp.inf)
        highest = jax.lax.stop_gradient(x.max(-1))
        top = jnp.maximum(top, highest)
        new = jnp.where(highest > pivot + SLACK, highest, pivot)
        safe = jnp.where(new == -jnp.inf, 0, new)
        factor = jnp.where(new == pivot, 1, jnp.exp(pivot - safe))
        weights = jnp.where(ok, jnp.exp(x - safe[..., None]), 0)
        total = factor * total + weights.sum(-1)
        acc = factor[..., None] * acc + jnp.einsum("bnts,bsnv->bntv", weights, vj, precision=HIGHEST)
        return (new, top, total, acc), None

    low = jnp.full((b, n, t), -jnp.inf, jnp.float32)
    start = (low, low, jnp.zeros((b, n, t), jnp.float32), jnp.zeros((b, n, t, d), jnp.float32))
    (pivot, top, total, acc), _ = jax.lax.scan(step, start, tuple(operands))
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, :, None]
        new = jnp.maximum(pivot, jax.lax.stop_gradient(sink))
        safe = jnp.where(new == -jnp.inf, 0, new)
        factor = jnp.exp(pivot - safe)
        total = total * factor + jnp.exp(sink - safe)
        acc = acc * factor[..., None]
        pivot = new
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = (acc / total[..., None]).swapaxes(1, 2).astype(q.dtype)
    if save_residuals:
        return out, {"logsumexp": jnp.where(empty, -jnp.inf, pivot + jnp.log(total)), "max_logits": top}
    return out
