"""Context parallelism by all-gather: every device gets all keys and attends for its own queries.

This is the scheme of Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2), with queries in load-balanced order.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from cases.masks import Mask
from impls.context_parallel.local_attention import Kernel, LocalAttention, Operands, Outputs
from impls.context_parallel.sequence_layout import Layout, build_schedule
from impls.varying_axes import find_varying_axes, mark_varying


def all_gather(
    q: Float[Array, "B T_local N H"],
    k: Float[Array, "B S_local K H"],
    v: Float[Array, "B S_local K V"],
    *,
    kernel: Kernel,
    mask: Mask,
    queries: Layout,
    keys: Layout,
    axis_name: str,
    segment_ids: tuple[Int[Array, "B T_local"], Int[Array, "B S_local"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T_local s"] | None = None,
    scale: float | None = None,
) -> tuple[Float32[Array, "B T_local N V"], dict[str, Float32[Array, "B N T_local"]]]:
    """Compute attention of this device's queries to all keys, inside a `shard_map` over the mesh axis `axis_name`.

    Args:
      q: this device's queries `[B, queries.local, N, H]`, in the order of `queries.deal`.
      k: this device's keys `[B, keys.local, K, H]`, in the order of `keys.deal`.
      v: this device's values `[B, keys.local, K, V]`.
      kernel: an attention function with the contract's arguments (docs/contract.md, section 1) and a differentiable
        `logsumexp`. In the backward pass it gets q, k and v in f32, whatever their dtype.
      mask: mask of the whole sequence.
      queries: how queries are distributed.
      keys: how keys are distributed.
      axis_name: the mesh axis.
      segment_ids: of this device's queries `[B, queries.local]` and keys `[B, keys.local]`.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
      sinks: `[N]`, the same on every device.
      bias: `[b, n, t, s]` with the rows of this device's queries, or 1, and the columns of all keys in sequence order,
        or 1.
      scale: factor of `<q, k>`, default `1 / sqrt(H)`.

    Returns:
      f32 `out [B, queries.local, N, V]`, and the residuals.
    """
    plan = build_schedule(mask, queries, Layout(keys.length, 1, "contiguous"))
    local = LocalAttention(kernel, plan.masks, soft_cap, scale)
    gathered = _GatherPlan(local, tuple(row[0] for row in plan.table), keys, axis_name)
    operands = Operands(q, k, v, bias, sinks, segment_ids)
    outputs = _attend(gathered, mark_varying(operands, find_varying_axes(operands)))
    return outputs.out, {"logsumexp": outputs.logsumexp, "max_logits": outputs.max_logits}


@dataclasses.dataclass(frozen=True)
class _GatherPlan:
    """Static part of a call of all-gather attention."""

    local: LocalAttention
    masks: tuple[int, ...]
    keys: Layout
    axis_name: str

    def index(self) -> jax.Array:
        """Look up the index, in `local.masks`, of the mask of this device's queries."""
        return jnp.asarray(self.masks, jnp.int32)[lax.axis_index(self.axis_name)]

    def whole(self, operands: Operands) -> Operands:
        """Replace this device's keys, values and key segment ids by those of all devices."""
        ids = operands.segment_ids
        return operands._replace(
            k=self._gather(operands.k),
            v=self._gather(operands.v),
            segment_ids=None if ids is None else (ids[0], self._gather(ids[1])),
        )

    def _gather(self, x: jax.Array) -> jax.Array:
        return self.keys.collect(lax.all_gather(x, self.axis_name, axis=1, tiled=True), 1)

    def summed(self, x: jax.Array) -> jax.Array:
        """Sum gradients `x [B, S, K, depth]` of all keys over devices, and return the part of this device's keys."""
        added: jax.Array = lax.psum_scatter(self.keys.deal(x, 1), self.axis_name, scatter_dimension=1, tiled=True)
        return added


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(gathered: _GatherPlan, operands: Operands) -> Outputs:
    return gathered.local.forward(gathered.index(), gathered.whole(operands))


def _forward(gathered: _GatherPlan, operands: Operands) -> tuple[Outputs, Operands]:
    return _attend(gathered, operands), operands


def _backward(gathered: _GatherPlan, operands: Operands, cotangents: Outputs) -> tuple[Operands]:
    # Gradients are f32, since those of a key are summed over devices. Rounding each of them to bf16 would lose more
    # with more devices.
    local = dataclasses.replace(gathered.local, wide=True)
    found = local.backward(gathered.index(), gathered.whole(operands), lambda _: (cotangents.out, cotangents.logsumexp))
    found = found._replace(k=gathered.summed(found.k), v=gathered.summed(found.v))
    like = operands._replace(segment_ids=None)
    return (jax.tree.map(lambda x, operand: x.astype(operand.dtype), found, like),)


_attend.defvjp(_forward, _backward)
