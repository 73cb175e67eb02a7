"""Forward kernel for Hopper in Mosaic GPU.

From the logits z and the sums over one tile of `impls.pallas_gpu.mosaic_tiles`, the kernel computes:

    (3)  z_ij = -inf, where i may not attend to j
    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

The schedule is that of `impls.flash_gpu.tile_schedule`. A program owns a block of queries of one head, half of it for
each computing warpgroup, or several such blocks one after the other (`TileOrder`). It visits
the blocks of keys that the mask does not hide completely, full blocks first. Computing warpgroups multiply whenever
they can, or in turns (`TensorCoreTurns`). The sources are those of
`impls.flash_gpu.triton.forward` and `impls.flash_gpu.mosaic.mosaic_launch`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from impls.block_arithmetic import LN_2, convert_sinks, make_shape, replace_neg_inf
from impls.flash_gpu.mosaic.mosaic_launch import (
    COMPUTE_WARPGROUPS,
    KernelShape,
    ProgramTile,
    build_inputs,
    build_shape,
    launch,
    zero_dead_keys,
)
from impls.flash_gpu.mosaic.mosaic_masks import PairSpan, compute_allowed, zero_unseen_rows
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands, Outputs
from impls.jax_compat import Scalar
from impls.pallas_gpu.mosaic_tiles import (
    ROWS,
    SUM_COLUMNS,
    RunningSoftmax,
    accumulate,
    allocate_tile,
    broadcast_over_keys,
    compute_logits,
    multiply,
    update_softmax,
)


@dataclasses.dataclass(frozen=True)
class TensorCoreTurns:
    """The turns of one warpgroup: it uses the tensor cores while the other computes exponentials.

    Two warpgroups that start together also wait for the tensor cores together, and then for the exponential units. With
    turns, the products of one are issued while the other computes its softmax (Shah et al. 2024, arXiv:2407.08608,
    section 3.1). A turn consists of two products: weights times values of one step (PV), and queries times keys of the
    next step (QK). They lie between the exponentials of the two steps.

        warpgroup 0:  QK_0 | softmax 0 | PV_0 QK_1 | softmax 1 | PV_1
        warpgroup 1:         QK_0      | softmax 0 | PV_0 QK_1 | softmax 1 | PV_1

    Each warpgroup has a barrier. To take a turn, a warpgroup waits at its own barrier; to give a turn, it arrives at
    the other's. A warpgroup gives each turn before it takes the next, so a barrier never has two pending arrivals. A
    second arrival would undo the first, since a barrier's phase is one bit.

    Invariant: both warpgroups take equally many turns. With n steps these are n + 1 turns, and without a step none. The
    invariant holds because both warpgroups visit all steps of the program. Under a causal mask the rows of one
    warpgroup may see fewer blocks; it then visits the others as completely hidden blocks. The last turn that warpgroup
    1 gives is taken by no step: warpgroup 0 waits for it when the program ends. In return, warpgroup 1 gives a turn
    before the first step. So the scheme works for one tile and for several tiles with different numbers of steps.
    """

    mine: Any  # index of this warpgroup, 0 or 1
    barriers: Any | None  # one barrier for each warpgroup; None if the warpgroups do not take turns

    def begin(self) -> None:
        """Give the first turn to warpgroup 0, before the first step."""
        if self.barriers is not None:
            pl.when(self.mine == 1)(self.give)

    def take(self) -> None:
        """Wait until the other warpgroup has issued its products."""
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[self.mine])

    def give(self) -> None:
        """Signal that the products of this turn are issued."""
        if self.barriers is not None:
            plgpu.barrier_arrive(self.barriers.at[1 - self.mine])

    def end(self) -> None:
        """Take the last turn, so that every barrier is back in its first state."""
        if self.barriers is not None:
            pl.when(self.mine == 0)(self.take)


def forward(plan: FlashGpuPlan, operands: Operands) -> Outputs:
    """Compute attention. Device memory holds only operands, outputs and the schedule."""
    plan, operands = zero_dead_keys(plan, operands)
    shape, dtype = build_shape(plan, "forward"), operands.q.dtype
    batch, q_length, num_q_heads, _ = operands.q.shape
    inputs = build_inputs(plan, shape, operands)
    if operands.sinks is not None:
        inputs["sinks"] = operands.sinks.astype(jnp.float32)
    rows = make_shape((batch, num_q_heads, inputs["q"].shape[1]), jnp.float32)
    out, total, maximum = launch(
        _run_program,
        plan,
        shape,
        inputs,
        name="flash_gpu_mosaic_forward",
        outputs=(make_shape((*inputs["q"].shape[:3], shape.v_head_dim), dtype), rows, rows),
        scratch=build_scratch(shape, dtype, segmented=plan.segmented, dead_keys=plan.has_dead_keys),
    )
    out, total, maximum = out[:, :q_length, :, : plan.v_head_dim], total[:, :, :q_length], maximum[:, :, :q_length]
    # Computed outside the kernel, since inside it the logarithm would be the GPU's approximate one.
    sinks = None if operands.sinks is None else operands.sinks.astype(jnp.float32)[None, :, None]
    shift = maximum if sinks is None else jnp.maximum(maximum, convert_sinks(sinks))
    some = total > 0
    logsumexp = shift * jnp.float32(LN_2) + jnp.log(jnp.where(some, total, 1.0))  # logsumexp, equation (7)
    if sinks is not None:
        logsumexp = jnp.maximum(logsumexp, sinks)  # exact for a sink that takes all the weight
    return Outputs(out, jnp.where(some, logsumexp, -jnp.inf), maximum * jnp.float32(LN_2))


def build_scratch(shape: KernelShape, dtype: Any, *, segmented: bool, dead_keys: bool) -> dict[str, Any]:
    """Describe the shared memory and barriers of a program by name."""
    ids, q_tiles = int(segmented), shape.q_slots * COMPUTE_WARPGROUPS
    scratch: dict[str, Any] = {
        "q_tile": allocate_tile(dtype, q_tiles, ROWS, shape.head_dim),
        "k_tile": allocate_tile(dtype, shape.slots, shape.visited, shape.head_dim),
        "v_tile": allocate_tile(dtype, shape.v_slots, shape.visited, shape.v_head_dim),
        "total_tile": plgpu.SMEM((COMPUTE_WARPGROUPS, ROWS), jnp.float32),
        "max_tile": plgpu.SMEM((COMPUTE_WARPGROUPS, ROWS), jnp.float32),
        "q_arrived": plgpu.Barrier(num_arrivals=1 + ids, num_barriers=q_tiles),
        "k_arrived": plgpu.Barrier(num_arrivals=1 + ids, num_barriers=shape.slots),
        "v_arrived": plgpu.Barrier(num_barriers=shape.v_slots),
        "free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=shape.slots),
    }
    if shape.early_copies:
        scratch["v_free"] = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=shape.v_slots)
    if shape.q_slots > 1:
        scratch["q_free"] = plgpu.Barrier(num_barriers=q_tiles)
    if shape.head_dim != shape.v_head_dim:
        scratch["out_tile"] = allocate_tile(dtype, COMPUTE_WARPGROUPS, ROWS, shape.v_head_dim)
    if shape.ping_pong:
        scratch["turn"] = plgpu.Barrier(num_barriers=COMPUTE_WARPGROUPS)
    if dead_keys:
        scratch["v_seen"] = allocate_tile(dtype, COMPUTE_WARPGROUPS, shape.visited, shape.v_head_dim)
    if segmented:
        scratch["q_ids_tile"] = plgpu.SMEM((q_tiles, ROWS), jnp.int32)
        scratch["kv_ids_tile"] = plgpu.SMEM((shape.slots, shape.visited), jnp.int32)
    return scratch


def _run_program(inputs: dict[str, Any], outputs: Any, scratch: dict[str, Any], place: ProgramTile) -> None:
    """Run the warpgroups of one program: one fetches tiles, the others compute."""

    @pl.when(place.warpgroup == COMPUTE_WARPGROUPS)
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")
        place.fetch_tiles(copy_keys, _copy_all_queries)

    @pl.when(place.warpgroup < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        turns = TensorCoreTurns(place.warpgroup, scratch.get("turn"))
        turns.begin()
        place.visit_tiles(functools.partial(_attend, inputs, outputs, turns))
        turns.end()
        plgpu.wait_smem_to_gmem(0)
        if place.shape.q_slots > 1:
            last = place.inputs["program_tiles"][place.program, 0] - 1
            place.release(scratch["q_free"].at[dataclasses.replace(place, number=last).q_slot])


def _attend(inputs: dict[str, Any], outputs: Any, turns: TensorCoreTurns, place: ProgramTile) -> None:
    """Compute this warpgroup's half of a tile, and start to copy out its results."""
    out, total_out, max_out = outputs
    warpgroup, batch, head, scratch = place.warpgroup, place.batch, place.head, place.scratch
    softmax = _compute_softmax(place, turns)
    scratch["max_tile"].at[warpgroup][...] = softmax.maximum
    if "sinks" in inputs:
        softmax = _add_sink(softmax, inputs["sinks"][head])
    some = softmax.total > 0
    total = jnp.where(some, softmax.total, 1.0)
    scratch["total_tile"].at[warpgroup][...] = softmax.total
    # The queries are no longer read.
    ready = scratch["out_tile"].at[warpgroup] if "out_tile" in scratch else scratch["q_tile"].at[place.q_slot]
    ready[...] = (softmax.out / broadcast_over_keys(total, place.shape.v_head_dim)).astype(out.dtype)  # out, eq. (6)
    plgpu.commit_smem()
    rows = pl.ds(place.start, ROWS)
    plgpu.copy_smem_to_gmem(ready, out.at[batch, rows, head])
    plgpu.copy_smem_to_gmem(scratch["total_tile"].at[warpgroup], total_out.at[batch, head, rows])
    plgpu.copy_smem_to_gmem(scratch["max_tile"].at[warpgroup], max_out.at[batch, head, rows])


def copy_keys(place: ProgramTile, at: Scalar) -> None:
    """Start async copies of one step's tiles of k and v, and of its segment ids, each once there is room."""
    inputs, scratch, slot, v_slot = place.inputs, place.scratch, place.slot(at), place.v_slot(at)
    keys, head = pl.ds(place.visited(at), place.shape.visited), lax.div(place.head, jnp.int32(place.plan.group))
    k_arrived, v_arrived = scratch["k_arrived"].at[slot], scratch["v_arrived"].at[v_slot]
    place.wait_for_slot(at)
    plgpu.copy_gmem_to_smem(inputs["k"].at[place.batch, keys, head], scratch["k_tile"].at[slot], k_arrived)
    if place.plan.segmented:
        plgpu.copy_gmem_to_smem(inputs["kv_ids"].at[place.batch, keys], scratch["kv_ids_tile"].at[slot], k_arrived)
    place.wait_for_v_slot(at)
    plgpu.copy_gmem_to_smem(inputs["v"].at[place.batch, keys, head], scratch["v_tile"].at[v_slot], v_arrived)


def _copy_all_queries(place: ProgramTile) -> None:
    """Start async copies of the queries of both computing warpgroups."""
    for warpgroup in range(COMPUTE_WARPGROUPS):
        _copy_queries(dataclasses.replace(place, warpgroup=jnp.int32(warpgroup)))


def _copy_queries(place: ProgramTile) -> None:
    """Start async copies of the queries of the warpgroup of `place`, and of their segment ids."""
    inputs, scratch, slot, rows = place.inputs, place.scratch, place.q_slot, pl.ds(place.start, ROWS)
    arrived = scratch["q_arrived"].at[slot]
    plgpu.copy_gmem_to_smem(inputs["q"].at[place.batch, rows, place.head], scratch["q_tile"].at[slot], arrived)
    if place.plan.segmented:
        plgpu.copy_gmem_to_smem(inputs["q_ids"].at[place.batch, rows], scratch["q_ids_tile"].at[slot], arrived)


def prepare_allowed(place: ProgramTile, at: Scalar, slot: Scalar) -> Callable[[bool], jax.Array]:
    """Return a function that computes which positions of a tile of this warpgroup's queries may attend.

    Its argument says whether keys come first in the result.
    """
    span = PairSpan(place.batch, place.start, place.visited(at), ROWS, place.shape.visited)
    scratch = place.scratch

    def found(keys_first: bool) -> jax.Array:
        ids = None
        if place.plan.segmented:
            # Read again for each order: rows and columns of ids have different register layouts.
            ids = (scratch["q_ids_tile"].at[place.q_slot][...], scratch["kv_ids_tile"].at[slot][...])
        return compute_allowed(place.plan, place.inputs, span, ids, keys_first=keys_first)

    return found


def _compute_softmax(place: ProgramTile, turns: TensorCoreTurns) -> RunningSoftmax:
    """Compute the softmax of this warpgroup's queries over all visited blocks."""
    inputs, scratch, plan, warpgroup = place.inputs, place.scratch, place.plan, place.warpgroup
    q = scratch["q_tile"].at[place.q_slot]  # [ROWS, H]
    if place.shape.q_slots == 1:
        if place.base is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # results of the last tile lie where queries are copied to
        _copy_queries(place)
    plgpu.barrier_wait(scratch["q_arrived"].at[place.q_slot])

    def visit(masked: bool, at: Scalar, softmax: RunningSoftmax) -> RunningSoftmax:
        slot, v_slot = place.slot(at), place.v_slot(at)
        plgpu.barrier_wait(scratch["k_arrived"].at[slot])
        # Products <q, k> of equation (1). The scale is applied in `compute_logits` or in the exponential.
        products = multiply(plan, q, scratch["k_tile"].at[slot], transposed=True, issued=turns.give)
        if not plan.segmented:
            place.release_keys(at)
        if place.shape.q_slots > 1:
            pl.when(at == 0)(functools.partial(_release_last_queries, place))
        z, _ = compute_logits(plan, products)  # [ROWS, keys], with soft cap, equation (2)
        may = prepare_allowed(place, at, slot) if masked else None
        if may is not None:
            z = jnp.where(may(False), z, -jnp.inf)  # hidden pairs get -inf, equation (3)
        softmax, weights = update_softmax(plan, softmax, z, masked=masked)  # maximum and sum, equations (4) and (5)
        weights = weights.astype(inputs["v"].dtype)  # [ROWS, keys]
        plgpu.barrier_wait(scratch["v_arrived"].at[v_slot])
        v = scratch["v_tile"].at[v_slot]  # [keys, V]
        if may is not None and plan.has_dead_keys:
            v_seen = scratch["v_seen"].at[warpgroup]
            v_seen[...] = zero_unseen_rows(v[...], may(True))
            plgpu.commit_smem()
            v = v_seen
        if place.shape.ping_pong:
            # Without the barrier the compiler may move the exponentials, which are pure, behind the wait.
            pinned = lax.optimization_barrier((softmax, weights))
            softmax, weights = pinned
        turns.take()
        out = accumulate(plan, softmax.out, weights, v)  # (6), not divided
        if plan.segmented:
            place.release_keys(at, read_as_values=place.reads_ids_unfenced)  # the ids of the keys were read until here
        place.release_values(at)
        place.end_step(at, read_as_values=place.reads_ids_unfenced)
        return softmax._replace(out=out)

    softmax = RunningSoftmax(
        maximum=jnp.full((ROWS,), -jnp.inf, jnp.float32),
        total=jnp.zeros((ROWS, SUM_COLUMNS), jnp.float32),
        out=jnp.zeros((ROWS, place.shape.v_head_dim), jnp.float32),
    )
    pl.when(place.total > 0)(turns.take)
    if "full" in place.kinds:
        softmax = lax.fori_loop(jnp.int32(0), place.full, functools.partial(visit, False), softmax)
    if "partial" in place.kinds:
        softmax = lax.fori_loop(place.full, place.total, functools.partial(visit, True), softmax)
    pl.when(place.total > 0)(turns.give)
    if place.shape.q_slots > 1:
        pl.when(place.total == 0)(functools.partial(_release_last_queries, place))
    return softmax._replace(total=jnp.sum(softmax.total, axis=1))


def _release_last_queries(place: ProgramTile) -> None:
    """Release the queries of the last tile, once the results that replaced them are read."""

    @pl.when(place.number > 0)
    def _release() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        place.release(place.scratch["q_free"].at[dataclasses.replace(place, number=place.number - 1).q_slot])


def _add_sink(old: RunningSoftmax, sink: Any) -> RunningSoftmax:
    """Add the sink to the maximum (4) and to the sum of weights (5); it has no value to add to the output (6)."""
    sink = convert_sinks(sink)
    maximum = jnp.maximum(old.maximum, sink)  # maximum, equation (4)
    shift = replace_neg_inf(maximum)
    decay = jnp.exp2(old.maximum - shift)
    total = old.total * decay + jnp.exp2(sink - shift)  # sum of weights, equation (5)
    return RunningSoftmax(maximum, total, old.out * broadcast_over_keys(decay, old.out.shape[1]))
