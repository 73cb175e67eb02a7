"""Backward kernels for Hopper in Mosaic GPU.

From the logits z, equations (1) and (2) of `impls.flash_gpu.mosaic.mosaic_tiles`, the kernels compute:

    (8)  p_ij = exp(z_ij - logsumexp_i)
    (9)  dv_j = sum_i p_ij dout_i
    (10) dp_ij = <dout_i, v_j>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j
    (15) dk_j = scale sum_i dx_ij q_i

Where a pair may not attend, z is set to -inf, which makes p and dx 0. If there may be keys that no query attends to,
whose values may be NaN, p and dx are set to 0 instead. `D - dlse` comes from `impls.flash_gpu.flash_gpu_passes` as
`row_sums`. One kernel owns blocks of queries and computes dq (14). Another owns blocks of keys and computes dv (9) and
dk (15), summed over the query heads of its group.
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

from impls.flash_gpu.exponentials import LOG2_E
from impls.flash_gpu.flash_gpu_arrays import Operands, QueryRows, make_shape
from impls.flash_gpu.mosaic.forward import copy_keys, prepare_allowed
from impls.flash_gpu.mosaic.mosaic_launch import ProgramTile, build_inputs, launch, pad_axes
from impls.flash_gpu.mosaic.mosaic_shape import COMPUTE_WARPGROUPS, ROWS, KernelShape, allocate_tile, build_shape
from impls.flash_gpu.mosaic.mosaic_tiles import (
    PairSpan,
    accumulate,
    broadcast_over_keys,
    broadcast_over_queries,
    compute_allowed,
    compute_logits,
    get_exponent_factor,
    multiply,
    zero_unseen_rows,
)
from impls.flash_gpu.tile_schedule import FlashGpuPlan
from impls.jax_compat import Scalar


def _build_inputs(plan: FlashGpuPlan, shape: KernelShape, operands: Operands, rows: QueryRows) -> dict[str, jax.Array]:
    inputs = build_inputs(plan, shape, operands)
    length = inputs["q"].shape[1]
    inputs["d_out"] = pad_axes(rows.d_out, {1: length, 3: shape.v_head_dim})
    rows = rows._replace(shift=rows.shift * jnp.float32(LOG2_E))
    return inputs | {name: pad_axes(getattr(rows, name), {2: length}) for name in ("shift", "row_sums")}


def build_scratch(shape: KernelShape, dtype: Any, *, segmented: bool, dead_keys: bool) -> dict[str, Any]:
    """Describe the shared memory and barriers of a program by name: tiles that it owns, and tiles that it visits.

    At the end each gradient is stored in the tile of its operand, which is no longer read by then.
    """
    own, other = (COMPUTE_WARPGROUPS, ROWS), (shape.slots, shape.visited)
    queries, keys = (own, other) if shape.axis == "q" else (other, own)
    ids = int(segmented)
    of_queries, of_keys = 4 + ids, 1 + ids  # numbers of copies: q, d_out, shift, row_sums; k
    scratch: dict[str, Any] = {
        "q_tile": allocate_tile(dtype, *queries, shape.head_dim),
        "d_out_tile": allocate_tile(dtype, *queries, shape.v_head_dim),
        "shift_tile": plgpu.SMEM(queries, jnp.float32),
        "row_sums_tile": plgpu.SMEM(queries, jnp.float32),
        "k_tile": allocate_tile(dtype, *keys, shape.head_dim),
        "v_tile": allocate_tile(dtype, *keys, shape.v_head_dim),
        "q_arrived": plgpu.Barrier(num_arrivals=of_queries, num_barriers=queries[0]),
        "k_arrived": plgpu.Barrier(num_arrivals=of_keys, num_barriers=keys[0]),
        "v_arrived": plgpu.Barrier(num_barriers=keys[0]),
        "free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=shape.slots),
    }
    if segmented:
        scratch |= {"q_ids_tile": plgpu.SMEM(queries, jnp.int32), "kv_ids_tile": plgpu.SMEM(keys, jnp.int32)}
    if shape.axis == "q" and dead_keys:
        scratch["k_seen"] = allocate_tile(dtype, COMPUTE_WARPGROUPS, shape.visited, shape.head_dim)
    return scratch


def _copy_queries(place: ProgramTile, start: Scalar, size: int, head: Scalar, slot: Scalar) -> None:
    """Start async copies of the tiles of a block of queries of one head."""
    inputs, scratch, arrived = place.inputs, place.scratch, place.scratch["q_arrived"].at[slot]
    rows = pl.ds(start, size)
    for name in ("q", "d_out"):
        plgpu.copy_gmem_to_smem(inputs[name].at[place.batch, rows, head], scratch[f"{name}_tile"].at[slot], arrived)
    for name in ("shift", "row_sums"):
        plgpu.copy_gmem_to_smem(inputs[name].at[place.batch, head, rows], scratch[f"{name}_tile"].at[slot], arrived)
    if place.plan.segmented:
        plgpu.copy_gmem_to_smem(inputs["q_ids"].at[place.batch, rows], scratch["q_ids_tile"].at[slot], arrived)


def compute_dq(plan: FlashGpuPlan, operands: Operands, rows: QueryRows) -> Float[Array, "B T N H"]:
    """Compute the gradient of q, `[B, T, N, H]`."""
    shape, dtype = build_shape(plan, "dq"), operands.q.dtype
    inputs = _build_inputs(plan, shape, operands, rows)
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
        plgpu.commit_smem()  # type: ignore[no-untyped-call] # untyped upstream
        plgpu.copy_smem_to_gmem(ready, outputs[0].at[place.batch, pl.ds(place.start, ROWS), place.head])
        plgpu.wait_smem_to_gmem(0)


def _compute_dq(place: ProgramTile) -> jax.Array:
    """Compute the gradient of this warpgroup's queries, not yet multiplied by the scale."""
    scratch, plan, warpgroup = place.scratch, place.plan, place.warpgroup
    _copy_queries(place, place.start, ROWS, place.head, warpgroup)
    plgpu.barrier_wait(scratch["q_arrived"].at[warpgroup])
    q, d_out = scratch["q_tile"].at[warpgroup], scratch["d_out_tile"].at[warpgroup]
    shift, row_sums = scratch["shift_tile"].at[warpgroup][...], scratch["row_sums_tile"].at[warpgroup][...]

    def visit(masked: bool, at: Scalar, dq: jax.Array) -> jax.Array:
        slot = place.slot(at)
        plgpu.barrier_wait(scratch["k_arrived"].at[slot])
        k = scratch["k_tile"].at[slot]
        z, slope = compute_logits(plan, multiply(plan, q, k, transposed=True))  # logits with soft cap, eqs. (1) and (2)
        allowed_pairs = prepare_allowed(place, at, slot) if masked else None
        y = z * get_exponent_factor(plan) - broadcast_over_keys(shift, z.shape[1])
        if allowed_pairs is not None and not plan.has_dead_keys:
            y = jnp.where(allowed_pairs(False), y, -jnp.inf)  # masked after the fused multiply and subtract
        p = jnp.exp2(y)  # probabilities, equation (8)
        plgpu.barrier_wait(scratch["v_arrived"].at[slot])
        dp = multiply(plan, d_out, scratch["v_tile"].at[slot], transposed=True)  # dp, equation (10)
        dx = p * (dp - broadcast_over_keys(row_sums, z.shape[1]))  # dz, equation (12)
        dx = dx if slope is None else dx * slope  # dx, equation (13)
        if allowed_pairs is not None and plan.has_dead_keys:
            dx = jnp.where(allowed_pairs(False), dx, 0.0)
            k_seen = scratch["k_seen"].at[warpgroup]
            k_seen[...] = zero_unseen_rows(k[...], allowed_pairs(True))
            plgpu.commit_smem()  # type: ignore[no-untyped-call] # untyped upstream
            k = k_seen
        dq = accumulate(plan, dq, dx.astype(k.dtype), k)  # dq, equation (14), not yet scaled
        place.release_slot(slot)
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
    inputs = _build_inputs(plan, shape, operands, rows)
    dk, dv = launch(
        _run_dkv_program,
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

    def copy_step(at: Scalar, slot: Scalar) -> None:
        head = place.head * group + lax.div(at, total)
        _copy_queries(place, place.visited(lax.rem(at, total)), place.shape.visited, head, slot)

    @pl.when(place.warpgroup == COMPUTE_WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")
        place.fetch(total * group, copy_step)

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
            plgpu.commit_smem()  # type: ignore[no-untyped-call] # untyped upstream
            plgpu.copy_smem_to_gmem(ready, out.at[place.batch, rows, place.head])
        plgpu.wait_smem_to_gmem(0)


def _sum_over_group(place: ProgramTile, group: Any, total: Any) -> tuple[jax.Array, jax.Array]:
    """Sum dk and dv of this warpgroup's keys over the query heads of the group; dk is not yet scaled."""
    scratch, plan, warpgroup = place.scratch, place.plan, place.warpgroup
    k, v = scratch["k_tile"].at[warpgroup], scratch["v_tile"].at[warpgroup]

    def visit(masked: bool, base: Any, at: Scalar, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        slot = place.slot(base + at)
        plgpu.barrier_wait(scratch["q_arrived"].at[slot])
        q, d_out = scratch["q_tile"].at[slot], scratch["d_out_tile"].at[slot]
        z, slope = compute_logits(plan, multiply(plan, k, q, transposed=True))  # logits with soft cap, eqs. (1) and (2)
        allowed_pairs = _compute_allowed(place, at, slot) if masked else None
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
        dk, dv = sums
        dv = accumulate(plan, dv, p.astype(d_out.dtype), d_out)  # dv, equation (9)
        dk = accumulate(plan, dk, dx.astype(q.dtype), q)  # dk, equation (15), not yet scaled
        place.release_slot(slot, read_as_values=True)  # shift and row_sums were read as values
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


def _compute_allowed(place: ProgramTile, at: Scalar, slot: Scalar) -> jax.Array:
    """Compute which positions of a tile of this warpgroup's keys may attend, `[keys, queries]`."""
    span = PairSpan(place.batch, place.visited(at), place.start, place.shape.visited, ROWS)
    ids = None
    if place.plan.segmented:
        ids = (place.scratch["q_ids_tile"].at[slot][...], place.scratch["kv_ids_tile"].at[place.warpgroup][...])
    return compute_allowed(place.plan, place.inputs, span, ids, keys_first=True)
