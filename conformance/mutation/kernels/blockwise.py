"""A correct blockwise attention in replaceable steps.

Forward: one scan over key blocks with a running softmax, all queries at once. Backward: one scan over key blocks that
recomputes the probabilities from the saved `logsumexp`, with `D = <out, do>`. Query tiles of `BLOCK_Q` rows and key
blocks of `BLOCK_KV` make tiles, each empty, partial or full; an empty tile is left out, a full one is not masked.

Shapes inside are those of `conformance.mutation.kernels.layout`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cases.case import Case
from conformance.execution.plain_functions import build_implementation
from conformance.mutation.kernels.layout import (
    BLOCK_KV,
    BLOCK_Q,
    Call,
    join_bias,
    join_heads,
    join_keys,
    join_rows,
    split_bias,
    split_heads,
    split_keys,
    split_mask,
    split_rows,
)
from conformance.mutation.kernels.promotion import promote_by_default
from conformance.mutation.kernels.steps import (
    Block,
    Blocks,
    BlockSteps,
    Gradients,
    Operands,
    Outputs,
    Rows,
    Running,
    Step,
    hide,
    masked,
    product,
)
from conformance.mutation.planted_bug import PlantedBug
from impls.contract.declarations import declare
from impls.contract.implementation import Implementation


def _cut(steps: BlockSteps, call: Call, operands: Operands, hide_k: Step, hide_v: Step) -> Blocks:
    """The key blocks that are visited."""
    assert operands.allowed is not None
    tiles = split_mask(operands.allowed, call)
    kinds = steps.kinds(steps.classify(tiles), call)
    tiles = steps.mask_tiles(tiles, kinds, call)
    count, q_tiles = tiles.shape[0], tiles.shape[4]
    rows = jnp.arange(q_tiles * BLOCK_Q).reshape(q_tiles, BLOCK_Q, 1)
    columns = jnp.arange(count * BLOCK_KV).reshape(count, 1, 1, 1, 1, 1, BLOCK_KV)
    visible = steps.visible(tiles, kinds[..., None, None], steps.in_range(rows, columns, call))
    visible = visible.reshape(*visible.shape[:4], -1, BLOCK_KV)
    seen = visible.any(axis=(3, 4))
    found = Blocks(
        number=jnp.arange(count),
        k=hide_k(steps.key_blocks(split_keys(operands.k), call), seen),
        v=hide_v(steps.value_blocks(split_keys(operands.v), call), seen),
        bias=None if operands.bias is None else steps.bias_blocks(split_bias(operands.bias, call), call),
        kind=kinds,
        visible=visible,
    )
    return jax.tree.map(lambda x: x[: steps.count(call)], found)


def forward(steps: BlockSteps, call: Call, operands: Operands) -> Outputs:
    """The forward pass."""
    q = split_heads(operands.q, call)
    blocks = _cut(steps, call, operands, hide, steps.hide_v)
    sinks = None if operands.sinks is None else operands.sinks.reshape(call.num_kv_heads, call.group, 1)

    def step(state: Running, one: Blocks) -> tuple[Running, None]:
        block = Block(call, one.number, q, *one[1:])
        z = steps.masked(steps.logits(product("bkgth,bksh->bkgts", q, block.k), block)[0], block)
        pivot = steps.pivot(state, z, block)
        shift = steps.shift(pivot, state, block)
        weights = steps.weights(z, shift, block)
        alpha = steps.alpha(state.pivot, shift, block)
        total = steps.add_total(state.total, alpha, weights, block)
        acc = steps.add_weights(state.acc, alpha, weights, block.v, block)
        return steps.between(Running(pivot, total, acc, steps.top(state.top, z, block)), sinks, block), None

    rows = q.shape[:4]
    empty = jnp.full(rows, -jnp.inf)
    state = Running(empty, jnp.zeros(rows), jnp.zeros((*rows, operands.v.shape[3])), empty)
    state, _ = lax.scan(step, steps.start(state, blocks.kind), blocks)
    if sinks is not None:
        state = steps.add_sink(state, sinks)
    found = Rows(steps.normalise(state.acc, state.total, call), steps.logsumexp(state), state.top)
    found = steps.store(found, blocks.kind, call)
    return Outputs(
        out=steps.round_out(join_heads(found.out, call), operands.q.dtype),
        logsumexp=join_rows(found.logsumexp, call)[..., : call.q_length],
        max_logits=join_rows(found.max_logits, call)[..., : call.q_length],
    )


def backward(
    steps: BlockSteps, call: Call, operands: Operands, out: jax.Array, lse: jax.Array, cotangents: Outputs
) -> Operands:
    """Gradients of the operands from the saved `out` and `lse`."""
    q = split_heads(operands.q, call)
    blocks = _cut(steps, call, operands, steps.hide_k_again, steps.hide_v_again)
    do = steps.split_do(cotangents.out, call)
    dlse = steps.dlse(cotangents.logsumexp)
    delta = steps.delta(split_heads(out, call), do, call)
    lse_rows, dlse_rows = split_rows(lse, call, -jnp.inf), split_rows(dlse, call)
    dtype = operands.q.dtype

    def step(dq: jax.Array, one: Blocks) -> tuple[jax.Array, Any]:
        block = Block(call, one.number, q, *one[1:], do=do)
        block = dataclasses.replace(block, visible=steps.visible_again(block))
        z, slope = steps.logits_again(product("bkgth,bksh->bkgts", q, block.k), block)
        z = masked(z, block)
        p = steps.probabilities(z, lse_rows, block)
        dz = steps.dz(p, steps.dp(do, block.v, block), delta, dlse_rows, block)
        dx = steps.dx(dz, slope, z, block)
        rounded = steps.round_dx(dx, dtype)
        dq = steps.add_dq(dq, product("bkgts,bksh->bkgth", rounded, block.k), block)
        dk = steps.group_sum(steps.dk(rounded, q, block))
        dv = steps.group_sum(steps.dv(p, do, z, block))
        dbias = None if block.bias is None else steps.dbias(dx, dz, block)
        return dq, (*steps.write((dk, dv), block), dbias)

    dq, (dk, dv, dbias) = lax.scan(step, jnp.zeros(q.shape), blocks)
    found = Gradients(
        q=join_heads(steps.scale_dq(dq, call), call),
        k=join_keys(steps.scale_dk(dk, call), call),
        v=join_keys(dv, call),
    )
    found = steps.gradients(found, blocks.kind, call)
    dsinks = None
    if operands.sinks is not None:
        delta_rows = join_rows(delta, call)[..., : call.q_length]
        dsinks = steps.dsinks(operands.sinks[:, None], lse, delta_rows, dlse).astype(operands.sinks.dtype)
    if operands.bias is not None:
        dbias = join_bias(dbias, operands.bias.shape).astype(operands.bias.dtype)
    dq, dk, dv = (x.astype(dtype) for x in found)
    return Operands(dq, dk, dv, dbias, dsinks, None)


def kernel(steps: BlockSteps) -> Callable[..., Any]:
    """The attention function made of `steps`."""

    @declare(empty_rows="zero")
    def attention(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: tuple[jax.Array, jax.Array] | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        bias: jax.Array | None = None,
        scale: float | None = None,
        save_residuals: bool = False,
    ) -> Any:
        """Blockwise attention with a hand-written backward."""
        call = Call(
            batch=q.shape[0],
            q_length=q.shape[1],
            kv_length=k.shape[1],
            num_q_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            scale=q.shape[3] ** -0.5 if scale is None else scale,
            soft_cap=soft_cap,
        )
        allowed = jnp.ones((1, 1, 1, 1), bool) if mask is None else jnp.asarray(mask)
        if segment_ids is not None:
            allowed = allowed & (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :])
        outputs = _differentiable(steps, call)(Operands(q, k, v, bias, sinks, allowed))
        if not save_residuals:
            return outputs.out
        return outputs.out, {"logsumexp": outputs.logsumexp, "max_logits": outputs.max_logits}

    return attention


def _differentiable(steps: BlockSteps, call: Call) -> Callable[[Operands], Outputs]:
    @jax.custom_vjp
    def attend(operands: Operands) -> Outputs:
        return steps.undifferentiated(forward(steps, call, operands))

    def with_saved(operands: Operands) -> tuple[Outputs, Any]:
        outputs = forward(steps, call, operands)
        return steps.primal(outputs), (operands, *steps.saved(outputs.out, outputs.logsumexp, operands))

    def pull_back(saved: Any, cotangents: Outputs) -> tuple[Operands]:
        operands, out, lse = saved
        return (backward(steps, call, operands, out, lse, cotangents),)

    attend.defvjp(with_saved, promote_by_default(pull_back))
    return attend


def implementation(steps: BlockSteps, name: str) -> Implementation:
    """The kernel made of `steps`, as the gate takes it."""
    return build_implementation(kernel(steps), name)


def planted(
    *,
    name: str,
    family: str,
    kind: str,
    reference: str,
    shows: tuple[str, ...],
    trigger: Callable[[Case], bool],
    says: str = "",
    **replaced: Step,
) -> PlantedBug:
    """The bug that replacing these steps plants."""
    return PlantedBug(
        name=name,
        family=family,
        kind=kind,
        reference=reference,
        shows=shows,
        build=lambda: implementation(BlockSteps(**replaced), name),
        trigger=trigger,
        says=says,
    )
