"""Launch of Mosaic GPU kernels: padded operands, the schedule as a list, and the ring of tiles in flight.

Two warpgroups compute. A third fetches tiles ahead of them by TMA into a ring in shared memory. A slot is filled again
once both computing warpgroups have released it (Shah et al. 2024, arXiv:2407.08608).

The following properties are not checked by JAX's interpreter. They rest on the lowering of jax 0.10.2 and its PTX:

  - A barrier counts one arrival for each async copy that ends in it. For each warpgroup that releases a slot it counts
    one arrival of every thread. A thread arrives after its own `wgmma` has ended, so a slot is free when all threads
    have read.
  - No `wgmma` is in flight when its accumulator, or memory that it reads, is accessed: reading an accumulator waits for
    it, and so does the end of `run_state`.
  - Mosaic GPU adds a barrier of the warpgroup before and after a store to shared memory. `commit_smem` comes between
    the store and the `wgmma` or the copy that reads it.
  - Arrays are padded to whole tiles, so no copy crosses their ends. Tiles start at multiples of 1024 bytes and of 8
    rows, as the 128-byte swizzle requires. Rows of every array start at multiples of 16 bytes, as TMA requires.
  - Warpgroups take different branches around copies and barriers; threads of one warpgroup never do.
  - In a persistent kernel, `wait_smem_to_gmem` waits until the results of the last tile are read before queries are
    copied to the same memory. These are the queries of the next tile, or, with two tiles of queries in flight, those of
    the tile after it: the warpgroup then says so at the barrier `q_free`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from impls.flash_gpu.flash_gpu_arrays import Operands
from impls.flash_gpu.mosaic.mosaic_shape import COMPUTE_WARPGROUPS, KernelShape
from impls.flash_gpu.mosaic.tile_order import TileOrder, deal_tiles
from impls.flash_gpu.tile_schedule import BLOCK_KINDS, FlashGpuPlan, Visits
from impls.jax_compat import Scalar, build_mosaic_call, count_multiprocessors
from impls.pallas_gpu.mosaic_tiles import ROWS, round_up
from impls.varying_axes import find_varying_axes, mark_varying

INTERPRETED_PROGRAMS = 3
"""Programs of a persistent kernel in an interpreter: few, so that each has several tiles of a small problem."""


def build_inputs(plan: FlashGpuPlan, shape: KernelShape, operands: Operands) -> dict[str, jax.Array]:
    """Build the kernel's inputs by name: operands padded with zeros to whole tiles, mask and schedule."""
    q_length, kv_length = pad_lengths(plan, shape)
    inputs: dict[str, jax.Array] = {
        "q": pad_axes(operands.q, {1: q_length, 3: shape.head_dim}),
        "k": pad_axes(operands.k, {1: kv_length, 3: shape.head_dim}),
        "v": pad_axes(operands.v, {1: kv_length, 3: shape.v_head_dim}),
    }
    table, blocks = list_visits(plan.build_visits(shape.tiles, shape.axis))
    inputs |= {"table": jnp.asarray(table), "blocks": jnp.asarray(blocks)}
    inputs |= {name: jnp.asarray(array) for name, array in plan.mask_arrays.items()}
    if operands.segment_ids is not None:
        q_ids, kv_ids = operands.segment_ids
        inputs |= {"q_ids": pad_axes(q_ids, {1: q_length}), "kv_ids": pad_axes(kv_ids, {1: kv_length})}
    return inputs


def pad_lengths(plan: FlashGpuPlan, shape: KernelShape) -> tuple[int, int]:
    """Round the numbers of queries and keys up to whole tiles."""
    return round_up(plan.q_length, shape.tiles.block_q), round_up(plan.kv_length, shape.tiles.block_kv)


def launch(
    program: Callable[..., None],
    plan: FlashGpuPlan,
    shape: KernelShape,
    inputs: dict[str, jax.Array],
    *,
    name: str,
    outputs: tuple[Any, ...],
    scratch: dict[str, Any],
) -> tuple[jax.Array, ...]:
    """Run `program(inputs, outputs, scratch, place)` in every warpgroup of every program."""
    order, steps = _order_tiles(plan, shape, inputs)
    programs = order.tiles
    if shape.persistent:
        programs = min(programs, INTERPRETED_PROGRAMS if plan.interpret else count_multiprocessors())
        inputs = inputs | {"program_tiles": jnp.asarray(deal_tiles(order.steps(steps), programs))}
    names = tuple(inputs)

    def body(*references: Any, **shared: Any) -> None:
        program_id, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        named = dict(zip(names, references[: len(names)], strict=True))
        # The number of a program's first tile is the program id. Programs of a persistent kernel have further tiles.
        place = ProgramTile(plan, shape, named, shared, order, program_id, warpgroup, *order.at(program_id))
        program(named, references[len(names) :], shared, place)

    found = build_mosaic_call(
        body,
        name=name,
        grid={"program": programs},
        warpgroups=COMPUTE_WARPGROUPS + 1,
        outputs=outputs,
        scratch=scratch,
        approximate=plan.soft_cap is None,  # tanh must be exact; without a soft cap only powers of two are computed
        interpret=plan.interpret,
    )(*inputs.values())
    # Under `shard_map`, outputs vary over the same mesh axes as the operands, which the call itself does not mark.
    marked: tuple[jax.Array, ...] = mark_varying(found, find_varying_axes(inputs))
    return marked


def _order_tiles(plan: FlashGpuPlan, shape: KernelShape, inputs: dict[str, jax.Array]) -> tuple[TileOrder, np.ndarray]:
    """Build the order of the tiles, and count the steps of each tile, `[batch or 1, blocks]`."""
    steps = list_visits(plan.build_visits(shape.tiles, shape.axis))[0][:, 0, :, 2]
    queries = shape.axis == "q"
    heads, visited = (plan.num_q_heads, inputs["k"]) if queries else (plan.num_kv_heads, inputs["q"])
    row = (shape.head_dim + shape.v_head_dim) * visited.dtype.itemsize
    each = visited.shape[1] * row
    return TileOrder.of(steps, visited.shape[0], heads, each // plan.group if queries else each * plan.group), steps


@dataclasses.dataclass(frozen=True)
class ProgramTile:
    """The tile that a program is computing, and the blocks that are visited for it.

    Attributes:
      plan: static part of the call.
      shape: sizes of the tiles.
      inputs: references by name.
      scratch: shared memory and barriers by name.
      order: order of all tiles.
      program: program id.
      warpgroup: index of the warpgroup. The last one fetches, the others compute.
      batch: batch row of the tile.
      head: query head, or key/value head if the program owns keys.
      block: block of the owned axis.
      base: number of steps of the program before this tile; None if it has only one tile.
      number: number of tiles of the program before this tile.
    """

    plan: FlashGpuPlan
    shape: KernelShape
    inputs: dict[str, Any]
    scratch: dict[str, Any]
    order: TileOrder
    program: Scalar
    warpgroup: Scalar
    batch: Scalar
    head: Scalar
    block: Scalar
    base: Any | None = None
    number: Scalar = 0

    @property
    def start(self) -> Any:
        """First row of the owned axis that this warpgroup computes."""
        first = self.block * self.shape.owned
        return first if self.shape.owned == ROWS else first + self.warpgroup * ROWS

    @property
    def q_slot(self) -> Any:
        """Index of this warpgroup's tile of queries in shared memory."""
        return self.find_q_slot(self.warpgroup)

    def find_q_slot(self, warpgroup: Scalar) -> Any:
        """Find the index of a warpgroup's tile of queries in shared memory."""
        if self.shape.q_slots == 1:
            return warpgroup
        return lax.rem(self.number, jnp.int32(self.shape.q_slots)) * COMPUTE_WARPGROUPS + warpgroup

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of blocks that any program visits."""
        return frozenset(self.plan.build_visits(self.shape.tiles, self.shape.axis).lists)

    @property
    def full(self) -> Any:
        """Number of full blocks, which come first."""
        return self._line(1)

    @property
    def total(self) -> Any:
        """Number of visited blocks."""
        return self._line(2)

    def visited(self, at: Scalar) -> Any:
        """Find the first row, along the axis that is not owned, of the block visited at step `at`."""
        return self.inputs["blocks"][self._line(0) + at] * self.shape.visited

    def _line(self, column: int) -> Any:
        table = self.inputs["table"]
        return table[self.batch if table.shape[0] > 1 else 0, 0, self.block, column]

    def count_steps_to(self, at: Scalar) -> Any:
        """Count the steps of the program before step `at` of this tile."""
        return at if self.base is None else self.base + at

    def slot(self, at: Scalar) -> Any:
        """Compute the ring slot of a step."""
        return self._find_slot(at, self.shape.slots)

    def v_slot(self, at: Scalar) -> Any:
        """Compute the ring slot of the values of a step, which may have fewer slots."""
        return self._find_slot(at, self.shape.v_slots)

    def _find_slot(self, at: Scalar, slots: int) -> Any:
        at = self.count_steps_to(at)
        return at & jnp.int32(slots - 1) if slots & (slots - 1) == 0 else lax.rem(at, jnp.int32(slots))

    def visit_tiles(self, compute: Callable[[ProgramTile], None]) -> Any:
        """Call `compute(place)` for each tile of the program, and return the total number of their steps."""
        if not self.shape.persistent:
            compute(self)
            return self.total
        program_tiles = self.inputs["program_tiles"]

        def one(at: Scalar, base: Any) -> Any:
            batch, head, block = self.order.at(program_tiles[self.program, 1 + at])
            place = dataclasses.replace(self, batch=batch, head=head, block=block, base=base, number=at)
            compute(place)
            return base + place.total

        return lax.fori_loop(jnp.int32(0), program_tiles[self.program, 0], one, jnp.int32(0))

    def fetch_tiles(self, copy_step: Callable[[ProgramTile, Any], None], copy_q: Callable[[ProgramTile], None]) -> None:
        """Call `copy_step(place, step)` for each step of each tile, ahead of the computation.

        If the queries of several tiles are in flight, `copy_q(place)` comes before the steps of a tile.
        """

        def of_tile(place: ProgramTile) -> None:
            if self.shape.q_slots > 1:
                place.wait_for_q_slots()
                copy_q(place)
            lax.fori_loop(jnp.int32(0), place.total, lambda at, _: copy_step(place, at), None)

        self.drain(self.visit_tiles(of_tile))

    def fetch(self, total: Any, copy_step: Callable[[Any], None]) -> None:
        """Call `copy_step(step)` for each step of the program's only tile, ahead of the computation."""
        lax.fori_loop(jnp.int32(0), total, lambda at, _: copy_step(at), None)
        self.drain(total)

    def drain(self, steps: Any) -> None:
        """Wait for the last releases, so that every barrier is back in its first state when the program ends."""
        lax.fori_loop(steps, steps + self.shape.slots, lambda at, _: self.wait_for_slot(at), None)
        if self.shape.early_copies:
            lax.fori_loop(steps, steps + self.shape.v_slots, lambda at, _: self.wait_for_v_slot(at), None)
        if self.shape.q_slots > 1:
            tiles = self.inputs["program_tiles"][self.program, 0]
            for further in range(self.shape.q_slots):
                dataclasses.replace(self, number=tiles + further).wait_for_q_slots()

    def wait_for_slot(self, at: Scalar) -> None:
        """Wait until both computing warpgroups have released the slot of a step."""
        self._wait(at, "free", self.shape.slots)

    def wait_for_v_slot(self, at: Scalar) -> None:
        """Wait until both computing warpgroups have released the values in the slot of a step."""
        if self.shape.early_copies:
            self._wait(at, "v_free", self.shape.v_slots)

    def wait_for_q_slots(self) -> None:
        """Wait until both computing warpgroups have released their tiles of queries of an earlier tile."""

        @pl.when(self.number >= self.shape.q_slots)
        def _free() -> None:
            for warpgroup in range(COMPUTE_WARPGROUPS):
                plgpu.barrier_wait(self.scratch["q_free"].at[self.find_q_slot(warpgroup)])

    def _wait(self, at: Scalar, barrier: str, slots: int) -> None:
        @pl.when(self.count_steps_to(at) >= slots)
        def _free() -> None:
            plgpu.barrier_wait(self.scratch[barrier].at[self._find_slot(at, slots)])

    @property
    def reads_ids_unfenced(self) -> bool:
        """Return whether a release must bring a fence of its own after reads of segment ids.

        Where keys that no query attends to are zeroed in a buffer, a fence follows that store already.
        """
        return self.plan.segmented and not self.plan.has_dead_keys

    def release_keys(self, at: Scalar, *, read_as_values: bool = False) -> None:
        """Release the keys of a step, if copies are early; otherwise `end_step` releases them."""
        if self.shape.early_copies:
            self.release(self.scratch["free"].at[self.slot(at)], read_as_values=read_as_values)

    def release_values(self, at: Scalar) -> None:
        """Release the values of a step, if copies are early; otherwise `end_step` releases them."""
        if self.shape.early_copies:
            self.release(self.scratch["v_free"].at[self.v_slot(at)])

    def end_step(self, at: Scalar, *, read_as_values: bool = False) -> None:
        """Release the slot of a step, unless its parts were released early."""
        if not self.shape.early_copies:
            self.release(self.scratch["free"].at[self.slot(at)], read_as_values=read_as_values)

    def release(self, barrier: Any, *, read_as_values: bool = False) -> None:
        """Say at a barrier that this warpgroup has read a tile.

        The next copy into the tile must not overtake pending reads. Reads by `wgmma` have ended by then. Reads into
        registers need a fence, which `read_as_values` requests. An interpreter reads everything as values.
        """
        if read_as_values or self.plan.interpret:
            plgpu.commit_smem()  # type: ignore[no-untyped-call] # untyped upstream
        plgpu.barrier_arrive(barrier)


@functools.lru_cache(maxsize=64)
def list_visits(visits: Visits) -> tuple[np.ndarray, np.ndarray]:
    """List every visited block, also those that the schedule gives only as a first block and a count.

    The fetching warpgroup works ahead of the others, so reading an index from a list costs no time.

    Returns:
      int32 `[b, n, programs, 3]`: start in the list, number of full blocks, number of all blocks.
      int32, the blocks of all programs one after another.
    """
    table, blocks, start = [], [], 0
    for line in visits.table.reshape(-1, 4):
        program_tiles: list[int] = []
        for place, kind in enumerate(BLOCK_KINDS):
            first, count = int(line[2 * place]), int(line[2 * place + 1])
            numbers = visits.lists.get(kind)
            program_tiles += range(first, first + count) if numbers is None else numbers[first : first + count].tolist()
        table.append((start, int(line[1]), len(program_tiles)))
        blocks += program_tiles
        start += len(program_tiles)
    return np.array(table, np.int32).reshape(*visits.table.shape[:3], 3), np.array(blocks or [0], np.int32)


def pad_axes(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """Pad `x` with zeros at the end of the given axes, to the given sizes."""
    missing = [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x
