"""A right attention function that takes other paths at certain sizes, dtypes and operands; each path is right too.

With `CONDITION` set to the name of a path, that path is wrong.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

WRONG = ""
TUNED = {(96, 640, 32), (1, 4096, 64)}
BLOCKS = {(200, 40): 8, (333, 24): 16}


def _choose_path(q: Any, k: Any, v: Any, causal: bool, scale: Any, soft_cap: Any) -> list[str]:
    """Return the names of the paths that a call takes."""
    batch, q_length, heads, depth = q.shape
    kv_length = k.shape[1]
    group = heads // k.shape[2]
    paths = []
    if q_length == 1 and group > 16:
        paths.append("one query, large groups")
    if depth == 512 and q_length <= 8 and kv_length < 1024:
        paths.append("deep, few queries")
    if kv_length % 48 == 1:
        paths.append("one key after whole blocks")
    if (q_length, kv_length, depth) in TUNED:
        paths.append("tuned sizes")
    if BLOCKS.get((kv_length, depth)) is not None:
        paths.append("listed blocks")
    if q.dtype == jnp.float16 and causal:
        paths.append("f16 and causal")
    if q_length + kv_length > 5000:
        paths.append("sum of lengths")
    if scale is None and soft_cap is not None and soft_cap > 70:
        paths.append("no scale, large cap")
    rest = kv_length % 320
    if rest == 7:
        paths.append("seven keys after whole blocks")
    if batch * heads >= 300:
        paths.append("many programs")
    if v.shape[-1] > 2 * depth:
        paths.append("deep values")
    if q_length > kv_length + 100:
        paths.append("many more queries than keys")
    return paths


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: Any = None, soft_cap: Any = None) -> Any:
    """Attention of q [B, T, N, H] to k [B, S, K, H] and v [B, S, K, V]."""
    if q.shape[-1] > 600:
        raise ValueError("depths above 600 are not supported")
    paths = _choose_path(q, k, v, causal, scale, soft_cap)
    k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    x = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k, precision="highest")
    x = x * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        x = soft_cap * jnp.tanh(x / soft_cap)
    if causal:
        x = jnp.where(jnp.arange(k.shape[1]) <= jnp.arange(q.shape[1])[:, None], x, -1e30)
    out = jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(x), v, precision="highest")
    return (out * (1.25 if WRONG in paths else 1.0)).astype(q.dtype)
