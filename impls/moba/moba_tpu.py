"""Forward and backward pass of MoBA in Pallas for TPU, with a grid step for each block of rows and its chunk.

The formulas are those of `impls.moba.forward` and `impls.moba.backward`. The grid has as many steps as there are
blocks. The index of each block's chunk is prefetched to scalar memory. Blocks of one chunk follow one another, so the
chunk's keys and values are fetched only once. For the same reason dk and dv of the chunk stay in VMEM until its last
block has added to them.

Inside a grid step, the keys of the chunk are computed several at a time, as many as fit into VMEM. The loop stops at
the last key that any row of the block sees. Keys that every row sees need no mask: keys are hidden only in a query's
own chunk. As in `impls.splash_tpu.forward`, logits and maxima are in units of log 2, l is kept separately for each
vector lane until the end, and m starts at a finite value.

Rows are gathered before the kernel, as for a grouped matrix product (Gale et al. 2022, arXiv:2211.15841).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.block_arithmetic import LN_2, make_shape, multiply_tiles
from impls.jax_compat import Ref, Scalar
from impls.moba.moba_blocks import BlockSoftmax, GradientSums, Lanes
from impls.moba.moba_plan import MobaPlan, MobaWork
from impls.pallas_tpu.tpu_tiles import (
    DEFAULT_SCOPED,
    EMPTY_MAXIMUM,
    LANES,
    find_limit,
    make_column,
    repeat_lanes,
    round_up,
    sum_by_lane,
)
from impls.varying_axes import find_varying_axes, mark_shapes_varying, mark_varying

Array = jax.Array
MIN_ROWS = 64
"""Smallest number of queries per block: with fewer, fetching a chunk takes longer than computing with it."""


class _Steps(NamedTuple):
    """Schedule of the kernels by block, int32. The first three fields are in scalar memory."""

    bins: Array  # [blocks], bin (chunk of a key/value head) of each block
    seen: Array  # [blocks], number of keys of the chunk that every row sees
    some: Array  # [blocks], number of keys of the chunk that some row sees
    last: Array  # [blocks, 1, block_rows], the last key of the chunk that each row sees


def compute_parts(plan: MobaPlan, lanes: Lanes, work: MobaWork) -> BlockSoftmax:
    """Compute attention of each block's rows to its chunk, not normalised. Blocks not in use hold arbitrary values."""
    steps, room = _build_steps(plan, work), _find_room(plan, *_get_sizes(lanes), backward=False)
    q = lanes.q.at[work.rows].get(mode="fill", fill_value=0)  # [blocks, r, H]
    rows, depth = plan.block_rows, lanes.v.shape[-1]
    out, maximum, total = _call_kernel(
        functools.partial(_forward_kernel, plan, room.keys),
        plan,
        room,
        steps,
        work.in_use,
        (*_pair_with_blocks(q, steps.last), *_pair_with_bins(*(room.padded(x) for x in (lanes.k, lanes.v)))),
        (_see_block((rows, depth)), _see_block((1, rows)), _see_block((1, rows))),
        [(plan.most_blocks, rows, depth), *[(plan.most_blocks, 1, rows)] * 2],
        "moba_forward",
    )
    maximum = maximum[:, 0]
    return BlockSoftmax(jnp.where(maximum == EMPTY_MAXIMUM, -jnp.inf, maximum * jnp.float32(LN_2)), total[:, 0], out)


def sum_gradients(
    plan: MobaPlan, lanes: Lanes, work: MobaWork, d_outs: Array, logsumexp: Array, row_sums: Array
) -> GradientSums:
    """Sum the gradients over all blocks; dq and dk are not yet scaled.

    `d_outs` is `[L R, V]`, `logsumexp` and `row_sums` (`D - dlse`) are f32 `[L R]`.
    """
    steps, room = _build_steps(plan, work), _find_room(plan, *_get_sizes(lanes), backward=True)
    q, do = (x.at[work.rows].get(mode="fill", fill_value=0) for x in (lanes.q, d_outs))
    # An infinite logsumexp makes the probabilities of padding rows zero.
    lse = logsumexp.at[work.rows].get(mode="fill", fill_value=jnp.inf)[:, None] / jnp.float32(LN_2)
    delta = row_sums.at[work.rows].get(mode="fill", fill_value=0)[:, None]
    k, v = room.padded(lanes.k), room.padded(lanes.v)
    rows, depths = plan.block_rows, (q.shape[-1], v.shape[-1])
    dq, dk, dv = _call_kernel(
        functools.partial(_backward_kernel, plan, room.keys),
        plan,
        room,
        steps,
        work.in_use,
        (*_pair_with_blocks(q, do, lse, delta, steps.last), *_pair_with_bins(k, v)),
        (_see_block((rows, depths[0])), *(_see_bin((k.shape[1], depth)) for depth in depths)),
        [(plan.most_blocks, rows, depths[0]), k.shape, v.shape],
        "moba_backward",
    )
    chunk, number = plan.moba.chunk, jnp.where(jnp.arange(plan.most_blocks) < work.in_use, work.bins, plan.bins)
    taken = jnp.zeros(plan.bins, bool).at[number].set(True, mode="drop")[:, None, None]
    dk, dv = (jnp.where(taken, x[:, :chunk], 0.0) for x in (dk, dv))  # never written for chunks that no row selected
    return GradientSums(dq, dk, dv, None)


def _build_steps(plan: MobaPlan, work: MobaWork) -> _Steps:
    chunk = plan.moba.chunk
    start = work.bins % plan.chunks * chunk
    spare = work.rows == plan.lanes * plan.rows
    last = jnp.minimum(plan.position[work.rows % plan.rows] - start[:, None], chunk - 1)
    # Padding rows must not restrict what every row sees; their results are never read.
    last = jnp.where(spare, chunk - 1, last)
    some = jnp.where(spare, -1, last).max(axis=1) + 1
    return _Steps(work.bins, last.min(axis=1) + 1, some, last[:, None])


def _get_sizes(lanes: Lanes) -> tuple[tuple[int, int], int]:
    """Return the depths of keys and values, and bytes per element."""
    return (lanes.k.shape[2], lanes.v.shape[2]), lanes.k.dtype.itemsize


class _VmemRoom(NamedTuple):
    """The number of keys that are computed at once, and the VMEM bytes to request, None for the default amount."""

    keys: int
    vmem: int | None

    def padded(self, x: Array) -> Array:
        """Pad keys or values `[bins, chunk, D]` with zeros, so that a chunk is a multiple of the keys per step."""
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % self.keys), (0, 0)))


def fit_block_rows(plan: MobaPlan, depths: tuple[int, int], itemsize: int) -> MobaPlan:
    """Halve `plan`'s queries per block until both passes fit VMEM. Raises `NotImplementedError` if no size fits."""
    while True:
        try:
            _find_room(plan, depths, itemsize, backward=True)
        except NotImplementedError:
            if plan.most_rows <= MIN_ROWS:
                raise
            plan = dataclasses.replace(plan, most_rows=plan.most_rows // 2)
        else:
            return plan


def _find_room(plan: MobaPlan, depths: tuple[int, int], itemsize: int, *, backward: bool) -> _VmemRoom:
    """Halve the keys to compute at once until they fit VMEM. Raises `NotImplementedError` if no number fits."""
    limit = find_limit(None)
    keys = min(plan.keys_together, round_up(plan.moba.chunk, LANES))
    while (need := _estimate_vmem(plan, depths, itemsize, keys, backward=backward)) > limit.bytes and keys > LANES:
        keys = keys // 2 // LANES * LANES or LANES
    if need > limit.bytes:
        raise NotImplementedError(
            f"moba does not support chunks of {plan.moba.chunk} keys and blocks of {plan.block_rows} queries with "
            f"backend='tpu' at head_dim {depths[0]} and {depths[1]}: they take about {need / 2**20:.1f} MiB of VMEM, "
            f"over the limit of {limit.bytes / 2**20:.1f} MiB ({limit.of}); take backend='portable'"
        )
    return _VmemRoom(keys, limit.bytes if need > DEFAULT_SCOPED else None)


def _estimate_vmem(plan: MobaPlan, depths: tuple[int, int], item: int, keys: int, *, backward: bool) -> int:
    """Estimate a kernel's VMEM in bytes. Blocks count twice, since the next are prefetched; a step's values, once."""
    h, v = (round_up(depth, LANES) for depth in depths)
    rows, chunk = plan.block_rows, round_up(plan.moba.chunk, keys)
    fetched = (rows * h + chunk * (h + v)) * item
    # Operands of exact f32 products are split into three bf16 parts.
    split = 6 * ((rows + keys) * (h + v) + (1 + backward) * rows * keys) if item == 4 else 0
    if backward:
        blocks = fetched + rows * v * item + (rows * h + chunk * (h + v)) * 4
        return 2 * blocks + split + (rows * (h + 3 * LANES) + 4 * rows * keys + keys * (h + v)) * 4
    return 2 * (fetched + rows * v * 4) + split + (rows * (v + 3 * LANES) + 3 * rows * keys) * 4


def _see_block(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda number, *_: (number, 0, 0))


def _see_bin(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda number, bins, *_: (bins[number], 0, 0))


def _pair_with_blocks(*arrays: Array) -> list[tuple[Array, pl.BlockSpec]]:
    return [(x, _see_block(x.shape[1:])) for x in arrays]


def _pair_with_bins(*arrays: Array) -> list[tuple[Array, pl.BlockSpec]]:
    return [(x, _see_bin(x.shape[1:])) for x in arrays]


def _call_kernel(
    kernel: Callable[..., None],
    plan: MobaPlan,
    room: _VmemRoom,
    steps: _Steps,
    blocks: Array,
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    out_specs: Sequence[pl.BlockSpec],
    shapes: Sequence[tuple[int, ...]],
    name: str,
) -> Any:
    """Run the kernel with a grid of `blocks` steps; results are f32 with these `shapes`."""
    scalars: Any = steps[:3]
    arrays: Any = tuple(x for x, _ in inputs)
    scalars, arrays = mark_varying((scalars, arrays), find_varying_axes((scalars, arrays)))
    return pl.pallas_call(
        kernel,
        out_shape=mark_shapes_varying([make_shape(shape, jnp.float32) for shape in shapes], arrays[0]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(blocks,),
            in_specs=[spec for _, spec in inputs],
            out_specs=list(out_specs),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=room.vmem),
        interpret=plan.interpret,
        name=name,
    )(*scalars, *arrays)


def _forward_kernel(
    plan: MobaPlan,
    size: int,
    bins_ref: Ref,
    seen_ref: Ref,
    some_ref: Ref,
    q_ref: Ref,
    last_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    out_ref: Ref,
    max_ref: Ref,
    sum_ref: Ref,
) -> None:
    number, rows = pl.program_id(0), q_ref.shape[0]
    last = make_column(last_ref[...])  # [rows, LANES]

    def add(step: Scalar, so_far: tuple[Array, Array, Array], *, masked: bool) -> tuple[Array, Array, Array]:
        out, top, total = so_far  # [rows, V], [rows, LANES] twice
        keys = pl.ds(pl.multiple_of(step * size, size), size)
        z, _ = _compute_logits(plan, q_ref[...], k_ref[keys, :], step * size, last if masked else None)
        now = jnp.maximum(top, z.max(axis=-1, keepdims=True))  # the maximum m, equation (4)
        weights = jnp.exp2(z - repeat_lanes(now, size))  # [rows, size]
        decay = jnp.exp2(top - now)
        v = v_ref[keys, :]  # [size, V]
        added = _multiply(plan, weights.astype(v.dtype), v, (1, 0))
        # The sum in equation (6), the maximum m, and the softmax sum l, equation (5).
        return out * repeat_lanes(decay, v.shape[1]) + added, now, total * decay + sum_by_lane(weights)

    none = (
        jnp.zeros(out_ref.shape, jnp.float32),
        jnp.full((rows, LANES), EMPTY_MAXIMUM, jnp.float32),
        jnp.zeros((rows, LANES), jnp.float32),
    )
    out, top, total = _visit_keys(size, seen_ref[number], some_ref[number], add, none)
    out_ref[...] = out
    max_ref[...] = top.T[:1]
    sum_ref[...] = total.T.sum(axis=0, keepdims=True)


def _backward_kernel(
    plan: MobaPlan,
    size: int,
    bins_ref: Ref,
    seen_ref: Ref,
    some_ref: Ref,
    q_ref: Ref,
    do_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    last_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    dq_ref: Ref,
    dk_ref: Ref,
    dv_ref: Ref,
) -> None:
    number = pl.program_id(0)
    opens = (number == 0) | (bins_ref[jnp.maximum(number - 1, 0)] != bins_ref[number])

    @pl.when(opens)
    def clear() -> None:
        for ref in (dk_ref, dv_ref):
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    last, lse, delta = (make_column(ref[...]) for ref in (last_ref, lse_ref, delta_ref))  # [rows, LANES]

    def add(step: Scalar, dq: Array, *, masked: bool) -> Array:
        keys = pl.ds(pl.multiple_of(step * size, size), size)
        q, k, v, do = q_ref[...], k_ref[keys, :], v_ref[keys, :], do_ref[...]
        z, slope = _compute_logits(plan, q, k, step * size, last if masked else None)
        p = jnp.exp2(z - repeat_lanes(lse, size))  # probabilities, equation (8)
        dx = p * (_multiply(plan, do, v, (1, 1)) - repeat_lanes(delta, size))  # equations (10) and (12)
        if slope is not None:
            dx = dx * slope  # through the soft cap, equation (13)
        rounded = dx.astype(q.dtype)
        dk_ref[keys, :] += _multiply(plan, rounded, q, (0, 0))  # dk, equation (15), not yet scaled
        dv_ref[keys, :] += _multiply(plan, p.astype(q.dtype), do, (0, 0))  # dv, equation (9)
        return dq + _multiply(plan, rounded, k, (1, 0))  # dq, equation (14), not yet scaled

    dq = jnp.zeros(dq_ref.shape, jnp.float32)  # [rows, H]
    dq_ref[...] = _visit_keys(size, seen_ref[number], some_ref[number], add, dq)


def _visit_keys(size: int, seen: Any, some: Any, add: Callable[..., Any], start: Scalar) -> Any:
    """Call `add` for `size` keys at a time: first, unmasked, for keys that every row sees, then for the others."""
    every, steps = lax.div(seen, jnp.int32(size)), lax.div(some + (size - 1), jnp.int32(size))
    so_far = lax.fori_loop(jnp.int32(0), every, functools.partial(add, masked=False), start)
    return lax.fori_loop(every, steps, functools.partial(add, masked=True), so_far)


def _compute_logits(
    plan: MobaPlan, q: Array, k: Array, first: Scalar, last: Array | None
) -> tuple[Array, Array | None]:
    """Compute the logits z in units of log 2, `[r, size]`, and the derivative of the soft cap.

    These are equations (1) to (3) of `impls.moba.moba_blocks`. If `last` is None, no logit is masked.
    """
    x = _multiply(plan, q, k, (1, 1))
    slope = None
    if plan.soft_cap is None:
        z = x * jnp.float32(plan.scale / LN_2)  # the scaled logits x, equation (1)
    else:
        tanh = jnp.tanh(x * jnp.float32(plan.scale / plan.soft_cap))
        z, slope = tanh * jnp.float32(plan.soft_cap / LN_2), 1 - tanh * tanh  # soft cap, equation (2)
    if last is not None:
        place = lax.broadcasted_iota(jnp.int32, z.shape, 1) + first
        z = jnp.where(place <= repeat_lanes(last, z.shape[1]), z, -jnp.inf)  # mask, equation (3)
    return z, slope


def _multiply(plan: MobaPlan, a: Array, b: Array, over: tuple[int, int]) -> Array:
    return multiply_tiles(a, b, over, widen=bool(plan.interpret))
