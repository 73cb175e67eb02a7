"""Operands of the blockwise kernel cut in tiles, and results joined again.

Lengths are padded to whole tiles and heads are split: rows are `[B, K, G, T]`, queries `[B, K, G, T, H]`, keys
`[key blocks, B, K, BLOCK_KV, H]`. Masks and bias may have 1 for `B`, `K` and `G`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# Different on purpose: a block size used for the other axis must show.
BLOCK_Q, BLOCK_KV = 32, 64
EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in one call."""

    batch: int
    q_length: int
    kv_length: int
    num_q_heads: int
    num_kv_heads: int
    scale: float
    soft_cap: float | None

    @property
    def kv_blocks(self) -> int:
        """Key blocks, the last one padded."""
        return -(-self.kv_length // BLOCK_KV)

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.num_q_heads // self.num_kv_heads


def split_heads(x: jax.Array, call: Call) -> jax.Array:
    """`[B, T, N, D]` to `[B, K, G, T, D]`, `T` padded."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK_Q), (0, 0), (0, 0)])
    return x.reshape(*x.shape[:2], call.num_kv_heads, call.group, -1).transpose(0, 2, 3, 1, 4)


def join_heads(x: jax.Array, call: Call) -> jax.Array:
    """Inverse of `split_heads`."""
    x = x.transpose(0, 3, 1, 2, 4)
    return x.reshape(*x.shape[:2], call.num_q_heads, -1)[:, : call.q_length]


def split_rows(x: jax.Array, call: Call, fill: float = 0.0) -> jax.Array:
    """`[B, N, T]` to `[B, K, G, T]`, `T` padded with `fill`."""
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % BLOCK_Q)], constant_values=fill)
    return x.reshape(x.shape[0], call.num_kv_heads, call.group, -1)


def join_rows(x: jax.Array, call: Call) -> jax.Array:
    """`[B, K, G, T]` to `[B, N, T]`, `T` still padded."""
    return x.reshape(call.batch, call.num_q_heads, -1)


def split_keys(x: jax.Array) -> jax.Array:
    """`[B, S, K, D]` to `[key blocks, B, K, BLOCK_KV, D]`."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK_KV), (0, 0), (0, 0)])
    return x.reshape(x.shape[0], -1, BLOCK_KV, *x.shape[2:]).transpose(1, 0, 3, 2, 4)


def join_keys(blocks: jax.Array, call: Call) -> jax.Array:
    """`[key blocks, B, K, BLOCK_KV, D]` to `[B, S, K, D]`; blocks that were not visited are zero."""
    x = jnp.moveaxis(blocks, 0, 2).reshape(*blocks.shape[1:3], -1, blocks.shape[4])
    x = jnp.pad(x, [(0, 0), (0, 0), (0, max(0, call.kv_length - x.shape[2])), (0, 0)])
    return x[:, :, : call.kv_length].transpose(0, 2, 1, 3)


def _split_heads_of(x: jax.Array, call: Call) -> jax.Array:
    """`[b, n, t, s]` to `[b, k, g, t, s]`."""
    heads = (1, 1) if x.shape[1] == 1 else (call.num_kv_heads, call.group)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def split_bias(bias: jax.Array, call: Call) -> jax.Array:
    """`[b, n, t, S]` to `[key blocks, b, k, g, t, BLOCK_KV]`."""
    x = _split_heads_of(bias.astype(jnp.float32), call)
    rows = -x.shape[3] % BLOCK_Q if x.shape[3] > 1 else 0
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, rows), (0, -x.shape[4] % BLOCK_KV)])
    return jnp.moveaxis(x.reshape(*x.shape[:4], -1, BLOCK_KV), 4, 0)


def split_mask(allowed: jax.Array, call: Call) -> jax.Array:
    """`[b, n, T, S]` to tiles `[key blocks, b, k, g, q tiles, BLOCK_Q, BLOCK_KV]`."""
    x = jnp.broadcast_to(allowed, (*allowed.shape[:2], call.q_length, call.kv_length))
    x = _split_heads_of(x, call)
    # Padding repeats the last row and column, which changes the kind of no tile; `in_range` takes it out.
    padding = [(0, 0)] * 3 + [(0, -call.q_length % BLOCK_Q), (0, -call.kv_length % BLOCK_KV)]
    x = jnp.pad(x, padding, mode="edge")
    x = x.reshape(*x.shape[:3], -1, BLOCK_Q, x.shape[4] // BLOCK_KV, BLOCK_KV)
    return jnp.moveaxis(x, 5, 0)


def join_bias(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`[key blocks, b, k, g, t, BLOCK_KV]` to the bias's `shape [b, n, t, S]`."""
    x = jnp.moveaxis(blocks, 0, 4)
    x = x.reshape(*shape[:2], x.shape[3], -1)
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, max(0, shape[3] - x.shape[3]))])
    return x[:, :, : shape[2], : shape[3]]
