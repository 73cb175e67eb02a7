"""Correct mixture of block attention to plant in: dense in replaceable steps, and block-sparse with parts exchanged."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.moba_mask import Moba
from conformance.mutation.kernels.plain import Call, PlainSteps, kernel, stop
from impls.contract.implementation import Implementation
from impls.moba import forward as sparse_forward
from impls.moba.moba_blocks import Operands, flatten_rows, split_bins
from impls.moba.moba_plan import MobaPlan, MobaWork, choose_chunks, divide_work

sparse = importlib.import_module("impls.moba.moba_sparse")
sparse_backward = importlib.import_module("impls.moba.backward")

Array = jax.Array
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MobaSteps:
    """Steps from q and k to the pairs that attend, in order; the defaults are correct. `mask` comes last."""

    position: Step = lambda length, mask: jnp.arange(length) + mask.offset  # [T]
    own: Step = lambda position, mask: position // mask.chunk  # [T]
    means: Step = lambda pieces, mask: pieces.mean(axis=2)  # [B, C, chunk, K, H] -> [B, C, K, H]
    heads: Step = lambda q, means, mask: jnp.repeat(means, q.shape[2] // means.shape[2], axis=2)  # [B, C, N, H]
    gates: Step = lambda q, means, mask: jnp.einsum("btnh,bcnh->bntc", q, means, precision="highest")
    earlier: Step = lambda chunk, own, position, mask: chunk < own[:, None]  # [T, C]
    others: Step = lambda mask: mask.topk - 1
    taken: Step = lambda gates, earlier, others, mask: highest(gates, others) & earlier  # [B, N, T, C]
    with_own: Step = lambda taken, own, mask: taken | own
    pairs: Step = lambda taken, own, causal, mask: taken & causal  # [B, N, T, S]


def highest(gates: Array, count: int) -> Array:
    """The `count` highest along the last axis, ties to the first."""
    order = jnp.argsort(-gates, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1, stable=True) < count


def chosen_pairs(steps: MobaSteps, mask: Moba, call: Call) -> Array:
    """Booleans `[B, N, T, S]`."""
    q, k = (stop(x).astype(jnp.float32) for x in (call.q, call.k))
    position = steps.position(call.q_length, mask)
    own = steps.own(position, mask)
    pieces = jnp.pad(k, ((0, 0), (0, -call.kv_length % mask.chunk), (0, 0), (0, 0)))
    pieces = pieces.reshape(k.shape[0], -1, mask.chunk, *k.shape[2:])
    gates = steps.gates(q, steps.heads(q, steps.means(pieces, mask), mask), mask)
    chunk = jnp.arange(pieces.shape[1])
    earlier = steps.earlier(chunk, own, position, mask)
    taken = steps.taken(jnp.where(earlier, gates, -jnp.inf), earlier, steps.others(mask), mask)
    own_chunk = chunk == own[:, None]
    taken = steps.with_own(taken, own_chunk, mask)
    by_key = [jnp.repeat(x, mask.chunk, axis=-1)[..., : call.kv_length] for x in (taken, own_chunk)]
    return steps.pairs(*by_key, jnp.arange(call.kv_length) <= (jnp.arange(call.q_length) + mask.offset)[:, None], mask)


def _supports(case: Case) -> str | None:
    alone = case.mask.startswith("moba") and "_" not in case.mask
    return None if alone else "only MoBA masks"


def implementation(name: str, call: Callable[..., Any]) -> Implementation:
    """A kernel for MoBA masks as the gate takes it."""
    return Implementation(
        name=name,
        call=call,
        offers=frozenset({"moba"}),
        unsupported={"segment_ids": "not with MoBA"},
        supports_case=_supports,
        empty_rows="zero",
        behind_mask="finite",
        refuses_by_signature=True,
    )


def correct(steps: MobaSteps = MobaSteps(), **plain: Step) -> Callable[..., Any]:
    """The kernel made of `steps`, and of the steps of a plain kernel that are given."""
    return kernel(PlainSteps(mask=lambda mask, call: chosen_pairs(steps, mask, call), **plain))


def block_sparse(
    forward: Callable[..., Any] = sparse_forward.forward,
    backward: Callable[..., Any] = sparse_backward.backward,
    divided: Callable[[MobaPlan, Array], MobaWork] = divide_work,
) -> Callable[..., Any]:
    """The block-sparse kernel with another forward pass, backward pass or division of the work."""

    def attend(plan: MobaPlan, operands: Operands) -> Any:
        @jax.custom_vjp
        def flash(operands: Operands, work: MobaWork) -> Any:
            return forward(plan, operands, work)

        def save(operands: Operands, work: MobaWork) -> Any:
            outputs = forward(plan, operands, work)
            return outputs, (operands, work, outputs.out, outputs.logsumexp)

        def pull_back(saved: Any, cotangents: Any) -> Any:
            return backward(plan, *saved, cotangents.out, cotangents.logsumexp), None

        flash.defvjp(save, pull_back)
        q, k = stop(operands.q), stop(operands.k)
        rows = flatten_rows(plan, q).reshape(plan.lanes, plan.rows, -1)
        keys = split_bins(plan, k).reshape(plan.lanes, plan.chunks, plan.moba.chunk, -1)
        return flash(operands, divided(plan, choose_chunks(plan.moba, rows, keys, plan.position)))

    def call(*operands: Any, **options: Any) -> Any:
        with mock.patch.object(sparse, "_attend", attend):
            return sparse.attention(*operands, **options)

    return call
