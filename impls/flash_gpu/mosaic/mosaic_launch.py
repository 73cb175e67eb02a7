"""Launch of Mosaic GPU kernels: sizes, padded operands, the order of tiles, and the ring of tiles in flight.

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
import heapq
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool

from impls.flash_gpu.block_sizes import Axis, Kernel, Ring, Tiles
from impls.flash_gpu.tile_schedule import BLOCK_KINDS, FlashGpuPlan, Operands, Visits
from impls.jax_compat import Scalar, build_mosaic_call, count_multiprocessors
from impls.pallas_gpu.mosaic_tiles import LANES, ROWS, round_up
from impls.varying_axes import find_varying_axes, mark_varying

COMPUTE_WARPGROUPS = 2
"""Warpgroups that compute; one more fetches tiles."""
OWNED_ROWS = COMPUTE_WARPGROUPS * ROWS
"""Queries or keys that a program owns, `ROWS` for each computing warpgroup."""
MAX_UNSPLIT_DEPTH = 128
"""Largest head depth at which one warpgroup has registers for both dk and dv of its keys in f32."""
BARRIER_BYTES = 1024
"""Bytes reserved for barriers, of 8 bytes each, beyond the named buffers."""
REDUCTION_BYTES = 2048
"""Bytes that Mosaic GPU reserves in kernels with reductions (`plgpu.CompilerParams.reduction_scratch_bytes`)."""
_ALIGNMENT = 1024  # bytes; each buffer starts at a multiple, as swizzled tiles require


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """Sizes of a kernel's tiles."""

    axis: Axis  # `"q"` or `"kv"`, the axis of which a program owns rows
    owned: int  # rows that a program owns, `OWNED_ROWS`, or `ROWS` if both computing warpgroups work on the same rows
    visited: int  # rows of the other axis per tile
    slots: int  # tiles of each operand in flight
    v_slots: int  # tiles of values in flight
    head_dim: int  # padded depth of q and k
    v_head_dim: int  # padded depth of v
    ping_pong: bool = False
    persistent: bool = False
    early_copies: bool = False
    # Tiles of queries in flight for each computing warpgroup. The queries of the next tile arrive during this one if
    # there are two.
    q_slots: int = 1

    @classmethod
    def of(cls, kernel: Kernel, ring: Ring, head_dim: int, v_head_dim: int) -> KernelShape:
        """Build the shape of a kernel for these head depths."""
        axis: Axis = "kv" if kernel == "dkv" else "q"
        depths = round_up(head_dim, LANES), round_up(v_head_dim, LANES)
        return cls(
            axis=axis,
            owned=ROWS if kernel == "dkv" and max(depths) > MAX_UNSPLIT_DEPTH else OWNED_ROWS,
            visited=ring.block,
            slots=ring.num_stages,
            v_slots=ring.num_v_stages or ring.num_stages,
            head_dim=depths[0],
            v_head_dim=depths[1],
            ping_pong=ring.ping_pong,
            persistent=ring.persistent,
            early_copies=ring.early_copies,
            q_slots=ring.num_q_stages,
        )

    @property
    def tiles(self) -> Tiles:
        """Tile sizes in the form that the schedule takes."""
        if self.axis == "q":
            return Tiles(block_q=self.owned, block_kv=self.visited)
        return Tiles(block_q=self.visited, block_kv=self.owned)


def build_shape(plan: FlashGpuPlan, kernel: Kernel) -> KernelShape:
    """Build the shape of a kernel for the plan."""
    return KernelShape.of(kernel, plan.sizes.ring(kernel), plan.head_dim, plan.v_head_dim)


def count_shared_bytes(scratch: dict[str, Any], *, reduces: bool) -> int:
    """Count the bytes of shared memory of a program with these buffers and barriers, and with reductions or without."""
    buffers = (x for x in scratch.values() if not isinstance(x, plgpu.Barrier))
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)
    return sum(round_up(size, _ALIGNMENT) for size in sizes) + BARRIER_BYTES + (REDUCTION_BYTES if reduces else 0)


MAX_CACHED_BYTES = 32 << 20
"""Bytes of rows that concurrent programs may visit: Hopper's cache of 50 MB, less the rows that the programs own."""


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Numbering of tiles in the order in which they start.

    A GPU starts programs in order, each as soon as there is room. A long tile that starts last leaves all other
    multiprocessors idle. So if tiles differ in length, the longest start first. This interleaves tiles of several
    heads, but only of as many heads as fit the cache: concurrent programs then read the same rows. It is the order of
    FlashAttention-3's causal scheduler (Shah et al. 2024, arXiv:2407.08608).
    """

    batch: int
    heads: int
    blocks: int  # tiles per head of a batch row
    together: int  # number of (batch row, head) pairs whose tiles are interleaved, a divisor of `batch * heads`
    descending: bool

    @classmethod
    def of(cls, steps: np.ndarray, batch: int, heads: int, head_bytes: int) -> TileOrder:
        """Build the order from the `steps` of each tile, `[batch or 1, blocks]`, and the bytes read for each head."""
        blocks, totals = steps.shape[1], steps.sum(axis=0)
        if (steps == steps[0, 0]).all():
            return cls(batch, heads, blocks, 1, False)
        half = blocks // 2
        descending = bool(totals[:half].sum() < totals[blocks - half :].sum())
        fitting = max(1, MAX_CACHED_BYTES // head_bytes)
        together = max(n for n in range(1, min(fitting, batch * heads) + 1) if batch * heads % n == 0)
        return cls(batch, heads, blocks, together, descending)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.batch * self.heads * self.blocks

    def at(self, tile: Scalar) -> tuple[Any, Any, Any]:
        """Compute batch row, head and block of a tile, all int32."""
        together, blocks = jnp.int32(self.together), jnp.int32(self.blocks)
        rest = lax.div(tile, together)
        row = lax.div(rest, blocks) * together + lax.rem(tile, together)
        block = lax.rem(rest, blocks)
        if self.descending:
            block = blocks - 1 - block
        return lax.div(row, jnp.int32(self.heads)), lax.rem(row, jnp.int32(self.heads)), block

    def steps(self, steps: np.ndarray) -> np.ndarray:
        """Arrange the steps of `[batch or 1, blocks]` by tile, `[tiles]`."""
        rows = np.broadcast_to(steps[:, None, :], (self.batch, self.heads, self.blocks)).reshape(-1, self.blocks)
        rows = rows[:, ::-1] if self.descending else rows
        return rows.reshape(-1, self.together, self.blocks).swapaxes(1, 2).ravel()


TILE_OVERHEAD_STEPS = 1
"""Assumed cost, in steps, of loading a tile's queries and storing its results. It is a guess, not measured."""


def deal_tiles(steps: np.ndarray, programs: int) -> np.ndarray:
    """Assign tiles to programs, `[programs, 1 + most]` int32: the count, then the tile numbers.

    Each tile goes to the program that is free first, as a GPU would assign them. A tile takes the time of its steps
    plus `TILE_OVERHEAD_STEPS`.
    """
    free = [(0, program) for program in range(programs)]
    tiles_of_program: list[list[int]] = [[] for _ in range(programs)]
    for tile, count in enumerate(steps.tolist()):
        time, program = free[0]
        tiles_of_program[program].append(tile)
        heapq.heapreplace(free, (time + count + TILE_OVERHEAD_STEPS, program))
    table = np.zeros((programs, 1 + max(map(len, tiles_of_program))), np.int32)
    for program, hand in enumerate(tiles_of_program):
        table[program, : 1 + len(hand)] = (len(hand), *hand)
    return table


INTERPRETED_PROGRAMS = 3
"""Programs of a persistent kernel in an interpreter: few, so that each has several tiles of a small problem."""


def build_inputs(plan: FlashGpuPlan, shape: KernelShape, operands: Operands) -> dict[str, jax.Array]:
    """Build the kernel's inputs by name: operands padded with zeros to whole tiles, mask and schedule."""
    q_length, kv_length = round_up(plan.q_length, shape.tiles.block_q), round_up(plan.kv_length, shape.tiles.block_kv)
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
    """The tile that a program is computing, and the blocks that are visited for it."""

    plan: FlashGpuPlan
    shape: KernelShape
    inputs: dict[str, Any]
    scratch: dict[str, Any]  # shared memory and barriers by name
    order: TileOrder
    program: Scalar
    warpgroup: Scalar  # index of the warpgroup. The last one fetches, the others compute.
    batch: Scalar
    head: Scalar  # query head, or key/value head if the program owns keys
    block: Scalar  # block of the owned axis
    base: Any | None = None  # number of steps of the program before this tile; None if it has only one tile
    number: Scalar = 0  # number of tiles of the program before this tile

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
        """Return whether a release needs a fence after reads of segment ids, as no store of zeroed keys brings one."""
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
            plgpu.commit_smem()
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


_MAX_BUFFERED_DEPTH = 128  # beyond it, tiles of all kernels leave no room for the buffer
_STRIP_LENGTH = 128  # queries at a time, so that memory is not T * S


def zeroes_dead_keys(head_dim: int, v_head_dim: int) -> bool:
    """Return whether keys that no query attends to are zeroed before a kernel, and not in it."""
    return max(head_dim, v_head_dim) > _MAX_BUFFERED_DEPTH


def zero_dead_keys(plan: FlashGpuPlan, operands: Operands) -> tuple[FlashGpuPlan, Operands]:
    """Zero keys and values that no query attends to, at depths where a kernel has no room for it.

    Such keys and values may be NaN, and 0 * NaN is not 0. Up to depth 128, the forward kernel and that of dq zero them
    in a buffer of their own (`zero_unseen_rows`). Deeper heads leave no room for it in shared memory. The kernel of dk
    and dv needs no zeros, since k and v are no factors of its sums.

    Returns:
      a plan that knows of it, and operands with these keys and values; or both as they are.
    """
    if not (plan.has_dead_keys and zeroes_dead_keys(plan.head_dim, plan.v_head_dim)):
        return plan, operands
    seen = _find_seen_keys(plan, operands)[:, :, None, None]
    k, v = (jnp.where(seen, x, jnp.zeros_like(x)) for x in (operands.k, operands.v))
    return dataclasses.replace(plan, dead_keys_are_zero=True), operands._replace(k=k, v=v)


def _find_seen_keys(plan: FlashGpuPlan, operands: Operands) -> Bool[Array, "B S"]:
    """Find the keys that some query of their batch row attends to."""
    batch, (q_length, kv_length) = operands.q.shape[0], (plan.q_length, plan.kv_length)
    j = jnp.arange(kv_length, dtype=jnp.int32)[None, :]

    def visit(strip: jax.Array, seen: jax.Array) -> jax.Array:
        i = (strip * _STRIP_LENGTH + jnp.arange(_STRIP_LENGTH, dtype=jnp.int32))[:, None]
        allowed = jnp.asarray(plan.mask.allowed(i, j)) & (i < q_length)
        allowed = jnp.broadcast_to(allowed, (batch, 1, _STRIP_LENGTH, kv_length))[:, 0]
        if operands.segment_ids is not None:
            q_ids, kv_ids = operands.segment_ids
            ids = jnp.take(q_ids, i[:, 0], axis=1, mode="clip")
            allowed = allowed & (ids[:, :, None] == kv_ids[:, None, :])
        return seen | allowed.any(axis=1)

    strips = -(-q_length // _STRIP_LENGTH)
    found: jax.Array = lax.fori_loop(0, strips, visit, jnp.zeros((batch, kv_length), bool))
    return found
