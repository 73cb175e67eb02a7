"""Split the operands of MoBA by key/value head, and compute the logits of one block.

A block is a number of queries that selected the same chunk of keys. The forward and the backward pass both use this
code. Lanes, rows, bins and blocks are explained in `impls.moba.moba_plan`. The logits z are

(1)  x_ij = scale <q_i, k_j> + bias_ij
(2)  z_ij = soft_cap tanh(x_ij / soft_cap)
(3)  z_ij = -inf, where i may not attend to j
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from impls.block_arithmetic import multiply, take_block
from impls.moba.moba_plan import MobaPlan, MobaWork

Array = jax.Array


class Operands(NamedTuple):
    """Array operands of a MoBA call, with k, v and bias truncated after the last query's position."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, V]
    bias: Array | None  # [B or 1, N or 1, T or 1, S or 1]
    sinks: Array | None  # [N]


class Lanes(NamedTuple):
    """Operands split into lanes (`impls.moba.moba_plan`)."""

    q: Array  # [L R, H]
    k: Array  # [bins, chunk, H]
    v: Array  # [bins, chunk, V]
    bias: Array | None  # [rows of the bias, C or 1, chunk or 1]


class RowBlock(NamedTuple):
    """One block of query rows, the keys and values of the chunk that they all selected, and the logits of these."""

    rows: Array  # [r], index of each row among the rows of all lanes; `L R` for padding rows
    bin: Array  # []
    q: Array  # [r, H]
    k: Array  # [chunk, H]
    v: Array  # [chunk, V]
    logits: Array  # [r, chunk] f32, -inf where not allowed
    slope: Array | None  # derivative dz/dx of the soft cap, same shape; None without a soft cap


class BlockSoftmax(NamedTuple):
    """Unnormalised softmax of the rows of each block over the keys of its chunk, f32."""

    maximum: Array  # [blocks, block_rows]
    total: Array  # [blocks, block_rows]
    out: Array  # [blocks, block_rows, V]


class GradientSums(NamedTuple):
    """Accumulated gradients, f32: dq by block, the others in the shapes of `Lanes`. dq and dk are not scaled."""

    q: Array  # [blocks, block_rows, H]
    k: Array
    v: Array
    bias: Array | None


def split_lanes(plan: MobaPlan, operands: Operands) -> Lanes:
    """Split the operands into lanes: queries become rows, and keys and values become bins."""
    return Lanes(
        q=flatten_rows(plan, operands.q),
        k=split_bins(plan, operands.k),
        v=split_bins(plan, operands.v),
        bias=None if operands.bias is None else _flatten_bias(plan, operands.bias),
    )


def flatten_rows(plan: MobaPlan, x: Array) -> Array:
    """Flatten queries `[B, T, N, D]` to rows `[L R, D]`."""
    return x.transpose(0, 2, 1, 3).reshape(plan.lanes * plan.rows, x.shape[3])


def restore_rows(plan: MobaPlan, x: Array) -> Array:
    """Restore rows `[L R, D]` to the shape `[B, T, N, D]`: the inverse of `flatten_rows`."""
    return x.reshape(plan.batch, plan.num_q_heads, plan.q_length, -1).transpose(0, 2, 1, 3)


def split_bins(plan: MobaPlan, x: Array) -> Array:
    """Split keys or values `[B, S, K, D]` into bins `[bins, chunk, D]`; the last chunk of a lane is zero-padded."""
    x = jnp.pad(x, ((0, 0), (0, plan.chunks * plan.moba.chunk - plan.kv_length), (0, 0), (0, 0)))
    return x.transpose(0, 2, 1, 3).reshape(plan.bins, plan.moba.chunk, x.shape[3])


def join_bins(plan: MobaPlan, x: Array) -> Array:
    """Join bins to keys or values `[B, S, K, D]`, without the padding: the inverse of `split_bins`."""
    x = x.reshape(plan.batch, plan.num_kv_heads, plan.chunks * plan.moba.chunk, -1)
    return x[:, :, : plan.kv_length].transpose(0, 2, 1, 3)


def compute_block(plan: MobaPlan, lanes: Lanes, work: MobaWork, number: Array) -> RowBlock:
    """Compute the logits of the rows of block `number` and the keys of its bin."""
    rows, which = take_block(work.rows, number), take_block(work.bins, number)
    q, k, v = lanes.q.at[rows].get(mode="fill", fill_value=0), take_block(lanes.k, which), take_block(lanes.v, which)
    logits = multiply("rh,jh->rj", q, k) * plan.scale  # the scaled logits x, equation (1)
    if lanes.bias is not None:
        logits = logits + lanes.bias[locate_bias(plan, lanes.bias, rows, which)].astype(jnp.float32)
    slope = None
    if plan.soft_cap is not None:
        tanh = jnp.tanh(logits / plan.soft_cap)
        logits, slope = plan.soft_cap * tanh, 1 - tanh * tanh  # (2)
    key = which % plan.chunks * plan.moba.chunk + jnp.arange(plan.moba.chunk, dtype=jnp.int32)
    # A padding row gets the position of another row, so it is hidden by its row index instead.
    position = plan.position[rows % plan.rows]
    allowed = (key <= position[:, None]) & (rows < plan.lanes * plan.rows)[:, None]
    logits = jnp.where(allowed, logits, -jnp.inf)  # mask, equation (3)
    return RowBlock(rows, which, q, k, v, logits, slope)


def locate_bias(plan: MobaPlan, bias: Array, rows: Array, which: Array) -> tuple[Array, Array]:
    """Find the indices of a block's rows in `bias [rows of the bias, C or 1, chunk or 1]`; any for padding rows."""
    assert plan.bias_shape is not None
    batch, heads, queries, _ = plan.bias_shape
    row = jnp.minimum(rows, plan.lanes * plan.rows - 1)
    query = row % plan.q_length if queries > 1 else 0
    head = row // plan.q_length % plan.num_q_heads if heads > 1 else 0
    line = row // (plan.q_length * plan.num_q_heads) if batch > 1 else jnp.zeros_like(row)
    return (line * heads + head) * queries + query, which % plan.chunks % bias.shape[1]


def _flatten_bias(plan: MobaPlan, bias: Array) -> Array:
    """Flatten a bias `[b, n, t, s]` to `[b n t, C or 1, chunk or 1]`."""
    if bias.shape[3] == 1:
        return bias.reshape(-1, 1, 1)
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, plan.chunks * plan.moba.chunk - plan.kv_length)))
    return bias.reshape(-1, plan.chunks, plan.moba.chunk)


def restore_bias(plan: MobaPlan, x: Array) -> Array:
    """Restore a flattened bias to its own shape `[b, n, t, s]`: the inverse of `_flatten_bias`."""
    assert plan.bias_shape is not None
    return x.reshape(*plan.bias_shape[:3], -1)[..., : plan.bias_shape[3]]
