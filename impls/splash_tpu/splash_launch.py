"""Launch a kernel body by `pallas_call`: build the grid, the block specs, and the scalars that select the blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.jax_compat import Ref, Scalar
from impls.pallas_tpu.tpu_tiles import DEFAULT_SCOPED, LANES, find_limit
from impls.splash_tpu.splash_plan import Depths, KernelCall, Layout, check_vmem
from impls.splash_tpu.splash_schedule import Steps
from impls.splash_tpu.splash_tiles import Step, parse_flags
from impls.varying_axes import find_varying_axes, mark_shapes_varying, mark_varying

# Heads of different batch rows have separate results, so they may run in parallel. Steps, and the heads of a group, add
# to the same scratch, so they may not.
_SEMANTICS: tuple[Literal["parallel", "arbitrary"], ...] = ("parallel", "arbitrary", "arbitrary")


class Inputs(NamedTuple):
    """Input arrays of a kernel, padded to whole blocks; inside the kernel, references to their blocks.

    Fields are None where not needed. Batch and heads are one axis, with query head `n` of row `b` at `b * N + n`, since
    every axis costs index arithmetic.
    """

    q: Any  # [B * N, T, H], or [B * N, H, T] with the sequence innermost
    k: Any  # [B * K, S, H], or [B * K, H, S] with the sequence innermost
    v: Any  # [B * K, S, V], or [B * K, V, S] with the sequence innermost
    q_ids: Any = None  # int32 [B, 1, T]
    kv_ids: Any = None  # int32 [B, 1, S]
    low: Any = None  # int32 [B, 1, T], the first key that each query sees, if masks are key ranges
    high: Any = None  # int32 [B, 1, T], one past the last key that each query sees
    sinks: Any = None  # f32 [N, 1, 128]
    do: Any = None  # [B * N, T, V]
    logsumexp: Any = None  # f32 [B * N, 1, T]
    row_sums: Any = None  # f32 [B * N, 1, T], `<out, do> - dlse`
    stored: Any = None  # int8 [X, block_q, block_kv], distinct mask blocks, transposed for dk and dv
    q_term: Any = None  # int32 [B * N, 1, T], words of the queries, if weights are dropped
    q_factor: Any = None  # int32 [B * N, 1, T]
    kv_term: Any = None  # int32 [1, 1, S], words of the keys
    kv_factor: Any = None  # int32 [1, 1, S]
    dq: Any = None  # f32 [B * N, T, H], zeros that the fused kernel adds to in place


class Outputs(NamedTuple):
    """Results of a kernel: arrays, or references to their blocks, as in `Inputs`."""

    out: Any = None  # [B * N, T, V]
    logsumexp: Any = None  # f32 [B * N, 1, T]
    max_logits: Any = None  # f32 [B * N, 1, T]
    dq: Any = None  # [B * N, T, H]
    dk: Any = None  # [B * K, S, H]
    dv: Any = None  # [B * K, S, V]


class _Scalars(NamedTuple):
    """Values that are prefetched to scalar memory before the kernel starts."""

    q: Any
    kv: Any
    flags: Any
    q_offset: Any
    head: Any = None
    place: Any = None


class _GridPlace(NamedTuple):
    """Grid indices of a program: head counted over all batch rows, step, head within its group."""

    row: Scalar
    step: Scalar
    in_group: Scalar


Body = Callable[[Step, Any, Inputs, Outputs, Any], None]


def launch(
    call: KernelCall, body: Body, steps: Steps, q_offset: Any, inputs: Inputs, outputs: Outputs, scratch: Any
) -> Outputs:
    """Run `body` on every step in the lists of one shard. Raises `ValueError` if the block sizes do not fit VMEM.

    `body` is called with the step, a function that reads the position of the first query, and references to the
    blocks. `q_offset` is the position of the shard's first query, int32 `[1]`.
    """
    limit = find_limit(call.plan.vmem_limit_bytes)
    need = check_vmem(
        call.phase,
        call.blocks,
        Depths(call.head_dim, call.head_dim_v, jnp.dtype(call.dtype).itemsize),
        stored_mask=inputs.stored is not None,
        limit=limit,
        fused=call.fused,
        ranged=call.ranged,
        dropout=call.plan.dropout_rate is not None,
    )
    place = _IndexMaps(call, steps)
    scalars = _Scalars(
        q=steps.q.reshape(-1),
        kv=steps.kv.reshape(-1),
        flags=steps.flags.reshape(-1),
        q_offset=q_offset,
        head=None if steps.head is None else steps.head.reshape(-1),
        place=None if steps.place is None else steps.place.reshape(-1),
    )
    scalars, inputs = mark_varying((scalars, inputs), find_varying_axes((scalars, inputs)))
    outputs = mark_shapes_varying(outputs, inputs.q)
    trees: list[tuple[list[Any], Any]] = [jax.tree.flatten(tree) for tree in (scalars, inputs, outputs, scratch)]
    counts = [len(leaves) for leaves, _ in trees]
    ends = np.cumsum(counts)

    def kernel(*refs: Ref) -> None:
        split = [refs[end - count : end] for count, end in zip(counts, ends, strict=True)]
        own, ins, outs, kept = (tree.unflatten(part) for (_, tree), part in zip(trees, split, strict=True))
        grid = _GridPlace(pl.program_id(0), pl.program_id(1), place.program_in_group())
        body(place.step(grid, own), lambda: own.q_offset[0], ins, outs, kept)

    in_specs = [place.spec(name, x) for name, x in inputs._asdict().items() if x is not None]
    out_specs = [place.spec(name, x) for name, x in outputs._asdict().items() if x is not None]
    fused = (counts[0] + _list_present(inputs).index("dq"), _list_present(outputs).index("dq")) if call.fused else None
    results = pl.pallas_call(
        kernel,
        out_shape=trees[2][0],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=counts[0],
            grid=place.grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=trees[3][0],
        ),
        input_output_aliases={} if fused is None else dict([fused]),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=_SEMANTICS[: len(place.grid)],
            # Requested only where needed: XLA cannot use this memory for the operations around the kernel.
            vmem_limit_bytes=limit.bytes if need > DEFAULT_SCOPED else None,
        ),
        cost_estimate=_estimate_cost(call, place, [*trees[1][0], *trees[2][0]]),
        interpret=call.plan.interpret,
        name=f"splash_{call.plan.variant}_{'dq_dkv' if call.fused else call.phase}",
    )(*trees[0][0], *trees[1][0])
    found: Outputs = trees[2][1].unflatten(results)
    return found


def _list_present(tree: Any) -> list[str]:
    return [name for name, x in tree._asdict().items() if x is not None]


class _IndexMaps:
    """Index maps: select the block of each array that a step of the grid needs."""

    def __init__(self, call: KernelCall, steps: Steps) -> None:
        _, self.lists_batch, self.lists_heads, self.length = steps.q.shape
        self.call = call
        self.by_kv = call.phase == "dkv"
        self.heads_listed = steps.head is not None
        self.group = call.plan.group
        # If all heads share one list, each step of dk and dv iterates over the query heads of the group.
        self.inner = self.group if self.by_kv and not self.heads_listed else 1
        self.heads = call.plan.num_kv_heads if self.by_kv else call.plan.num_q_heads
        steps_taken = self.length if steps.total is None else steps.total
        self.grid = (call.batch * self.heads, steps_taken) + ((self.inner,) if self.inner > 1 else ())

    def program_in_group(self) -> Any:
        return pl.program_id(2) if self.inner > 1 else 0

    def at(self, grid: _GridPlace) -> Any:
        """Compute the index of the step in the flattened lists."""
        if self.lists_batch == 1 and self.lists_heads == 1:
            return grid.step
        if self.lists_batch == 1:
            number = self._head(grid)
        elif self.lists_heads == 1:
            number = self._batch(grid)
        else:
            number = grid.row
        return number * self.length + grid.step

    def q_row(self, grid: _GridPlace, scalars: _Scalars) -> Any:
        """Compute the index of the query head, counted over all batch rows."""
        if not self.by_kv:
            return grid.row
        inside = grid.in_group if scalars.head is None else scalars.head[self.at(grid)].astype(jnp.int32)
        return grid.row * self.group + inside if self.group > 1 else grid.row

    def kv_row(self, grid: _GridPlace) -> Any:
        """Compute the index of the key/value head, counted over all batch rows."""
        return grid.row if self.by_kv or self.group == 1 else lax.div(grid.row, jnp.int32(self.group))

    def _batch(self, grid: _GridPlace) -> Any:
        return 0 if self.call.batch == 1 else lax.div(grid.row, jnp.int32(self.heads))

    def _head(self, grid: _GridPlace) -> Any:
        """Compute the head in the lists: a query head, or a key/value head for dk and dv."""
        return grid.row if self.call.batch == 1 else lax.rem(grid.row, jnp.int32(self.heads))

    def spec(self, name: str, x: Any) -> pl.BlockSpec:
        """Build the block spec of the array `name`."""
        call, blocks = self.call, self.call.blocks
        layouts = call.plan.layouts
        if name == "dq" and call.fused:
            return pl.BlockSpec(memory_space=pl.ANY)
        if name in ("q", "do", "out", "dq"):
            return self._tile(x, blocks.q, layouts.q if name == "q" else "head_dim_minor", of_queries=True)
        if name in ("k", "v", "dk", "dv"):
            layout: Layout = getattr(layouts, name) if name in ("k", "v") else "head_dim_minor"
            return self._tile(x, blocks.kv, layout, of_queries=False)
        if name in ("logsumexp", "row_sums", "max_logits", "q_term", "q_factor"):
            return self._spec((None, 1, blocks.q), lambda g, s: (self.q_row(g, s), 0, self._q(g, s)))
        if name in ("q_ids", "low", "high"):
            return self._spec((None, 1, blocks.q), lambda g, s: (self._batch(g), 0, self._q(g, s)))
        if name == "kv_ids":
            return self._spec((None, 1, blocks.kv), lambda g, s: (self._batch(g), 0, self._kv(g, s)))
        if name in ("kv_term", "kv_factor"):
            return self._spec((None, 1, blocks.kv), lambda g, s: (0, 0, self._kv(g, s)))
        if name == "sinks":  # only in the forward pass, where heads are query heads
            return self._spec((None, 1, LANES), lambda g, s: (self._head(g), 0, 0))
        return self._spec((None, *x.shape[1:]), lambda g, s: (s.place[self.at(g)].astype(jnp.int32), 0, 0))

    def _tile(self, x: Any, block: int, layout: Layout, *, of_queries: bool) -> pl.BlockSpec:
        def index(g: _GridPlace, s: _Scalars) -> tuple[Any, ...]:
            row = self.q_row(g, s) if of_queries else self.kv_row(g)
            number = self._q(g, s) if of_queries else self._kv(g, s)
            inner = (number, 0) if layout == "head_dim_minor" else (0, number)
            return (row, *inner)

        tile = (block, x.shape[2]) if layout == "head_dim_minor" else (x.shape[1], block)
        return self._spec((None, *tile), index)

    def step(self, g: _GridPlace, s: _Scalars) -> Step:
        """Read the scalars of a step."""
        call = self.call
        found = parse_flags(call, lambda: s.flags[self.at(g)].astype(jnp.int32), self.length)
        if self.inner > 1:
            opens, closes = g.in_group == 0, g.in_group == self.inner - 1
            found["first"] = opens if found["first"] is True else found["first"] & opens
            found["last"] = closes if found["last"] is True else found["last"] & closes
        computed = call.kinds.masked and s.place is None and not call.kinds.diagonals
        placed = computed or call.fused or call.plan.q_length % call.blocks.q
        q, kv = (self._q(g, s), self._kv(g, s)) if placed else (None, None)
        return Step(q=q, kv=kv, row=self.q_row(g, s), **found)

    def _q(self, g: _GridPlace, s: _Scalars) -> Any:
        return s.q[self.at(g)].astype(jnp.int32) if self.call.q_padded > self.call.blocks.q else 0

    def _kv(self, g: _GridPlace, s: _Scalars) -> Any:
        return s.kv[self.at(g)].astype(jnp.int32) if self.call.kv_padded > self.call.blocks.kv else 0

    def _spec(
        self, block: tuple[int | None, ...], index: Callable[[_GridPlace, _Scalars], tuple[Any, ...]]
    ) -> pl.BlockSpec:
        def index_map(row: Scalar, step: Scalar, *rest: Any) -> tuple[Any, ...]:
            in_group, scalars = (rest[0], rest[1:]) if self.inner > 1 else (0, rest)
            return index(_GridPlace(row, step, in_group), self._named(scalars))

        return pl.BlockSpec(block, index_map)

    def _named(self, scalars: tuple[Any, ...]) -> _Scalars:
        """Name the scalars. The last two are optional: heads, if each head has a list, and indices of mask blocks."""
        optional = list(scalars[4:])
        head = optional.pop(0) if self.heads_listed else None
        q, kv, flags, q_offset = scalars[:4]
        return _Scalars(q, kv, flags, q_offset, head, optional[0] if optional else None)


def _estimate_cost(call: KernelCall, place: _IndexMaps, arrays: list[Any]) -> pl.CostEstimate | None:
    """Estimate the cost of all steps, as if all of them computed; None if the grid is only known at run time."""
    if not all(isinstance(size, int | np.integer) for size in place.grid):
        return None
    pairs = math.prod(place.grid) * call.blocks.q * call.blocks.kv
    h, v = call.head_dim, call.head_dim_v
    depth = {"forward": h + v, "dq": 2 * h + v, "dkv": 2 * h + 2 * v + (h if call.fused else 0)}[call.phase]
    return pl.CostEstimate(
        flops=2 * pairs * depth,
        transcendentals=pairs * (1 if call.plan.soft_cap is None else 2),
        bytes_accessed=sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays),
    )
