"""Renumber segment ids for functions that take negative ids for padding."""

from __future__ import annotations

from typing import Any


def mark_padding(q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
    """Return the segment ids with -1 for each token that has no partner, and no other negative id.

    A query without a key of its id attends to nothing, and nothing attends to a key without a query of its id. So they
    may count as padding. Any other id becomes the index of the first key that has it. Which pairs may attend stays the
    same.

    Args:
      q_ids: ids of the queries, `[B, T]`, or `[T]` under `vmap`.
      kv_ids: ids of the keys, `[B, S]`, or `[S]` under `vmap`.
    """
    import jax.numpy as jnp  # imported late, since plain functions are also read without JAX

    q_ids, kv_ids = jnp.asarray(q_ids), jnp.asarray(kv_ids)
    same = q_ids[..., :, None] == kv_ids[..., None, :]
    first = (kv_ids[..., :, None] == kv_ids[..., None, :]).argmax(axis=-1)
    return (
        jnp.where(same.any(axis=-1), same.argmax(axis=-1), -1).astype(jnp.int32),
        jnp.where(same.any(axis=-2), first, -1).astype(jnp.int32),
    )
