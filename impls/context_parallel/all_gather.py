"""Context parallelism by all-gather: every device gets all keys and attends for its own queries.

The scheme of Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2), with queries in load-balanced order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cases.masks import Mask
from impls.context_parallel.layout import Layout
from impls.context_parallel.local import Kernel, Local, Operands, Outputs
from impls.context_parallel.masks import schedule
from impls.context_parallel.parts import with_sinks


def all_gather(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    kernel: Kernel,
    mask: Mask,
    queries: Layout,
    keys: Layout,
    axis_name: str,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Attention of this device's queries; call inside `shard_map`, over the mesh axis `axis_name`.

    Args:
      q: this device's queries `[B, queries.local, N, H]`, as `queries.deal` puts them.
      k: this device's keys `[B, keys.local, K, H]`, in sequence order (`keys.balanced` false).
      v: its values `[B, keys.local, K, V]`.
      kernel: the canonical call.
      mask: of the whole sequence.
      queries: how queries are shared.
      keys: how keys are.
      axis_name: the mesh axis.
      segment_ids: of this device's queries `[B, queries.local]` and keys `[B, keys.local]`.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
      sinks: `[N]`, the same on every device.
      bias: `[b, n, t, s]` with the rows of this device's queries, or 1, and the columns of all keys, or 1.
      scale: factor of `<q, k>`, default `1 / sqrt(H)`.

    Returns:
      f32 `out [B, queries.local, N, V]`, and the residuals.

    Raises:
      ValueError: keys in balanced order.
    """
    if keys.balanced:
        raise ValueError("keys must be in sequence order to be gathered, got a balanced Layout")
    gather = functools.partial(lax.all_gather, axis_name=axis_name, axis=1, tiled=True)
    k, v = (gather(x)[:, : keys.length] for x in (k, v))
    if segment_ids is not None:
        segment_ids = segment_ids[0], gather(segment_ids[1])[:, : keys.length]
    plan = schedule(mask, queries, Layout(keys.length, 1, balanced=False))
    index = jnp.asarray([row[0] for row in plan.table], jnp.int32)[lax.axis_index(axis_name)]
    local = Local(kernel, plan.masks, soft_cap, scale)
    outputs = _attend(local, index, Operands(q, k, v, bias, segment_ids))
    out, logsumexp = outputs.out, outputs.logsumexp
    if sinks is not None:
        out, logsumexp = with_sinks(out, logsumexp, sinks)
    return out, {"logsumexp": logsumexp, "max_logits": outputs.max_logits}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(local: Local, index: jax.Array, operands: Operands) -> Outputs:
    return local.forward(index, operands)


def _forward(local: Local, index: jax.Array, operands: Operands) -> tuple[Outputs, Any]:
    return local.forward(index, operands), (index, operands)


def _backward(local: Local, saved: Any, cotangents: Outputs) -> tuple[None, Operands]:
    index, operands = saved
    return None, local.backward(index, operands, lambda _: (cotangents.out, cotangents.logsumexp))


_attend.defvjp(_forward, _backward)
