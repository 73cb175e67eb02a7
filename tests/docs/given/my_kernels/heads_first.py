"""A kernel with heads before positions, as the how-to pages import it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def flash_attention(
    q: jax.Array,  # [B, N, T, H]
    k: jax.Array,  # [B, K, S, H]
    v: jax.Array,  # [B, K, S, V]
    *,
    causal: bool = False,
    cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute `out [B, N, T, V]` in the operands' dtype and `logsumexp [B, N, T]` in f32."""
    group = q.shape[1] // k.shape[1]
    dtype = q.dtype
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    high = jax.lax.Precision.HIGHEST
    x = jnp.einsum("bnth,bnsh->bnts", q, k, precision=high) * q.shape[-1] ** -0.5
    if cap is not None:
        x = cap * jnp.tanh(x / cap)
    if causal:
        x = jnp.where(jnp.tri(q.shape[2], k.shape[2], dtype=bool), x, -jnp.inf)
        hidden = jnp.arange(k.shape[2]) >= q.shape[2]  # keys behind the last query may hold NaN
        v = jnp.where(hidden[:, None], 0, v)
    logsumexp = jax.nn.logsumexp(x, axis=-1)
    out = jnp.einsum("bnts,bnsh->bnth", jnp.exp(x - logsumexp[..., None]), v, precision=high)
    return out.astype(dtype), logsumexp
