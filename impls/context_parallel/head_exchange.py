"""Exchange sequence shards for head shards: every device gets all tokens of some heads, and returns its results.

This is the scheme of DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509). Key heads that are fewer than the
devices, or do not divide them, are replicated, each as often as makes their number a multiple of the devices. All query
heads of a group then have a replica on their device, and the gradient of a key head is the sum over its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from impls.context_parallel.local_attention import Operands


def count_replicas(num_kv_heads: int, devices: int) -> int:
    """Count the replicas of each key head for which the devices get equally many heads."""
    return math.lcm(num_kv_heads, devices) // num_kv_heads


def require_divisible_heads(num_q_heads: int, devices: int) -> None:
    """Raise `NotImplementedError` if the query heads cannot be shared by the devices."""
    if num_q_heads % devices:
        raise NotImplementedError(
            f"the number of query heads must be a multiple of the {devices} devices that share them, got {num_q_heads}"
        )


def give_tokens(x: jax.Array, axis_name: str, *, tokens: int = 1, heads: int = 2) -> jax.Array:
    """Exchange tokens for heads: `[B, T_local, N, .]` of this device to `[B, T, N / devices, .]`."""
    return lax.all_to_all(x, axis_name, split_axis=heads, concat_axis=tokens, tiled=True)


def give_heads(x: jax.Array, axis_name: str, *, tokens: int = 1, heads: int = 2) -> jax.Array:
    """Exchange heads for tokens, the inverse of `give_tokens`."""
    return lax.all_to_all(x, axis_name, split_axis=tokens, concat_axis=heads, tiled=True)


def exchange_operands(operands: Operands, axis_name: str) -> Operands:
    """Exchange this device's tokens of all heads for all devices' tokens of its heads; linear in all floats.

    Tokens come in the order of the devices. Operands without an axis of tokens or of heads are cut or gathered.
    """
    replicas = count_replicas(operands.k.shape[2], lax.axis_size(axis_name))
    k, v = (jnp.repeat(x, replicas, axis=2) if replicas > 1 else x for x in (operands.k, operands.v))
    q, k, v = (give_tokens(x, axis_name) for x in (operands.q, k, v))
    ids = jax.tree.map(lambda x: lax.all_gather(x, axis_name, axis=1, tiled=True), operands.segment_ids)
    sinks = None if operands.sinks is None else _cut_heads(operands.sinks, axis_name, 0)
    return Operands(q, k, v, _exchange_bias(operands.bias, axis_name), sinks, ids)


def pull_back_exchange(exchange: Callable[[Operands], Operands], operands: Operands, found: Operands) -> Operands:
    """Return the gradients of `operands` for the gradients `found` of `exchange(operands)`; sums are in f32."""
    like = operands._replace(segment_ids=None)
    wide, found = (jax.tree.map(lambda x: x.astype(jnp.float32), x) for x in (like, found))
    gradients = jax.vjp(exchange, wide)[1](found)[0]
    narrowed: Operands = jax.tree.map(lambda x, operand: x.astype(operand.dtype), gradients, like)
    return narrowed


def _exchange_bias(bias: jax.Array | None, axis_name: str) -> jax.Array | None:
    """Exchange the rows of a bias `[b, n, t, s]` for its heads, where it has these axes."""
    if bias is None:
        return None
    if bias.shape[1] > 1 and bias.shape[2] > 1:
        return give_tokens(bias, axis_name, tokens=2, heads=1)
    if bias.shape[1] > 1:
        return _cut_heads(bias, axis_name, 1)
    return lax.all_gather(bias, axis_name, axis=2, tiled=True) if bias.shape[2] > 1 else bias


def _cut_heads(x: jax.Array, axis_name: str, axis: int) -> jax.Array:
    """Cut out the heads of this device."""
    each = x.shape[axis] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * each, each, axis=axis)
