"""Decode attention for GPUs in Pallas (Triton): the keys of a sequence are split over programs, and merged at the end.

One query token has too few rows to fill a GPU, but a long cache has enough keys (Dao, Haziza, Massa and Sizov 2023,
"Flash-Decoding"). A program owns a share of the blocks that hold a key of its sequence. So shares of a sequence are
equal whatever its length is, and a program without a share ends at once. The cache is read in place, `[B, S, K, .]`.

A program computes equations (1) to (6) of `impls/__init__.py` over the keys of its split, without sink and division.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from impls.block_arithmetic import compute_exp, make_shape, multiply_tiles, replace_neg_inf
from impls.jax_compat import Scalar, build_triton_call
from impls.pallas_gpu.triton_tiles import (
    compute_positions,
    find_seen_keys,
    load_rows,
    round_up_to_tile,
    store_rows,
    store_values,
    zero_hidden_rows,
)
from impls.ragged.ragged_plan import Operands, RaggedPlan, compute_allowed, compute_logits, find_block_range
from impls.softmax_merge import Part, merge_axis
from impls.varying_axes import find_varying_axes, mark_varying

MAX_ROWS = 64
"""Largest number of rows per tile, so that the accumulator stays in registers. Further rows get further programs."""

# About two programs per multiprocessor, of which GPUs have 108 to 148.
_NUM_PROGRAMS = 256

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launch:
    """A grid of programs `(split and tile of rows, key/value head, batch row)`."""

    plan: RaggedPlan
    block: int
    tile: int
    splits: int
    rows: int
    depth: int
    v_depth: int

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile)

    @property
    def kv_tail(self) -> int:
        """Number of keys, padded to whole blocks."""
        return -(-self.plan.kv_length // self.block) * self.block

    def place(self, number: Scalar) -> tuple[Any, Any]:
        """Compute the split and the tile of rows of a program."""
        return lax.div(number, jnp.int32(self.row_tiles)), lax.rem(number, jnp.int32(self.row_tiles))

    def of_keys(self, columns: int) -> pl.BlockSpec:
        """Return the `BlockSpec` of an array `[B, S, K, .]`: all keys of the program's head."""
        return pl.BlockSpec((None, self.kv_tail, None, columns), lambda i, h, b: (b, jnp.int32(0), h, jnp.int32(0)))

    def of_parts(self, *columns: int) -> pl.BlockSpec:
        """Return the `BlockSpec` of an array `[B, K, splits, R, (.)]`: the program's rows of its split."""

        def index(i: Scalar, h: Scalar, b: Scalar) -> tuple[Any, ...]:
            split, rows = self.place(i)
            return (b, h, split, rows, *(jnp.int32(0) for _ in columns))

        return pl.BlockSpec((None, None, None, self.tile, *columns), index)


def attend(plan: RaggedPlan, operands: Operands, *, block_kv: int, num_splits: int | None, interpret: bool) -> Part:
    """Attend to every key that exists; the part has arrays `[B, K, R, .]`.

    Args:
      block_kv: keys per tile, a power of two of at least 16; clipped to the cache.
      num_splits: programs that share a sequence; by default as many as fill the GPU.
    """
    launch = _build_launch(plan, operands, block_kv, num_splits)
    batch, num_kv_heads = operands.q.shape[:2]
    first, count = find_block_range(plan, operands.lengths, operands.positions, launch.block)
    arrays: Arrays = operands._asdict() | {"first": first, "count": count}
    whole = pl.BlockSpec((batch,), lambda i, h, b: (jnp.int32(0),))
    rows = pl.BlockSpec(
        (None, None, launch.row_tiles * launch.tile, round_up_to_tile(launch.depth)),
        lambda i, h, b: (b, h, jnp.int32(0), jnp.int32(0)),
    )
    keys = {"k": launch.of_keys(round_up_to_tile(launch.depth)), "v": launch.of_keys(round_up_to_tile(launch.v_depth))}
    # `shard_map` checks over which mesh axes arrays vary: outputs must name the operands' axes.
    arrays = mark_varying(arrays, find_varying_axes(arrays))
    varying = jax.typeof(arrays["q"]).manual_axis_type
    parts = (batch, num_kv_heads, launch.splits, launch.rows)
    found = build_triton_call(
        functools.partial(_kernel, launch),
        name="ragged_decode",
        grid=(launch.splits * launch.row_tiles, num_kv_heads, batch),
        in_specs=dict.fromkeys(("lengths", "positions", "first", "count"), whole) | {"q": rows} | keys,
        out_shapes={
            "out": make_shape((*parts, launch.v_depth), jnp.float32, varying),
            "max": make_shape(parts, jnp.float32, varying),
            "sum": make_shape(parts, jnp.float32, varying),
        },
        out_specs={
            "out": launch.of_parts(round_up_to_tile(launch.v_depth)),
            "max": launch.of_parts(),
            "sum": launch.of_parts(),
        },
        num_warps=4,
        num_stages=2,
        interpret=interpret,
    )(arrays)
    return merge_axis(Part(found["out"], found["max"][..., None], found["sum"][..., None]), axis=2)


def _build_launch(plan: RaggedPlan, operands: Operands, block_kv: int, num_splits: int | None) -> _Launch:
    batch, num_kv_heads, rows, depth = operands.q.shape
    block, tile = min(block_kv, round_up_to_tile(plan.kv_length)), min(MAX_ROWS, round_up_to_tile(rows))
    wanted = -(-_NUM_PROGRAMS // (batch * num_kv_heads * -(-rows // tile))) if num_splits is None else num_splits
    most = -(-plan.kv_length // block)
    return _Launch(
        plan=plan,
        block=block,
        tile=tile,
        splits=max(1, min(wanted, most)),
        rows=rows,
        depth=depth,
        v_depth=operands.v.shape[3],
    )


def _kernel(launch: _Launch, inputs: Arrays, outputs: Arrays) -> None:
    """Compute the part over one split's share of the blocks of one sequence."""
    plan, tile = launch.plan, launch.tile
    (split, row_tile), batch = launch.place(pl.program_id(0)), pl.program_id(2)
    length, position = inputs["lengths"][batch], inputs["positions"][batch]
    first, count = inputs["first"][batch], inputs["count"][batch]
    share = lax.div(count + jnp.int32(launch.splits - 1), jnp.int32(launch.splits))
    begin, end = split * share, jnp.minimum((split + 1) * share, count)
    start = row_tile * tile
    q = load_rows(inputs["q"], start, tile, launch.rows, launch.depth)  # [tile, H]
    # Padding rows see the same keys as the last query. So they see no key that all real queries ignore.
    t = jnp.minimum(lax.div(compute_positions(start, tile), jnp.int32(plan.group)), plan.q_length - 1)
    i = (position + t)[:, None]  # [tile, 1]

    def visit(number: Scalar, old: Part) -> Part:
        kv_start = (first + number) * launch.block
        k = load_rows(inputs["k"], kv_start, launch.block, plan.kv_length, launch.depth)  # [block, H]
        v = load_rows(inputs["v"], kv_start, launch.block, plan.kv_length, launch.v_depth)  # [block, V]
        found = compute_allowed(plan, length, i, compute_positions(kv_start, launch.block)[None, :])  # [tile, block]
        z = jnp.where(
            found, compute_logits(plan, multiply_tiles(q, k, (1, 1))), -jnp.inf
        )  # masked logits, equations (1) to (3)
        top = jnp.maximum(old.max, jnp.max(z, axis=1))  # maximum, equation (4)
        shift = replace_neg_inf(top)
        weights, decay = compute_exp(z - shift[:, None]), compute_exp(old.max - shift)
        # Values that no query sees may be NaN, and 0 * NaN is not 0.
        out = multiply_tiles(weights.astype(v.dtype), zero_hidden_rows(v, find_seen_keys(found)), (1, 0))
        return Part(
            out=old.out * decay[:, None] + out,  # weighted sum of values, equation (6)
            max=top,
            sum=old.sum * decay + jnp.sum(weights, axis=1),  # sum of weights, equation (5)
        )

    part = Part(
        out=jnp.zeros((tile, round_up_to_tile(launch.v_depth)), jnp.float32),
        max=jnp.full((tile,), -jnp.inf, jnp.float32),
        sum=jnp.zeros((tile,), jnp.float32),
    )
    part = lax.fori_loop(begin, end, visit, part)
    store_rows(outputs["out"], start, part.out, launch.rows, launch.v_depth)
    store_values(outputs["max"], start, part.max, launch.rows)
    store_values(outputs["sum"], start, part.sum, launch.rows)
