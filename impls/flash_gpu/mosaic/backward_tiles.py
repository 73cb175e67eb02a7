"""Operands and shared memory of the backward kernels, and what they do with a tile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from impls.block_arithmetic import LOG2_E
from impls.flash_gpu.mosaic.mosaic_launch import COMPUTE_WARPGROUPS, KernelShape, ProgramTile, build_inputs, pad_axes
from impls.flash_gpu.mosaic.mosaic_masks import PairSpan, compute_allowed
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands, QueryRows
from impls.jax_compat import Scalar
from impls.pallas_gpu.mosaic_tiles import ROWS, allocate_tile


def build_backward_inputs(
    plan: FlashGpuPlan, shape: KernelShape, operands: Operands, rows: QueryRows
) -> dict[str, jax.Array]:
    """Build the inputs of a backward kernel by name: those of the forward pass, and what it kept of each query."""
    inputs = build_inputs(plan, shape, operands)
    length = inputs["q"].shape[1]
    inputs["d_out"] = pad_axes(rows.d_out, {1: length, 3: shape.v_head_dim})
    rows = rows._replace(shift=rows.shift * jnp.float32(LOG2_E))
    return inputs | {name: pad_axes(getattr(rows, name), {2: length}) for name in ("shift", "row_sums")}


def build_scratch(shape: KernelShape, dtype: Any, *, segmented: bool, dead_keys: bool) -> dict[str, Any]:
    """Describe the shared memory and barriers of a program by name: tiles that it owns, and tiles that it visits.

    At the end each gradient is stored in the tile of its operand, which is no longer read by then.
    """
    own, other = (shape.owned // ROWS, ROWS), (shape.slots, shape.visited)
    queries, keys = (own, other) if shape.axis == "q" else (other, own)
    values = (shape.v_slots, shape.visited) if shape.axis == "q" else keys
    ids = int(segmented)
    of_queries, of_keys = 4 + ids, 1 + ids  # numbers of copies: q, d_out, shift, row_sums; k
    scratch: dict[str, Any] = {
        "q_tile": allocate_tile(dtype, *queries, shape.head_dim),
        "d_out_tile": allocate_tile(dtype, *queries, shape.v_head_dim),
        "shift_tile": plgpu.SMEM(queries, jnp.float32),
        "row_sums_tile": plgpu.SMEM(queries, jnp.float32),
        "k_tile": allocate_tile(dtype, *keys, shape.head_dim),
        "v_tile": allocate_tile(dtype, *values, shape.v_head_dim),
        "q_arrived": plgpu.Barrier(num_arrivals=of_queries, num_barriers=queries[0]),
        "k_arrived": plgpu.Barrier(num_arrivals=of_keys, num_barriers=keys[0]),
        "v_arrived": plgpu.Barrier(num_barriers=values[0]),
        "free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=shape.slots),
    }
    if shape.early_copies:
        scratch["v_free"] = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=shape.v_slots)
    if segmented:
        scratch |= {"q_ids_tile": plgpu.SMEM(queries, jnp.int32), "kv_ids_tile": plgpu.SMEM(keys, jnp.int32)}
    if shape.axis == "q" and dead_keys:
        scratch["k_seen"] = allocate_tile(dtype, COMPUTE_WARPGROUPS, shape.visited, shape.head_dim)
    if shape.axis == "kv" and shape.owned == ROWS:
        scratch |= {
            "weights_tile": allocate_tile(jnp.float32, ROWS, shape.visited),
            "weights_ready": plgpu.Barrier(num_barriers=1),
            "weights_free": plgpu.Barrier(num_barriers=1),
        }
    return scratch


def copy_queries(place: ProgramTile, start: Scalar, size: int, head: Scalar, slot: Scalar) -> None:
    """Start async copies of the tiles of a block of queries of one head."""
    inputs, scratch, arrived = place.inputs, place.scratch, place.scratch["q_arrived"].at[slot]
    rows = pl.ds(start, size)
    for name in ("q", "d_out"):
        plgpu.copy_gmem_to_smem(inputs[name].at[place.batch, rows, head], scratch[f"{name}_tile"].at[slot], arrived)
    for name in ("shift", "row_sums"):
        plgpu.copy_gmem_to_smem(inputs[name].at[place.batch, head, rows], scratch[f"{name}_tile"].at[slot], arrived)
    if place.plan.segmented:
        plgpu.copy_gmem_to_smem(inputs["q_ids"].at[place.batch, rows], scratch["q_ids_tile"].at[slot], arrived)


def copy_group_step(place: ProgramTile, at: Scalar) -> None:
    """Start async copies of one step's queries, once there is room; steps go over the query heads of the group."""
    total = place.total
    head = place.head * jnp.int32(place.plan.group) + lax.div(at, total)
    place.wait_for_slot(at)
    copy_queries(place, place.visited(lax.rem(at, total)), place.shape.visited, head, place.slot(at))


def compute_allowed_keys(place: ProgramTile, at: Scalar, slot: Scalar, own: Scalar) -> Bool[Array, "keys queries"]:
    """Compute whether the queries in `slot` may attend to the keys of the warpgroup's own tile with the index `own`."""
    span = PairSpan(place.batch, place.visited(at), place.start, place.shape.visited, ROWS)
    ids = None
    if place.plan.segmented:
        ids = (place.scratch["q_ids_tile"].at[slot][...], place.scratch["kv_ids_tile"].at[own][...])
    return compute_allowed(place.plan, place.inputs, span, ids, keys_first=True)
