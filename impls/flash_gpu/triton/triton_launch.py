"""Launch of Triton kernels: the grid of programs, and the part of each array that a program sees.

A program sees one batch row, its heads, its block along the axis that it owns, and the whole other axis, of which it
loads tiles itself. A kernel that owns queries has one query head per program. The kernel that owns keys has one
key/value head per program, and sees all query heads of its group: query head `n` reads key/value head `n // group`. So
k and v are never copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from impls.block_arithmetic import make_shape
from impls.flash_gpu.block_sizes import Axis, Tiles
from impls.flash_gpu.flash_gpu_arrays import Operands
from impls.flash_gpu.packed_visits import KeyRanges, compute_visits
from impls.flash_gpu.tile_schedule import BLOCK_KINDS, BlockKind, FlashGpuPlan
from impls.jax_compat import Scalar, build_triton_call
from impls.varying_axes import find_varying_axes, mark_varying

Arrays = dict[str, Any]
Specs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Launch:
    """A grid of programs `(block along the axis, head, batch row)`; the fastest axis comes first.

    Attributes:
      plan: static part of the call.
      tiles: the kernel's tiles.
      axis: `"q"` if a program owns a block of queries of one query head, `"kv"` if it owns a block of keys of one
        key/value head and visits the query heads of its group.
      batch: number of batch rows.
    """

    plan: FlashGpuPlan
    tiles: Tiles
    axis: Axis
    batch: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of programs along each axis of the grid."""
        plan = self.plan
        if self.axis == "q":
            return -(-plan.q_length // self.tiles.block_q), plan.num_q_heads, self.batch
        return -(-plan.kv_length // self.tiles.block_kv), plan.num_kv_heads, self.batch

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of blocks that may occur: all kinds for packed sequences, whose masks are known at run time only."""
        return BLOCK_KINDS if self.plan.packed else tuple(self.plan.build_visits(self.tiles, self.axis).lists)

    @property
    def heads(self) -> int:
        """Query heads that a program sees."""
        return 1 if self.axis == "q" else self.plan.group

    @property
    def q_tail(self) -> int:
        """Number of queries, padded to whole blocks."""
        return -(-self.plan.q_length // self.tiles.block_q) * self.tiles.block_q

    @property
    def kv_tail(self) -> int:
        """Number of keys, padded to whole blocks."""
        return -(-self.plan.kv_length // self.tiles.block_kv) * self.tiles.block_kv

    @property
    def q_seen(self) -> int:
        """Queries that a program sees."""
        return self.tiles.block_q if self.axis == "q" else self.q_tail

    @property
    def kv_seen(self) -> int:
        """Keys that a program sees."""
        return self.tiles.block_kv if self.axis == "kv" else self.kv_tail

    def q_block(self, i: Scalar) -> Any:
        """Return which block of `q_seen` queries program `i` sees: `i` if it owns queries, else 0, as it sees all."""
        return i if self.axis == "q" else jnp.int32(0)

    def kv_block(self, i: Scalar) -> Any:
        """Return which block of `kv_seen` keys program `i` sees: `i` if it owns keys, else 0, as it sees all."""
        return i if self.axis == "kv" else jnp.int32(0)

    def kv_head(self, head: Scalar) -> Any:
        """Compute the key/value head of a program."""
        return lax.div(head, jnp.int32(self.plan.group)) if self.axis == "q" else head

    def inputs(self, operands: Operands) -> tuple[Arrays, Specs]:
        """Return the kernel's input arrays and their `BlockSpec`s, both by name.

        The inputs are the operands, the mask or the key ranges, and the schedule.
        """
        plan = self.plan
        arrays: Arrays = {"q": operands.q, "k": operands.k, "v": operands.v}
        specs: Specs = {
            "q": self.see_query_rows(plan.head_tile),
            "k": self._see_key_rows(plan.head_tile),
            "v": self._see_key_rows(plan.v_head_tile),
        }
        if operands.bias is not None:
            arrays["bias"], specs["bias"] = operands.bias, self.pairs(operands.bias.shape)
        if operands.segment_ids is not None:
            arrays["q_ids"], arrays["kv_ids"] = operands.segment_ids
            specs["q_ids"] = pl.BlockSpec((None, self.q_seen), lambda i, n, b: (b, self.q_block(i)))
            specs["kv_ids"] = pl.BlockSpec((None, self.kv_seen), lambda i, n, b: (b, self.kv_block(i)))
        more, seen = self._build_mask_inputs() if operands.ranges is None else self._build_range_inputs(operands.ranges)
        return arrays | more, specs | seen

    def _build_mask_inputs(self) -> tuple[Arrays, Specs]:
        """Build the inputs of a static mask: its arrays and its schedule."""
        plan = self.plan
        arrays: Arrays = {}
        specs: Specs = {}
        for name, array in plan.mask_arrays.items():
            arrays[name] = jnp.asarray(array)
            specs[name] = _see_whole(array) if array.ndim == 1 else self.pairs(array.shape)
        visits = plan.build_visits(self.tiles, self.axis)
        arrays["visits"], specs["visits"] = jnp.asarray(visits.table), self._see_program_line(visits.table.shape)
        for kind, blocks in visits.lists.items():
            if blocks is not None:
                arrays[f"{kind}_blocks"], specs[f"{kind}_blocks"] = jnp.asarray(blocks), _see_whole(blocks)
        return arrays, specs

    def _build_range_inputs(self, ranges: KeyRanges) -> tuple[Arrays, Specs]:
        """Build the inputs of packed sequences: key ranges and the schedule that follows from them."""
        visits = compute_visits(ranges, self.tiles, self.axis, self.plan.kv_length)
        table, queries = visits.table[None, None], pl.BlockSpec((self.q_seen,), lambda i, n, b: (self.q_block(i),))
        return (
            {"low": ranges.low, "high": ranges.high, "visits": table, "partial_blocks": visits.partial},
            {
                "low": queries,
                "high": queries,
                "visits": self._see_program_line(table.shape),
                "partial_blocks": _see_whole(visits.partial),
            },
        )

    def see_query_rows(self, columns: int) -> Any:
        """Return the `BlockSpec` of an array `[B, T, N, .]`: the queries and heads that a program sees."""
        return pl.BlockSpec(
            (None, self.q_seen, self.heads, columns), lambda i, n, b: (b, self.q_block(i), n, jnp.int32(0))
        )

    def see_query_scalars(self) -> Any:
        """Return the `BlockSpec` of an array `[B, N, T]`: the heads and queries that a program sees."""
        return pl.BlockSpec((None, self.heads, self.q_seen), lambda i, n, b: (b, n, self.q_block(i)))

    def see_head_scalars(self) -> Any:
        """Return the `BlockSpec` of an array `[N]`: one value for each head that a program sees."""
        return pl.BlockSpec((self.heads,), lambda i, n, b: (n,))

    def pairs(self, shape: tuple[int, ...]) -> Any:
        """Return the `BlockSpec` of an array `[B or 1, N or 1, T or 1, S or 1]`: the pairs that a program sees.

        Axes of size 1 are broadcast.
        """
        block = (
            None,
            1 if shape[1] == 1 else self.heads,
            1 if shape[2] == 1 else self.q_seen,
            1 if shape[3] == 1 else self.kv_seen,
        )

        def index(i: Scalar, n: Scalar, b: Scalar) -> Any:
            at = (b, n, self.q_block(i), self.kv_block(i))
            return tuple(place if size > 1 else jnp.int32(0) for place, size in zip(at, shape, strict=True))

        return pl.BlockSpec(block, index)

    def _see_key_rows(self, columns: int) -> Any:
        return pl.BlockSpec(
            (None, self.kv_seen, None, columns), lambda i, n, b: (b, self.kv_block(i), self.kv_head(n), jnp.int32(0))
        )

    def _see_program_line(self, shape: tuple[int, ...]) -> Any:
        """Return the `BlockSpec` of the table of visits: the row of the program."""

        def index(i: Scalar, n: Scalar, b: Scalar) -> Any:
            zero = jnp.int32(0)
            return b if shape[0] > 1 else zero, n if shape[1] > 1 else zero, i, zero

        return pl.BlockSpec((None, 1 if shape[1] == 1 else self.heads, None, shape[3]), index)

    def __call__(
        self,
        name: str,
        kernel: Callable[[Arrays, Arrays], None],
        arrays: Arrays,
        specs: Specs,
        out_shapes: Arrays,
        out_specs: Specs,
    ) -> Arrays:
        """Run `kernel(inputs, outputs)` in every program.

        Args:
          name: name of the kernel in profiles.
          kernel: function that reads and writes references by name.
          arrays: inputs by name.
          specs: the part of each input that a program sees.
          out_shapes: shape and dtype of each output.
          out_specs: the part of each output that a program sees.
        """
        # `shard_map` checks over which mesh axes arrays vary: constants and outputs must name the operands' axes.
        arrays = mark_varying(arrays, find_varying_axes(arrays))
        varying = jax.typeof(arrays["q"]).manual_axis_type
        out_shapes = {name: make_shape(x.shape, x.dtype, varying) for name, x in out_shapes.items()}
        return build_triton_call(
            kernel,
            name=name,
            grid=self.grid,
            in_specs=specs,
            out_shapes=out_shapes,
            out_specs=out_specs,
            num_warps=self.tiles.num_warps,
            num_stages=self.tiles.num_stages,
            interpret=bool(self.plan.interpret),
        )(arrays)


def _see_whole(array: np.ndarray | jax.Array) -> Any:
    return pl.BlockSpec(array.shape, lambda i, n, b: tuple(jnp.int32(0) for _ in array.shape))
