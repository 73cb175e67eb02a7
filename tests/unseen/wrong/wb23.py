import jax
import jax.numpy as jnp

HI = jax.lax.Precision.HIGHEST
F32 = jnp.float32


def _positions(lengths, slots):
    """Position of the token in each slot of each row."""
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    lap = lengths[:, None] // slots * slots
    position = lap + slot
    return jnp.where(position > lengths[:, None], position - slots, position)


def attention(
    q, k_cache, v_cache, *, cache_seqlens, window=None, soft_cap=None, sinks=None, scale=None, save_residuals=False
):
    b, t, n, h = q.shape
    heads, slots = k_cache.shape[1:3]
    scale = h**-0.5 if scale is None else scale
    key = _positions(cache_seqlens, slots)[:, None, :]
    query = (cache_seqlens[:, None] - t + jnp.arange(t, dtype=jnp.int32))[:, :, None]
    see = (key >= 0) & (key <= query)
    if window is not None:
        left, right = window
        if left is not None:
            see &= key >= query - left
        if right is not None:
            see &= key - right <= query
    live = see.any(axis=1)[:, None, :, None]
    k, v = (jnp.where(live, x, 0).astype(F32) for x in (k_cache, v_cache))
    grouped = q.astype(F32).reshape(b, t, heads, n // heads, h)
    x = jnp.einsum("btkgh,bksh->bkgts", grouped, k, precision=HI) * scale
    z = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
    z = jnp.where(see[:, None, None], z, -jnp.inf)
    m = z.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(F32).reshape(1, heads, n // heads, 1, 1)
        m = jnp.maximum(m, sink)
    m = jnp.where(jnp.isfinite(m), m, 0)
    w = jnp.exp(z - m)
    total = w.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - m)
    safe = jnp.where(total == 0, 1, total)
    out = jnp.einsum("bkgts,bksv->btkgv", w / safe, v, precision=HI).reshape(b, t, n, -1).astype(q.dtype)
    lse = jnp.where(total == 0, -jnp.inf, m + jnp.log(safe))[..., 0].reshape(b, n, t)
    return (out, {"logsumexp": lse}) if save_residuals else out
