"""Select the chunks of keys that each query attends to (the gate of MoBA), in memory linear in the lengths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from cases.moba_mask import Moba

_ROWS_AT_ONCE = 256  # queries whose gates are in memory at once
Array = jax.Array


def choose_chunks(moba: Moba, q: Array, k: Array, position: Array) -> Array:
    """Select the chunks of each query, int32 `[L, R, slots]`: its own chunk first, and `C` in empty slots.

    Args:
      moba: the mask.
      q: queries of each key/value head, `[L, R, H]`.
      k: keys of each key/value head, `[L, C, chunk, H]`. The last chunk is zero-padded. Its mean is never used, since
        no query is in a later chunk.
      position: position of each query among the keys, `[R]`.
    """
    chunks = k.shape[1]
    own = jnp.broadcast_to((position // moba.chunk)[None, :, None], (*q.shape[:2], 1))
    others = min(moba.topk - 1, chunks - 1)
    if others == 0:
        return own
    means = k.astype(jnp.float32).mean(axis=2)  # [L, C, H]

    def of_rows(rows: tuple[Array, Array]) -> Array:
        some, own = rows  # [L, rows, H], [L, rows, 1]
        queries = some.astype(jnp.float32)

        def gate(mean: Array) -> Array:
            return jnp.einsum("lrh,lh->lr", queries, mean, precision=lax.Precision.HIGHEST)

        # One product per chunk, so that equal chunks tie exactly: in a single product over all chunks the last bit of
        # a gate depends on its column.
        gates = jnp.moveaxis(lax.map(gate, means.swapaxes(0, 1)), 0, -1)
        gates = jnp.where(jnp.arange(chunks, dtype=jnp.int32) < own, gates, -jnp.inf)
        return lax.top_k(gates, others)[1]  # of equal gates, the lower index comes first

    rows = min(_ROWS_AT_ONCE, q.shape[1])
    chosen = _join_rows(lax.map(of_rows, (_split_rows(q, rows), _split_rows(own, rows))), q.shape[1]).astype(jnp.int32)
    return jnp.concatenate([own, jnp.where(chosen < own, chosen, chunks)], axis=-1)


def _split_rows(x: Array, rows: int) -> Array:
    """Split rows `[L, R, D]` into `[blocks, L, rows, D]`."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % rows), (0, 0)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, rows, x.shape[2]), 1, 0)


def _join_rows(x: Array, rows: int) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, x.shape[-1])[:, :rows]
