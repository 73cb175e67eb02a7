"""Wrong steps of decode over splits of a long cache, each in place of a right one."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tests.planted.planting import splits, wrapped
from tests.planted.planting.splits import Call, Parts

Array = Any
_LOG2E = 1.4426950408889634


def splits_of(call: Call) -> int:
    return -(-call.kv_length // splits.split_length(call))


def floor_of_splits(parts: Parts, call: Call) -> Parts:
    whole = max(1, call.kv_length // splits.split_length(call))
    return Parts(*(x[:, :, :whole] for x in parts))


def four_slots(parts: Parts, call: Call) -> Parts:
    return Parts(*(x[:, :, :4] for x in parts))


def merge_without_max(parts: Parts, sinks: Array, call: Call) -> tuple[Array, Array]:
    """Sums and outputs of splits are added as if all had the same maximum."""
    top = jnp.broadcast_to(parts.max.max(axis=2, keepdims=True), parts.max.shape)
    return splits.merge(parts._replace(max=top), sinks, call)


def merge_unweighted(parts: Parts, sinks: Array, call: Call) -> tuple[Array, Array]:
    _, lse = splits.merge(parts, sinks, call)
    out = parts.acc / jnp.where(parts.sum == 0, 1, parts.sum)[..., None]
    return out.mean(axis=2), lse


def sink_in_the_first_split_alone(parts: Parts, sinks: Array, call: Call) -> tuple[Array, Array]:
    """The first split adds the sink to its sum, and a split without keys returns before it does."""
    if sinks is not None:
        sinks = jnp.where(parts.max[:, :, 0] == -jnp.inf, -jnp.inf, sinks)
    return splits.merge(parts, sinks, call)


def unguarded_part(z: Array, v: Array, call: Call) -> Parts:
    top = z.max(axis=-1)
    weights = jnp.exp(z - top[..., None])
    return Parts(top, weights.sum(axis=-1), jnp.einsum("bkprl,bkplv->bkprv", weights, v, precision="highest"))


def empty_counts_as_one(z: Array, v: Array, call: Call) -> Parts:
    """The statistics of a split without keys are those of one logit 0."""
    part = splits.part(z, v, call)
    empty = part.max == -jnp.inf
    return part._replace(max=jnp.where(empty, 0.0, part.max), sum=jnp.where(empty, 1.0, part.sum))


def base_two_of_splits(parts: Parts, sinks: Array, call: Call) -> tuple[Array, Array]:
    """Splits give their logsumexp in base two; the merge takes it for a natural one."""
    lse = parts.max + jnp.log(jnp.where(parts.sum == 0, 1, parts.sum))
    out = parts.acc / jnp.where(parts.sum == 0, 1, parts.sum)[..., None]
    found, _ = splits.merge(Parts(lse * _LOG2E, jnp.where(parts.sum == 0, 0.0, 1.0), out), sinks, call)
    return found, splits.merge(parts, sinks, call)[1]


def rounded_statistics(parts: Parts, call: Call) -> Parts:
    """The logsumexp of each split is kept in the operands' dtype."""
    if call.dtype.itemsize != 2:
        return parts
    safe = jnp.where(parts.sum == 0, 1, parts.sum)
    lse = (parts.max + jnp.log(safe)).astype(call.dtype).astype(jnp.float32)
    return Parts(lse, jnp.where(parts.sum == 0, 0.0, 1.0), parts.acc / safe[..., None])


def bias_of_the_first_split(bias: Array, call: Call, length: int) -> Array:
    rows = splits.pair_rows(bias, call, length)
    return jnp.broadcast_to(rows[:, :, :1], rows.shape)


def mask_by_even_splits(mask: Array, call: Call, length: int) -> Array:
    """Where a split starts is the cache over the number of splits, not rounded up as the keys' is."""
    count = splits_of(call)
    start = jnp.arange(count)[:, None] * -(-call.kv_length // count)
    at = jnp.minimum(start + jnp.arange(length), call.kv_length - 1)
    exists = jnp.arange(count * length) < call.kv_length
    shifted = mask[..., at.reshape(-1)] & exists
    return splits.pair_rows(shifted, call, length)


def last_split_is_masked(mask: Array, call: Call, length: int) -> Array:
    before = jnp.arange(call.kv_length) < (splits_of(call) - 1) * length
    return splits.pair_rows(mask | before, call, length)


def padding_is_seen(mask: Array, call: Call, length: int) -> Array:
    """Keys behind the end of the cache are those of a buffer that held zeros."""
    rows = splits.pair_rows(mask, call, length)
    return rows | splits.pair_rows(jnp.zeros_like(mask), call, length) | _behind(call, length)


def _behind(call: Call, length: int) -> Array:
    count = splits_of(call)
    return (jnp.arange(count * length) >= call.kv_length).reshape(count, 1, length)


def rows_by_head_first(mask: Array, call: Call, length: int) -> Array:
    """Rows are taken to be head after head, the queries of each within."""
    rows = jnp.arange(call.q_length * call.group)
    at = (rows % call.q_length) * call.group + rows // call.q_length
    return splits.pair_rows(mask, call, length)[:, :, :, at]


def out_by_head_first(x: Array, call: Call) -> Array:
    rows = jnp.arange(call.q_length * call.group)
    return splits.from_rows(x[:, :, (rows % call.group) * call.q_length + rows // call.group], call)


def tile_of_sixteen_rows(x: Array, call: Call) -> Array:
    rows = jnp.arange(call.q_length * call.group)[:, None]
    return splits.from_rows(jnp.where(rows < 16, x, 0), call)


def last_sequence_for_all(x: Array, call: Call) -> Array:
    """With more than one query, sequences have no stride of their own: all are written to one place, and read there."""
    out = splits.from_rows(x, call)
    return out if call.q_length == 1 else jnp.broadcast_to(out[-1:], out.shape)


def lse_by_head_first(lse: Array, call: Call) -> Array:
    """`[B, T, N]`, the rows of each key head written by head and read by query."""
    x = lse.reshape(call.batch, call.q_length, call.kv_heads, call.group).transpose(0, 2, 3, 1)
    x = x.reshape(call.batch, call.kv_heads, call.q_length, call.group).transpose(0, 2, 1, 3)
    return x.reshape(lse.shape)


def path_of_many_queries_without_sinks(arrays: wrapped.Arrays, statics: wrapped.Statics) -> Any:
    q_length, kv_length = arrays["q"].shape[1], arrays["k"].shape[1]
    if 8 < q_length <= 16 and kv_length > 1024:
        arrays = {name: x for name, x in arrays.items() if name != "sinks"}
    return wrapped.correct(arrays, statics)
