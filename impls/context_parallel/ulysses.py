"""Context parallelism by heads: devices exchange tokens for heads, alone (Ulysses) or around a ring (USP)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from cases.masks import Mask
from impls.context_parallel.head_exchange import (
    count_replicas,
    exchange_operands,
    give_heads,
    give_tokens,
    pull_back_exchange,
    require_divisible_heads,
)
from impls.context_parallel.local_attention import Kernel, LocalAttention, Operands, Outputs
from impls.context_parallel.ring import ring
from impls.context_parallel.sequence_layout import Layout, restrict_to_heads
from impls.varying_axes import find_varying_axes, mark_varying


def ulysses(
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
    """Compute attention of some heads to the whole sequence, inside a `shard_map` over the mesh axis `axis_name`.

    The kernel gets the whole sequence in its order, whatever the order of tokens is on the devices. Arguments and
    results are those of `all_gather`.

    Raises:
      NotImplementedError: the devices do not divide the query heads.
    """
    num_q_heads = q.shape[2]
    require_divisible_heads(num_q_heads, queries.devices)
    each = num_q_heads // queries.devices
    masks = [restrict_to_heads(mask, slice(n * each, (n + 1) * each)) for n in range(queries.devices)]
    distinct = tuple(dict.fromkeys(masks))
    plan = _UlyssesPlan(
        LocalAttention(kernel, distinct, soft_cap, scale),
        tuple(map(distinct.index, masks)),
        queries,
        keys,
        axis_name,
    )
    operands = Operands(q, k, v, bias, sinks, segment_ids)
    outputs = _attend(plan, mark_varying(operands, find_varying_axes(operands)))
    return outputs.out, {"logsumexp": outputs.logsumexp, "max_logits": outputs.max_logits}


@dataclasses.dataclass(frozen=True)
class _UlyssesPlan:
    """The static part of a call; `masks[rank]` is the index, in `local.masks`, of the mask of a device's heads."""

    local: LocalAttention
    masks: tuple[int, ...]
    queries: Layout
    keys: Layout
    axis_name: str

    def index(self) -> jax.Array:
        """Look up the index, in `local.masks`, of the mask of this device's heads."""
        return jnp.asarray(self.masks, jnp.int32)[lax.axis_index(self.axis_name)]

    def exchange(self, operands: Operands) -> Operands:
        """Exchange tokens for heads, with the tokens in the order of the sequence; linear in all floats."""
        x = exchange_operands(operands, self.axis_name)
        ids = x.segment_ids
        return x._replace(
            q=self.queries.collect(x.q, 1),
            k=self.keys.collect(x.k, 1),
            v=self.keys.collect(x.v, 1),
            bias=x.bias if x.bias is None or x.bias.shape[2] == 1 else self.queries.collect(x.bias, 2),
            segment_ids=None if ids is None else (self.queries.collect(ids[0], 1), self.keys.collect(ids[1], 1)),
        )

    def give_rows(self, x: jax.Array) -> jax.Array:
        """Exchange rows `[B, N, T_local]` of this device for all rows of its heads, in the order of the sequence."""
        return self.queries.collect(give_tokens(x, self.axis_name, tokens=2, heads=1), 2)

    def return_rows(self, x: jax.Array) -> jax.Array:
        """Exchange back what `give_rows` exchanged."""
        return give_heads(self.queries.deal(x, 2), self.axis_name, tokens=2, heads=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _UlyssesPlan, operands: Operands) -> Outputs:
    found = plan.local.forward(plan.index(), plan.exchange(operands))
    out = give_heads(plan.queries.deal(found.out, 1), plan.axis_name)
    return Outputs(out, plan.return_rows(found.logsumexp), plan.return_rows(found.max_logits))


def _forward(plan: _UlyssesPlan, operands: Operands) -> tuple[Outputs, Operands]:
    return _attend(plan, operands), operands


def _backward(plan: _UlyssesPlan, operands: Operands, cotangents: Outputs) -> tuple[Operands]:
    do = plan.queries.collect(give_tokens(cotangents.out, plan.axis_name), 1)
    dlse = plan.give_rows(cotangents.logsumexp)
    # The gradient of a key head with replicas is a sum over devices, so its terms are f32, as in `all_gather`.
    replicas = count_replicas(operands.k.shape[2], plan.keys.devices)
    local = dataclasses.replace(plan.local, wide=replicas > 1)
    found = local.backward(plan.index(), plan.exchange(operands), lambda _: (do, dlse))
    return (pull_back_exchange(plan.exchange, operands, found),)


_attend.defvjp(_forward, _backward)


def usp(
    q: Float[Array, "B T_local N H"],
    k: Float[Array, "B S_local K H"],
    v: Float[Array, "B S_local K V"],
    *,
    kernel: Kernel,
    mask: Mask,
    queries: Layout,
    keys: Layout,
    axis_names: tuple[str, str],
    segment_ids: tuple[Int[Array, "B T_local"], Int[Array, "B S_local"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T_local s"] | None = None,
    scale: float | None = None,
) -> tuple[Float32[Array, "B T_local N V"], dict[str, Float32[Array, "B N T_local"]]]:
    """Compute ring attention of groups of devices that share heads, inside a `shard_map` over two mesh axes.

    This is unified sequence parallelism (Fang and Zhao 2024, arXiv:2405.07719). `axis_names` are the axis of the ring
    and that of the groups. The layouts distribute the sequence over the ring, and the devices of a group have equal,
    contiguous parts of what the layout gives to it (`Layout.multiple`). Other arguments and the results are those of
    `ring`.

    Raises:
      NotImplementedError: the devices of a group do not divide the query heads, or heads have masks of their own.
    """
    ring_axis, heads_axis = axis_names
    devices = lax.axis_size(heads_axis)
    require_divisible_heads(q.shape[2], devices)
    if restrict_to_heads(mask, slice(1)) != mask:
        raise NotImplementedError("a ring of groups that share heads takes one mask for all heads")
    operands = Operands(q, k, v, bias, sinks, segment_ids)
    operands = _exchange_wide(heads_axis, mark_varying(operands, find_varying_axes(operands)))
    out, residuals = ring(
        operands.q,
        operands.k,
        operands.v,
        kernel=kernel,
        mask=mask,
        queries=queries,
        keys=keys,
        axis_name=ring_axis,
        segment_ids=operands.segment_ids,
        soft_cap=soft_cap,
        sinks=operands.sinks,
        bias=operands.bias,
        scale=scale,
    )
    rows = functools.partial(give_heads, axis_name=heads_axis, tokens=2, heads=1)
    return give_heads(out, heads_axis), jax.tree.map(rows, residuals)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange_wide(axis_name: str, operands: Operands) -> Operands:
    """Exchange tokens for heads; results and their gradients are f32, since the gradients of replicas are summed."""
    found = exchange_operands(operands, axis_name)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), found._replace(segment_ids=None))
    return wide._replace(segment_ids=found.segment_ids)


def _exchange_forward(axis_name: str, operands: Operands) -> tuple[Operands, Operands]:
    return _exchange_wide(axis_name, operands), operands


def _exchange_backward(axis_name: str, operands: Operands, found: Operands) -> tuple[Operands]:
    exchange = functools.partial(exchange_operands, axis_name=axis_name)
    return (pull_back_exchange(exchange, operands, found._replace(segment_ids=None)),)


_exchange_wide.defvjp(_exchange_forward, _exchange_backward)
