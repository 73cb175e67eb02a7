"""What the Mosaic GPU kernels share: padded operands, the schedule as a list, and the ring of tiles in flight.

Two warpgroups compute, a third fetches the tiles ahead of them by TMA into a ring of shared memory. A slot is filled
again once both computing warpgroups have let go of it (Shah et al. 2024, arXiv:2407.08608).

What JAX's interpreter does not run, and what it rests on (lowering of jax 0.10.2, and the PTX that it gives):

  - A barrier counts one arrival for each copy that ends in it, and one of every thread for each warpgroup that lets go.
    A thread arrives after its own `wgmma` has ended, so a slot is free when all of them have read it.
  - No `wgmma` is in flight when its accumulator, or anything that it read, is touched: reading an accumulator waits for
    it, and so does the end of `run_state`.
  - A store to shared memory begins and ends with a barrier of the warpgroup, which Mosaic GPU adds. `commit_smem` comes
    between it and the `wgmma` or the copy that reads it.
  - Arrays are filled up to whole tiles, so no copy begins or ends beyond one; tiles start at multiples of 1024 bytes
    and of 8 rows, as the swizzle of 128 bytes needs, and rows of every array at multiples of 16 bytes, as TMA does.
  - Warpgroups take different branches around copies and barriers, threads of one never do.
  - Before the queries of a persistent kernel's next tile come, `wait_smem_to_gmem` has waited until the results of the
    last one, which lie in their place, are read.
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
from impls.flash_gpu.mosaic.mosaic_shape import COMPUTE_WARPGROUPS, OWNED_ROWS, ROWS, KernelShape, round_up
from impls.flash_gpu.mosaic.tile_order import TileOrder, deal_tiles
from impls.flash_gpu.tile_schedule import BLOCK_KINDS, FlashGpuPlan, Visits
from impls.jax_compat import build_mosaic_call, count_multiprocessors
from impls.varying_axes import find_varying_axes, mark_varying

INTERPRETED_PROGRAMS = 3
"""Programs of a persistent kernel in an interpreter, so that each has several tiles of a small problem."""


def build_inputs(plan: FlashGpuPlan, shape: KernelShape, operands: Operands) -> dict[str, jax.Array]:
    """Operands, mask and schedule by name; what no tile divides is padded with zeros."""
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
    """Queries and keys, padded to whole tiles."""
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
        inputs = inputs | {"dealt": jnp.asarray(deal_tiles(order.steps(steps), programs))}
    names = tuple(inputs)

    def body(*references: Any, **shared: Any) -> None:
        number, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        here = dict(zip(names, references[: len(names)], strict=True))
        # The first tile of a program is the one of its number, of which those of a persistent kernel have more.
        place = ProgramTile(plan, shape, here, shared, order, number, warpgroup, *order.at(number))
        program(here, references[len(names) :], shared, place)

    found = build_mosaic_call(
        body,
        name=name,
        grid={"program": programs},
        warpgroups=COMPUTE_WARPGROUPS + 1,
        outputs=outputs,
        scratch=scratch,
        approximate=plan.soft_cap is None,  # whose tangent must be exact; nothing else but powers of two is left
        interpret=plan.interpret,
    )(*inputs.values())
    # Under `shard_map`, outputs differ over the same mesh axes as the operands. The call itself does not mark them so.
    marked: tuple[jax.Array, ...] = mark_varying(found, find_varying_axes(inputs))
    return marked


def _order_tiles(plan: FlashGpuPlan, shape: KernelShape, inputs: dict[str, jax.Array]) -> tuple[TileOrder, np.ndarray]:
    """The order of tiles, and how many steps each has, `[batch or 1, blocks]`."""
    steps = list_visits(plan.build_visits(shape.tiles, shape.axis))[0][:, 0, :, 2]
    queries = shape.axis == "q"
    heads, visited = (plan.num_q_heads, inputs["k"]) if queries else (plan.num_kv_heads, inputs["q"])
    row = (shape.head_dim + shape.v_head_dim) * visited.dtype.itemsize
    each = visited.shape[1] * row
    return TileOrder.of(steps, visited.shape[0], heads, each // plan.group if queries else each * plan.group), steps


@dataclasses.dataclass(frozen=True)
class ProgramTile:
    """Where a program and a warpgroup are, and the blocks that are visited for a tile.

    Attributes:
      plan: the problem.
      shape: sizes of the tiles.
      inputs: references by name.
      scratch: shared memory and barriers by name.
      order: of the tiles.
      program: its number.
      warpgroup: of `COMPUTING` and the one that fetches.
      batch: batch row of the tile.
      head: query head, or key/value head if keys are owned.
      block: of the axis that is owned.
      base: steps of the program before this tile; None in its only one.
    """

    plan: FlashGpuPlan
    shape: KernelShape
    inputs: dict[str, Any]
    scratch: dict[str, Any]
    order: TileOrder
    program: Any
    warpgroup: Any
    batch: Any
    head: Any
    block: Any
    base: Any | None = None

    @property
    def start(self) -> Any:
        """First row of the owned axis that this warpgroup computes."""
        return self.block * OWNED_ROWS + self.warpgroup * ROWS

    @property
    def kinds(self) -> frozenset[str]:
        """Which kinds of blocks any program visits."""
        return frozenset(self.plan.build_visits(self.shape.tiles, self.shape.axis).lists)

    @property
    def full(self) -> Any:
        """How many full blocks come first."""
        return self._line(1)

    @property
    def total(self) -> Any:
        """How many blocks there are."""
        return self._line(2)

    def visited(self, at: Any) -> Any:
        """First row of the other axis in the block that is visited at this step."""
        return self.inputs["blocks"][self._line(0) + at] * self.shape.visited

    def _line(self, column: int) -> Any:
        table = self.inputs["table"]
        return table[self.batch if table.shape[0] > 1 else 0, 0, self.block, column]

    def count_steps_to(self, at: Any) -> Any:
        """The steps of the program before this one of the tile."""
        return at if self.base is None else self.base + at

    def slot(self, at: Any) -> Any:
        """The slot of a step."""
        slots, at = self.shape.slots, self.count_steps_to(at)
        return at & jnp.int32(slots - 1) if slots & (slots - 1) == 0 else lax.rem(at, jnp.int32(slots))

    def visit_tiles(self, compute: Callable[[ProgramTile], None]) -> Any:
        """`compute(place)` for each tile of the program; how many steps these have together."""
        if not self.shape.persistent:
            compute(self)
            return self.total
        mine = self.inputs["dealt"]

        def one(at: Any, base: Any) -> Any:
            batch, head, block = self.order.at(mine[self.program, 1 + at])
            place = dataclasses.replace(self, batch=batch, head=head, block=block, base=base)
            compute(place)
            return base + place.total

        return lax.fori_loop(jnp.int32(0), mine[self.program, 0], one, jnp.int32(0))

    def fetch_tiles(self, bring: Callable[[ProgramTile, Any, Any], None]) -> None:
        """`bring(place, step, slot)` for each step of each tile, those of the next tile while the last is computed."""
        if not self.shape.persistent:
            self.fetch(self.total, functools.partial(bring, self))
            return

        def of_tile(place: ProgramTile) -> None:
            def step(at: Any, _: None) -> None:
                place.wait_for_slot(at)
                bring(place, at, place.slot(at))

            lax.fori_loop(jnp.int32(0), place.total, step, None)

        steps = self.visit_tiles(of_tile)
        lax.fori_loop(steps, steps + self.shape.slots, lambda at, _: self.wait_for_slot(at), None)

    def fetch(self, total: Any, bring: Callable[[Any, Any], None]) -> None:
        """`bring(step, slot)` for each step of the only tile."""

        def step(at: Any, _: None) -> None:
            self.wait_for_slot(at)

            @pl.when(at < total)
            def _bring() -> None:
                bring(at, self.slot(at))

        # The last turns only wait, so that every barrier is in its first state again when the program ends.
        lax.fori_loop(jnp.int32(0), total + self.shape.slots, step, None)

    def wait_for_slot(self, at: Any) -> None:
        """Wait until both computing warpgroups have let go of the slot of a step."""

        @pl.when(self.count_steps_to(at) >= self.shape.slots)
        def _free() -> None:
            plgpu.barrier_wait(self.scratch["free"].at[self.slot(at)])

    def release_slot(self, slot: Any, *, read_as_values: bool = False) -> None:
        """This warpgroup is done with a slot.

        The next copy into the slot must not overtake what still reads it. Reads by `wgmma` have ended, but reads of
        values need a fence (`read_as_values`). An interpreter reads everything as values.
        """
        if read_as_values or self.plan.interpret:
            plgpu.commit_smem()  # type: ignore[no-untyped-call] # untyped upstream
        plgpu.barrier_arrive(self.scratch["free"].at[slot])


@functools.lru_cache(maxsize=64)
def list_visits(visits: Visits) -> tuple[np.ndarray, np.ndarray]:
    """The schedule with every block listed: `[b, n, programs, 3]` start, full blocks and all blocks; and the blocks.

    The fetching warpgroup works ahead of the others, so reading an index from a list delays nobody.
    """
    table, blocks, start = [], [], 0
    for line in visits.table.reshape(-1, 4):
        mine: list[int] = []
        for place, kind in enumerate(BLOCK_KINDS):
            first, count = int(line[2 * place]), int(line[2 * place + 1])
            numbers = visits.lists.get(kind)
            mine += range(first, first + count) if numbers is None else numbers[first : first + count].tolist()
        table.append((start, int(line[1]), len(mine)))
        blocks += mine
        start += len(mine)
    return np.array(table, np.int32).reshape(*visits.table.shape[:3], 3), np.array(blocks or [0], np.int32)


def pad_axes(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """`x` with zeros at the end of these axes, up to these sizes."""
    missing = [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x
