"""Gradients of k and v at depths beyond 128 for Hopper: one warpgroup computes dv, the other dk, of the same keys.

Equations (8) to (15) are those of `impls.flash_gpu.mosaic.backward`. At depth 256, dk and dv of 64 keys in f32 take 256
registers of each thread of a warpgroup, more than there are. So the two warpgroups share 64 keys:

    values: z = <k, q> | p (8)     |            | dv += p dout (9)  |
    keys:   dp = <v, dout> (10)    | wait for p | dx (12), (13)     | dk += dx q (15)

Each computes two of the four products. The weights go from one to the other in f32 through shared memory, multiplied
by the soft cap's derivative, as that is all that dx takes of them. There is one tile of weights. So the warpgroup of
the values is at most one step ahead.

K and V are copied when the program begins. In every step, one warpgroup reads K and the other V. At the end each
gradient is stored where its operand lay. The other warpgroup no longer reads that: the last weights come after the last
read of K, and their last release comes after the last read of V.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from impls.flash_gpu.mosaic.backward_tiles import compute_allowed_keys, copy_group_step
from impls.flash_gpu.mosaic.mosaic_launch import COMPUTE_WARPGROUPS, ProgramTile
from impls.jax_compat import Scalar
from impls.pallas_gpu.mosaic_tiles import (
    ROWS,
    accumulate,
    broadcast_over_queries,
    compute_logits,
    get_exponent_factor,
    multiply,
)

VALUES, KEYS = 0, 1
"""Indices of the warpgroups that compute dv and dk."""


def run_split_dkv_program(inputs: dict[str, Any], outputs: Any, scratch: dict[str, Any], place: ProgramTile) -> None:
    """Run the warpgroups of one program: one computes dv, one dk, and one fetches tiles of queries."""
    group, total = jnp.int32(place.plan.group), place.total
    rows = pl.ds(place.start, ROWS)

    @pl.when(place.warpgroup == COMPUTE_WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")
        k_arrived = scratch["k_arrived"].at[0]
        for name, arrived in (("k", k_arrived), ("v", scratch["v_arrived"].at[0])):
            plgpu.copy_gmem_to_smem(
                inputs[name].at[place.batch, rows, place.head], scratch[f"{name}_tile"].at[0], arrived
            )
        if place.plan.segmented:
            plgpu.copy_gmem_to_smem(inputs["kv_ids"].at[place.batch, rows], scratch["kv_ids_tile"].at[0], k_arrived)
        place.fetch(total * group, functools.partial(copy_group_step, place))

    def wait_for_keys() -> None:
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_wait(scratch["k_arrived"].at[0])
        plgpu.barrier_wait(scratch["v_arrived"].at[0])

    def store(name: str, gradient: jax.Array, out: Any) -> None:
        ready = scratch[f"{name}_tile"].at[0]
        ready[...] = gradient.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ready, out.at[place.batch, rows, place.head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(place.warpgroup == VALUES)
    def _values() -> None:
        wait_for_keys()
        dv = _compute_dv(place, group, total)
        store("v", dv, outputs[1])

    @pl.when(place.warpgroup == KEYS)
    def _keys() -> None:
        wait_for_keys()
        dk = _compute_dk(place, total * group)
        store("k", dk * jnp.float32(place.plan.scale), outputs[0])  # dk, equation (15)


def _compute_dv(place: ProgramTile, group: Any, total: Any) -> jax.Array:
    """Compute dv of the program's keys over the query heads of the group, and pass on the weights of each step."""
    scratch, plan = place.scratch, place.plan
    k, weights_tile = scratch["k_tile"].at[0], scratch["weights_tile"]  # [ROWS, H], [ROWS, queries]

    def visit(masked: bool, base: Any, at: Scalar, dv: jax.Array) -> jax.Array:
        step = base + at
        slot = place.slot(step)
        plgpu.barrier_wait(scratch["q_arrived"].at[slot])
        q, d_out = scratch["q_tile"].at[slot], scratch["d_out_tile"].at[slot]  # [queries, H], [queries, V]
        z, slope = compute_logits(plan, multiply(plan, k, q, transposed=True))  # logits with soft cap, eqs. (1) and (2)
        allowed = compute_allowed_keys(place, at, slot, 0) if masked else None  # [ROWS, queries]
        if allowed is not None:
            z = jnp.where(allowed, z, -jnp.inf)
        shift = broadcast_over_queries(scratch["shift_tile"].at[slot][...], ROWS)
        p = jnp.exp2(z * get_exponent_factor(plan) - shift)  # probabilities, equation (8)
        weights = p if slope is None else p * slope
        if slope is not None and allowed is not None and plan.has_dead_keys:
            weights = jnp.where(allowed, weights, 0.0)  # the derivative of the soft cap is NaN where hidden keys are
        pl.when(step > 0)(functools.partial(plgpu.barrier_wait, scratch["weights_free"].at[0]))
        weights_tile[...] = weights
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["weights_ready"].at[0])
        dv = accumulate(plan, dv, p.astype(d_out.dtype), d_out)  # dv, equation (9)
        place.end_step(step, read_as_values=True)  # shift was read as values
        return dv

    def visit_head(head: Scalar, dv: jax.Array) -> jax.Array:
        base = head * total
        if "full" in place.kinds:
            dv = lax.fori_loop(jnp.int32(0), place.full, functools.partial(visit, False, base), dv)
        if "partial" in place.kinds:
            dv = lax.fori_loop(place.full, total, functools.partial(visit, True, base), dv)
        return dv

    found: jax.Array = lax.fori_loop(
        jnp.int32(0), group, visit_head, jnp.zeros((ROWS, place.shape.v_head_dim), jnp.float32)
    )
    pl.when(total > 0)(functools.partial(plgpu.barrier_wait, scratch["weights_free"].at[0]))
    return found


def _compute_dk(place: ProgramTile, steps: Any) -> jax.Array:
    """Compute dk of the program's keys from the weights of each step; it is not yet scaled."""
    scratch, plan = place.scratch, place.plan
    v = scratch["v_tile"].at[0]  # [ROWS, V]

    def visit(step: Scalar, dk: jax.Array) -> jax.Array:
        slot = place.slot(step)
        plgpu.barrier_wait(scratch["q_arrived"].at[slot])
        q, d_out = scratch["q_tile"].at[slot], scratch["d_out_tile"].at[slot]  # [queries, H], [queries, V]
        dp = multiply(plan, v, d_out, transposed=True)  # dp, equation (10)
        plgpu.barrier_wait(scratch["weights_ready"].at[0])
        weights = scratch["weights_tile"][...]
        place.release(scratch["weights_free"].at[0], read_as_values=True)
        row_sums = broadcast_over_queries(scratch["row_sums_tile"].at[slot][...], ROWS)
        dx = weights * (dp - row_sums)  # dx, equations (12) and (13)
        if plan.has_dead_keys:
            dx = jnp.where(weights == 0, 0.0, dx)  # hidden values may be NaN
        dk = accumulate(plan, dk, dx.astype(q.dtype), q)  # dk, equation (15), not yet scaled
        place.end_step(step, read_as_values=True)  # row_sums was read as values
        return dk

    found: jax.Array = lax.fori_loop(jnp.int32(0), steps, visit, jnp.zeros((ROWS, place.shape.head_dim), jnp.float32))
    return found
