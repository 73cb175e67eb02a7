"""Forward kernel for Hopper in Mosaic GPU: two warpgroups compute, a third fetches the tiles ahead of them.

The schedule is that of `impls.flash_gpu.schedule`: a program owns a block of queries of one head, half of it for each
computing warpgroup, and goes over the blocks of keys that the mask leaves it, full ones first. Tiles of k and v come by
TMA into a ring of shared memory; a slot is used again once both warpgroups have let go of it.

Sources: Shah et al. 2024, arXiv:2407.08608 (warp specialisation, asynchronous copies) and those of
`impls.flash_gpu.forward`.
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

from cases.masks import Dense, leaves
from impls.flash_gpu.block_sizes import Tiles
from impls.flash_gpu.forward import Outputs
from impls.flash_gpu.mosaic_tiles import (
    ROWS,
    Softmax,
    Span,
    accumulate,
    allowed,
    bent,
    hidden_rows,
    over_keys,
    product,
    weigh,
)
from impls.flash_gpu.operands import Operands
from impls.flash_gpu.schedule import KINDS, Plan, Visits
from impls.flash_gpu.tiles import exp, finite_or_zero
from impls.versions import mosaic_call

COMPUTING = 2
"""Warpgroups that compute; one more fetches."""
LANES = 64
"""Head depths are padded to a multiple: the widest swizzle, 128 bytes, of two-byte elements."""
SHARED_MEMORY = 227 * 1024
"""Bytes that a block may have on Hopper (CUDA C++ programming guide, "Compute capabilities")."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the kernel's tiles.

    Attributes:
      keys: keys a tile.
      slots: tiles of k and v in flight.
      head_dim: of q and k, padded.
      v_head_dim: of v, padded.
    """

    keys: int
    slots: int
    head_dim: int
    v_head_dim: int

    @property
    def queries(self) -> int:
        """Queries a program."""
        return COMPUTING * ROWS

    @property
    def tiles(self) -> Tiles:
        """As the schedule takes them."""
        return Tiles(block_q=self.queries, block_kv=self.keys)

    @property
    def shared_memory(self) -> int:
        """Bytes of the buffers of two-byte elements, which are all but a few hundred."""
        rows = self.queries * (self.head_dim + self.v_head_dim)
        ring = self.slots * self.keys * (self.head_dim + self.v_head_dim)
        return 2 * (rows + ring + COMPUTING * self.keys * self.v_head_dim)


def shape_of(plan: Plan) -> Shape:
    """Tiles for the depths of the problem: reasoned from shared memory and registers, timed on no GPU."""
    depths = (_up(plan.head_dim, LANES), _up(plan.v_head_dim, LANES))
    return Shape(128 if max(depths) <= LANES else 64, 2, *depths)


def limits(plan: Plan, operands: Operands) -> str | None:
    """What the kernel does not support of a call, or None if it supports all of it."""
    if operands.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q, k and v in {operands.q.dtype}: it multiplies bfloat16 and float16"
    if operands.bias is not None:
        return "bias"
    if any(isinstance(leaf, Dense) for leaf in leaves(plan.mask)):
        return "masks that are arrays, only those that are formulas"
    if (need := shape_of(plan).shared_memory) > SHARED_MEMORY - 4096:  # barriers, segments and reductions beside it
        return f"head depths {plan.head_dim} and {plan.v_head_dim}: tiles take {need} bytes of {SHARED_MEMORY}"
    return None


def forward(plan: Plan, operands: Operands) -> Outputs:
    """Attention of `operands`, with nothing in memory beyond operands, outputs and schedule.

    Operands whose lengths or depths no tile divides are padded first, with zeros.
    """
    shape = shape_of(plan)
    batch, q_length, num_q_heads, _ = operands.q.shape
    q_padded, kv_padded = _up(q_length, shape.queries), _up(plan.kv_length, shape.keys)
    inputs: dict[str, jax.Array] = {
        "q": _padded(operands.q, {1: q_padded, 3: shape.head_dim}),
        "k": _padded(operands.k, {1: kv_padded, 3: shape.head_dim}),
        "v": _padded(operands.v, {1: kv_padded, 3: shape.v_head_dim}),
    }
    table, blocks = _listed(plan.visits(shape.tiles, "q"))
    inputs |= {"table": jnp.asarray(table), "blocks": jnp.asarray(blocks)}
    inputs |= {name: jnp.asarray(array) for name, array in plan.mask_arrays.items()}
    if operands.sinks is not None:
        inputs["sinks"] = operands.sinks.astype(jnp.float32)
    if operands.segment_ids is not None:
        q_ids, kv_ids = operands.segment_ids
        inputs |= {"q_ids": _padded(q_ids, {1: q_padded}), "kv_ids": _padded(kv_ids, {1: kv_padded})}
    rows = jax.ShapeDtypeStruct((batch, num_q_heads, q_padded), jnp.float32)  # type: ignore[no-untyped-call] # JAX leaves it untyped
    out_shape = (batch, q_padded, num_q_heads, shape.v_head_dim)
    out, logsumexp, max_logits = mosaic_call(
        functools.partial(_program, plan, shape, tuple(inputs)),
        name="flash_gpu_mosaic_forward",
        grid={"block": q_padded // shape.queries, "head": num_q_heads, "batch": batch},
        warpgroups=COMPUTING + 1,
        outputs=(jax.ShapeDtypeStruct(out_shape, operands.q.dtype), rows, rows),  # type: ignore[no-untyped-call] # likewise
        scratch=_scratch(plan, shape, operands.q.dtype),
        interpret=plan.interpret,
    )(*inputs.values())
    return Outputs(out[:, :q_length, :, : plan.v_head_dim], logsumexp[:, :, :q_length], max_logits[:, :, :q_length])


def _scratch(plan: Plan, shape: Shape, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a program, by name."""
    swizzled = (plgpu.TilingTransform((8, LANES)), plgpu.SwizzleTransform(128))
    buffers = {
        "q_tile": (COMPUTING, ROWS, shape.head_dim),
        "out_tile": (COMPUTING, ROWS, shape.v_head_dim),
        "k_tile": (shape.slots, shape.keys, shape.head_dim),
        "v_tile": (shape.slots, shape.keys, shape.v_head_dim),
        "v_seen": (COMPUTING, shape.keys, shape.v_head_dim),
    }
    scratch: dict[str, Any] = {name: plgpu.SMEM(size, dtype, transforms=swizzled) for name, size in buffers.items()}
    scratch |= {name: plgpu.SMEM((COMPUTING, ROWS), jnp.float32) for name in ("logsumexp_tile", "max_tile")}
    ids = int(plan.segmented)
    if plan.segmented:
        scratch["q_ids_tile"] = plgpu.SMEM((COMPUTING, ROWS), jnp.int32)
        scratch["kv_ids_tile"] = plgpu.SMEM((shape.slots, shape.keys), jnp.int32)
    scratch["q_here"] = plgpu.Barrier(num_arrivals=1 + ids, num_barriers=COMPUTING)
    scratch["k_here"] = plgpu.Barrier(num_arrivals=1 + ids, num_barriers=shape.slots)
    scratch["v_here"] = plgpu.Barrier(num_barriers=shape.slots)
    scratch["free"] = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=shape.slots)
    return scratch


def _program(plan: Plan, shape: Shape, names: tuple[str, ...], *references: Any, **scratch: Any) -> None:
    """What the warpgroups of one program do; `references` are the inputs by `names`, then the outputs."""
    inputs = dict(zip(names, references[: len(names)], strict=True))
    out, logsumexp, max_logits = references[len(names) :]
    block, head, batch = (lax.axis_index(name) for name in ("block", "head", "batch"))
    warpgroup = lax.axis_index("warpgroup")
    visits = _Visits(plan, shape, inputs, scratch, block, head, batch)

    @pl.when(warpgroup == COMPUTING)
    def _fetch() -> None:
        plgpu.set_max_registers(40, action="decrease")
        visits.fetch()

    @pl.when(warpgroup < COMPUTING)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        q_start = block * shape.queries + warpgroup * ROWS
        softmax = visits.compute(warpgroup, q_start)
        scratch["max_tile"].at[warpgroup][...] = softmax.maximum
        if "sinks" in inputs:
            softmax = _with_sink(softmax, inputs["sinks"][head])
        some = softmax.total > 0
        total = jnp.where(some, softmax.total, 1.0)
        scratch["logsumexp_tile"].at[warpgroup][...] = jnp.where(some, softmax.maximum + jnp.log(total), -jnp.inf)
        tile = scratch["out_tile"].at[warpgroup]
        tile[...] = (softmax.out / over_keys(total, shape.v_head_dim)).astype(out.dtype)
        plgpu.commit_smem()  # type: ignore[no-untyped-call] # untyped upstream
        rows = pl.ds(q_start, ROWS)
        plgpu.copy_smem_to_gmem(tile, out.at[batch, rows, head])
        plgpu.copy_smem_to_gmem(scratch["logsumexp_tile"].at[warpgroup], logsumexp.at[batch, head, rows])
        plgpu.copy_smem_to_gmem(scratch["max_tile"].at[warpgroup], max_logits.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Visits:
    """The blocks of keys that one program visits, in order."""

    plan: Plan
    shape: Shape
    inputs: dict[str, Any]
    scratch: dict[str, Any]
    block: Any
    head: Any
    batch: Any

    def _line(self, column: int) -> Any:
        table = self.inputs["table"]
        batch, head = (at if size > 1 else 0 for at, size in zip((self.batch, self.head), table.shape[:2], strict=True))
        return table[batch, head, self.block, column]

    def _kv_start(self, step: Any) -> Any:
        return self.inputs["blocks"][self._line(0) + step] * self.shape.keys

    def _slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.shape.slots))

    def fetch(self) -> None:
        """Bring every tile, each into a slot that both computing warpgroups have let go of."""
        scratch, slots = self.scratch, jnp.int32(self.shape.slots)
        total = self._line(2)
        kv_head = lax.div(self.head, jnp.int32(self.plan.group))

        def step(at: Any, _: None) -> None:
            slot = self._slot(at)

            @pl.when(at >= slots)
            def _free() -> None:
                plgpu.barrier_wait(scratch["free"].at[slot])

            @pl.when(at < total)
            def _bring() -> None:
                keys = pl.ds(self._kv_start(at), self.shape.keys)
                k_here = scratch["k_here"].at[slot]
                plgpu.copy_gmem_to_smem(
                    self.inputs["k"].at[self.batch, keys, kv_head], scratch["k_tile"].at[slot], k_here
                )
                if self.plan.segmented:
                    plgpu.copy_gmem_to_smem(
                        self.inputs["kv_ids"].at[self.batch, keys], scratch["kv_ids_tile"].at[slot], k_here
                    )
                plgpu.copy_gmem_to_smem(
                    self.inputs["v"].at[self.batch, keys, kv_head],
                    scratch["v_tile"].at[slot],
                    scratch["v_here"].at[slot],
                )

        # The last turns only wait: a program does not end before its barriers are where they began.
        lax.fori_loop(jnp.int32(0), total + slots, step, None)

    def compute(self, warpgroup: Any, q_start: Any) -> Softmax:
        """The softmax of this warpgroup's queries over all blocks."""
        scratch, plan = self.scratch, self.plan
        q_here, rows = scratch["q_here"].at[warpgroup], pl.ds(q_start, ROWS)
        q = scratch["q_tile"].at[warpgroup]
        plgpu.copy_gmem_to_smem(self.inputs["q"].at[self.batch, rows, self.head], q, q_here)
        if plan.segmented:
            q_ids = scratch["q_ids_tile"].at[warpgroup]
            plgpu.copy_gmem_to_smem(self.inputs["q_ids"].at[self.batch, rows], q_ids, q_here)
        plgpu.barrier_wait(q_here)

        def visit(masked: bool, at: Any, softmax: Softmax) -> Softmax:
            slot = self._slot(at)
            plgpu.barrier_wait(scratch["k_here"].at[slot])
            z, _ = bent(plan, product(plan, q, scratch["k_tile"].at[slot], transposed=True))
            may = self._allowed(warpgroup, q_start, at, slot) if masked else None
            if may is not None:
                z = jnp.where(may(False), z, -jnp.inf)
            softmax, weights = weigh(softmax, z)
            plgpu.barrier_wait(scratch["v_here"].at[slot])
            v = scratch["v_tile"].at[slot]
            if may is not None:
                v_seen = scratch["v_seen"].at[warpgroup]
                v_seen[...] = hidden_rows(v[...], may(True))
                plgpu.commit_smem()  # type: ignore[no-untyped-call] # untyped upstream
                v = v_seen
            out = accumulate(plan, softmax.out, weights.astype(v.dtype), v)
            plgpu.barrier_arrive(scratch["free"].at[slot])
            return softmax._replace(out=out)

        softmax = Softmax(
            maximum=jnp.full((ROWS,), -jnp.inf, jnp.float32),
            total=jnp.zeros((ROWS,), jnp.float32),
            out=jnp.zeros((ROWS, self.shape.v_head_dim), jnp.float32),
        )
        full, total = self._line(1), self._line(2)
        kinds = plan.visits(self.shape.tiles, "q").lists
        if "full" in kinds:
            softmax = lax.fori_loop(jnp.int32(0), full, functools.partial(visit, False), softmax)
        if "partial" in kinds:
            softmax = lax.fori_loop(full, total, functools.partial(visit, True), softmax)
        return softmax

    def _allowed(self, warpgroup: Any, q_start: Any, at: Any, slot: Any) -> Callable[[bool], jax.Array]:
        """Booleans of a tile, as a function of whether keys come first."""
        span = Span(self.batch, q_start, self._kv_start(at), ROWS, self.shape.keys)
        ids = None
        if self.plan.segmented:
            ids = (self.scratch["q_ids_tile"].at[warpgroup], self.scratch["kv_ids_tile"].at[slot])

        def found(keys_first: bool) -> jax.Array:
            # Read anew for each order: a row of ids and a column of ids lie differently in the registers.
            here = None if ids is None else (ids[0][...], ids[1][...])
            return allowed(self.plan, self.inputs, span, here, keys_first=keys_first)

        return found


def _with_sink(old: Softmax, sink: Any) -> Softmax:
    """The softmax with the sink as one more term of the denominator."""
    maximum = jnp.maximum(old.maximum, sink)
    shift = finite_or_zero(maximum)
    decay = exp(old.maximum - shift)
    return Softmax(maximum, old.total * decay + exp(sink - shift), old.out * over_keys(decay, old.out.shape[1]))


@functools.lru_cache(maxsize=64)
def _listed(visits: Visits) -> tuple[np.ndarray, np.ndarray]:
    """The schedule with every block listed: `[b, n, programs, 3]` start, full blocks and all blocks; and the blocks.

    The fetching warpgroup reads an index ahead of time, so a list costs it nothing.
    """
    lines = visits.table.reshape(-1, 4)
    table, blocks, start = [], [], 0
    for line in lines:
        mine: list[int] = []
        for place, kind in enumerate(KINDS):
            first, count = int(line[2 * place]), int(line[2 * place + 1])
            listed = visits.lists.get(kind)
            mine += range(first, first + count) if listed is None else listed[first : first + count].tolist()
        table.append((start, int(line[1]), len(mine)))
        blocks += mine
        start += len(mine)
    return np.array(table, np.int32).reshape(*visits.table.shape[:3], 3), np.array(blocks or [0], np.int32)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(x: jax.Array, sizes: dict[int, int]) -> jax.Array:
    """`x` with zeros at the end of these axes, up to these sizes."""
    missing = [(0, sizes.get(axis, n) - n) for axis, n in enumerate(x.shape)]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x
