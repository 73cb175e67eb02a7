"""Backward kernels for Hopper in Mosaic GPU.

From the logits z, equations (1) and (2) of `impls.flash_gpu.mosaic.mosaic_masks`, the kernels compute:

    (8)  p_ij = exp(z_ij - logsumexp_i)
    (9)  dv_j = sum_i p_ij dout_i
    (10) dp_ij = <dout_i, v_j>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j
    (15) dk_j = scale sum_i dx_ij q_i

Where a pair may not attend, z is set to -inf, which makes p and dx 0. There may be keys that no query attends to, whose
values may be NaN. Then dx is set to 0 instead, and p too where keys are owned. `D - dlse` comes from
`impls.flash_gpu.attention` as `row_sums`. One kernel owns blocks of queries and computes dq (14). Another owns
blocks of keys and computes dv (9) and dk (15), summed over the query heads of its group. Beyond depth 128 its
warpgroups divide that work otherwise (`impls.flash_gpu.mosaic.split_dkv`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from impls.block_arithmetic import make_shape
from impls.flash_gpu.mosaic.backward_tiles import (
    build_backward_inputs,
    build_scratch,
    compute_allowed_keys,
    copy_group_step,
    copy_queries,
)
from impls.flash_gpu.mosaic.forward import copy_keys, prepare_allowed
from impls.flash_gpu.mosaic.mosaic_launch import COMPUTE_WARPGROUPS, ProgramTile, build_shape, launch, zero_dead_keys
from impls.flash_gpu.mosaic.mosaic_masks import zero_unseen_rows
from impls.flash_gpu.mosaic.split_dkv import run_split_dkv_program
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands, QueryRows
from impls.jax_compat import Scalar
from impls.pallas_gpu.mosaic_tiles import (
    ROWS,
    accumulate,
    broadcast_over_keys,
    broadcast_over_queries,
    compute_logits,
    get_exponent_factor,
    multiply,
)


def compute_dq(plan: FlashGpuPlan, operands: Operands, rows: QueryRows) -> Float[Array, "B T N H"]:
    """Compute the gradient of q, `[B, T, N, H]`."""
    plan, operands = zero_dead_keys(plan, operands)
    shape, dtype = build_shape(plan, "dq"), operands.q.dtype
    inputs = build_backward_inputs(plan, shape, operands, rows)
    (dq,) = launch(
        _run_dq_program,
        plan,
        shape,
        inputs,
        name="flash_gpu_mosaic_dq",
        outputs=(make_shape(inputs["q"].shape, dtype),),
        scratch=build_scratch(shape, dtype, segmented=plan.segmented, dead_keys=plan.has_dead_keys),
    )
    return dq[:, : plan.q_length, :, : plan.head_dim]


def _run_dq_program(inputs: dict[str, Any], outputs: Any, scratch: dict[str, Any], place: ProgramTile) -> None:
    del inputs

    @pl.when(place.warpgroup == COMPUTE_WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")
        place.fetch(place.total, functools.partial(copy_keys, place))

    @pl.when(place.warpgroup < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        warpgroup = place.warpgroup
        dq = _compute_dq(place)
        ready = scratch["q_tile"].at[warpgroup]
        ready[...] = (dq * jnp.float32(place.plan.scale)).astype(outputs[0].dtype)  # dq, equation (14)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ready, outputs[0].at[place.batch, pl.ds(place.start, ROWS), place.head])
        plgpu.wait_smem_to_gmem(0)


def _compute_dq(place: ProgramTile) -> jax.Array:
    """Compute the gradient of this warpgroup's queries, not yet multiplied by the scale."""
    scratch, plan, warpgroup = place.scratch, place.plan, place.warpgroup
    copy_queries(place, place.start, ROWS, place.head, warpgroup)
    plgpu.barrier_wait(scratch["q_arrived"].at[warpgroup])
    q, d_out = scratch["q_tile"].at[warpgroup], scratch["d_out_tile"].at[warpgroup]  # [ROWS, H], [ROWS, V]
    shift, row_sums = scratch["shift_tile"].at[warpgroup][...], scratch["row_sums_tile"].at[warpgroup][...]

    def visit(masked: bool, at: Scalar, dq: jax.Array) -> jax.Array:
        slot, v_slot = place.slot(at), place.v_slot(at)
        plgpu.barrier_wait(scratch["k_arrived"].at[slot])
        k = scratch["k_tile"].at[slot]  # [keys, H]
        z, slope = compute_logits(plan, multiply(plan, q, k, transposed=True))  # logits with soft cap, eqs. (1) and (2)
        allowed_pairs = prepare_allowed(place, at, slot) if masked else None
        y = z * get_exponent_factor(plan) - broadcast_over_keys(shift, z.shape[1])
        if allowed_pairs is not None and not plan.has_dead_keys:
            y = jnp.where(allowed_pairs(False), y, -jnp.inf)  # masked after the fused multiply and subtract
        p = jnp.exp2(y)  # probabilities, equation (8)  # [ROWS, keys]
        plgpu.barrier_wait(scratch["v_arrived"].at[v_slot])
        dp = multiply(plan, d_out, scratch["v_tile"].at[v_slot], transposed=True)  # dp, equation (10)
        place.release_values(at)
        dx = p * (dp - broadcast_over_keys(row_sums, z.shape[1]))  # dz, equation (12)
        dx = dx if slope is None else dx * slope  # dx, equation (13)
        if allowed_pairs is not None and plan.has_dead_keys:
            dx = jnp.where(allowed_pairs(False), dx, 0.0)
            k_seen = scratch["k_seen"].at[warpgroup]
            k_seen[...] = zero_unseen_rows(k[...], allowed_pairs(True))
            plgpu.commit_smem()
            k = k_seen
        dq = accumulate(plan, dq, dx.astype(k.dtype), k)  # dq, equation (14), not yet scaled
        place.release_keys(at, read_as_values=place.reads_ids_unfenced)
        place.end_step(at, read_as_values=place.reads_ids_unfenced)
        return dq

    dq = jnp.zeros((ROWS, place.shape.head_dim), jnp.float32)
    if "full" in place.kinds:
        dq = lax.fori_loop(jnp.int32(0), place.full, functools.partial(visit, False), dq)
    if "partial" in place.kinds:
        dq = lax.fori_loop(place.full, place.total, functools.partial(visit, True), dq)
    return dq


def compute_dkv(
    plan: FlashGpuPlan, operands: Operands, rows: QueryRows
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Compute the gradients of k and v, `[B, S, K, .]`."""
    shape, dtype = build_shape(plan, "dkv"), operands.k.dtype
    inputs = build_backward_inputs(plan, shape, operands, rows)
    dk, dv = launch(
        run_split_dkv_program if shape.owned == ROWS else _run_dkv_program,
        plan,
        shape,
        inputs,
        name="flash_gpu_mosaic_dkv",
        outputs=(make_shape(inputs["k"].shape, dtype), make_shape(inputs["v"].shape, dtype)),
        scratch=build_scratch(shape, dtype, segmented=plan.segmented, dead_keys=plan.has_dead_keys),
    )
    return dk[:, : plan.kv_length, :, : plan.head_dim], dv[:, : plan.kv_length, :, : plan.v_head_dim]


def _run_dkv_program(inputs: dict[str, Any], outputs: Any, scratch: dict[str, Any], place: ProgramTile) -> None:
    group = jnp.int32(place.plan.group)
    total = place.total

    @pl.when(place.warpgroup == COMPUTE_WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")
        place.fetch(total * group, functools.partial(copy_group_step, place))

    @pl.when(place.warpgroup < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        warpgroup, rows = place.warpgroup, pl.ds(place.start, ROWS)
        k_arrived, v_arrived = scratch["k_arrived"].at[warpgroup], scratch["v_arrived"].at[warpgroup]
        plgpu.copy_gmem_to_smem(
            inputs["k"].at[place.batch, rows, place.head], scratch["k_tile"].at[warpgroup], k_arrived
        )
        if place.plan.segmented:
            plgpu.copy_gmem_to_smem(
                inputs["kv_ids"].at[place.batch, rows], scratch["kv_ids_tile"].at[warpgroup], k_arrived
            )
        plgpu.copy_gmem_to_smem(
            inputs["v"].at[place.batch, rows, place.head], scratch["v_tile"].at[warpgroup], v_arrived
        )
        plgpu.barrier_wait(k_arrived)
        plgpu.barrier_wait(v_arrived)
        dk, dv = _sum_over_group(place, group, total)
        for ready, sums, out in (
            (scratch["k_tile"].at[warpgroup], dk * jnp.float32(place.plan.scale), outputs[0]),  # dk, equation (15)
            (scratch["v_tile"].at[warpgroup], dv, outputs[1]),
        ):
            ready[...] = sums.astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(ready, out.at[place.batch, rows, place.head])
        plgpu.wait_smem_to_gmem(0)


def _sum_over_group(place: ProgramTile, group: Any, total: Any) -> tuple[jax.Array, jax.Array]:
    """Sum dk and dv of this warpgroup's keys over the query heads of the group; dk is not yet scaled."""
    scratch, plan, warpgroup = place.scratch, place.plan, place.warpgroup
    k, v = scratch["k_tile"].at[warpgroup], scratch["v_tile"].at[warpgroup]  # [ROWS, H], [ROWS, V]

    def visit(masked: bool, base: Any, at: Scalar, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        slot = place.slot(base + at)
        plgpu.barrier_wait(scratch["q_arrived"].at[slot])
        q, d_out = scratch["q_tile"].at[slot], scratch["d_out_tile"].at[slot]  # [queries, H], [queries, V]
        z, slope = compute_logits(plan, multiply(plan, k, q, transposed=True))  # logits with soft cap, eqs. (1) and (2)
        allowed_pairs = compute_allowed_keys(place, at, slot, warpgroup) if masked else None  # [ROWS, queries]
        if allowed_pairs is not None and not plan.has_dead_keys:
            z = jnp.where(allowed_pairs, z, -jnp.inf)
        p = jnp.exp2(
            z * get_exponent_factor(plan) - broadcast_over_queries(scratch["shift_tile"].at[slot][...], ROWS)
        )  # probabilities, equation (8)
        dp = multiply(plan, v, d_out, transposed=True)  # dp, equation (10)
        dx = p * (dp - broadcast_over_queries(scratch["row_sums_tile"].at[slot][...], ROWS))  # dz, equation (12)
        dx = dx if slope is None else dx * slope  # dx, equation (13)
        if allowed_pairs is not None and plan.has_dead_keys:
            # k and v are no factors of (9) and (15), so NaN in hidden keys does not spread.
            p, dx = jnp.where(allowed_pairs, p, 0.0), jnp.where(allowed_pairs, dx, 0.0)
        dk, dv = sums  # [ROWS, H], [ROWS, V]
        dv = accumulate(plan, dv, p.astype(d_out.dtype), d_out)  # dv, equation (9)
        dk = accumulate(plan, dk, dx.astype(q.dtype), q)  # dk, equation (15), not yet scaled
        place.end_step(base + at, read_as_values=True)  # shift and row_sums were read as values
        return dk, dv

    def visit_head(head: Scalar, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        base = head * total
        if "full" in place.kinds:
            sums = lax.fori_loop(jnp.int32(0), place.full, functools.partial(visit, False, base), sums)
        if "partial" in place.kinds:
            sums = lax.fori_loop(place.full, total, functools.partial(visit, True, base), sums)
        return sums

    sums = (
        jnp.zeros((ROWS, place.shape.head_dim), jnp.float32),
        jnp.zeros((ROWS, place.shape.v_head_dim), jnp.float32),
    )
    found: tuple[jax.Array, jax.Array] = lax.fori_loop(jnp.int32(0), group, visit_head, sums)
    return found
