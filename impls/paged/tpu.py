"""Paged attention for TPUs in Pallas: a grid step for each tile of queries, and pages that the kernel copies ahead.

Tables, tiles and blocks lie in scalar memory, pages and results in HBM. A step of the grid is one tile of queries, all
of one sequence (`impls.paged.schedule`), be it a part of a prompt or a single token. So the work follows the queries
and the keys that there are, and neither `max_seqs` nor `pages_per_seq`.

The kernel copies by itself what a pipeline cannot: the pages of a block, which lie anywhere (`impls.paged.copies`), and
as many rows of results as a tile has, for behind them are those of another sequence.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.merging import Part
from impls.paged.blocks import BUFFERS, LANES, Blocks, blocks_of, room_of_chip
from impls.paged.copies import Cache, Results
from impls.paged.kernel import Heads, compute_tile, rows_of
from impls.paged.plan import Operands, PagedPlan
from impls.paged.schedule import Tiles, tiles_of
from impls.varying import shapes_varying, varying_axes, varying_over


def attend(plan: PagedPlan, operands: Operands, *, interpret: Any) -> Part:
    """The part over every key that a query sees, arrays `[total_q, N, .]`; past the last sequence it is empty."""
    total, heads, depth = operands.q.shape
    depth_v = _depth_v(plan, operands)
    tiles = tiles_of(operands, plan.block_q)
    blocks = blocks_of(plan, operands, tiles)
    # As much longer as a tile that begins with the last query.
    q = jnp.pad(operands.q, ((0, plan.block_q), (0, 0), (0, 0)))
    scalars = (operands.page_indices.reshape(-1), *tiles[1:], *blocks)
    arrays = (q, *_pages(operands))
    scalars, arrays = varying_over((scalars, arrays), varying_axes((scalars, arrays)))
    kernel = functools.partial(_kernel, plan, operands.page_indices.shape[1], len(arrays) - 1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    of_tile = tuple(pl.Element(size) for size in (plan.block_q, heads, depth))
    out, statistics = pl.pallas_call(
        kernel,
        out_shape=shapes_varying([_f32((total, heads, width)) for width in (depth_v, LANES)], arrays[0]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles.total,),
            in_specs=[
                pl.BlockSpec(of_tile, lambda tile, table, sequence, row, *_: (row[tile], 0, 0)),
                *[anywhere] * len(arrays[1:]),
            ],
            out_specs=[anywhere] * 2,
            scratch_shapes=_scratch(plan, operands),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=room_of_chip().vmem),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, *arrays)
    there = (jnp.arange(total, dtype=jnp.int32) < operands.cu_q_lens[operands.num_seqs[0]])[:, None, None]
    return Part(
        out=jnp.where(there, out, 0.0),
        max=jnp.where(there, statistics[..., :1], -jnp.inf),
        sum=jnp.where(there, statistics[..., 1:2], 0.0),
    )


def _depth_v(plan: PagedPlan, operands: Operands) -> int:
    if operands.v_pages is not None:
        return int(operands.v_pages.shape[3])
    assert plan.value_dim is not None
    return plan.value_dim


def _pages(operands: Operands) -> tuple[jax.Array, ...]:
    """What is copied page by page. A latent has no axis of heads, so that its tokens fill tiles."""
    if operands.v_pages is None:
        return (operands.k_pages[:, :, 0],)
    scales = () if operands.page_scales is None else (operands.page_scales,)
    return operands.k_pages, operands.v_pages, *scales


def _scratch(plan: PagedPlan, operands: Operands) -> list[Any]:
    """Memory of the kernel, in the order of `_kernel`."""
    _, heads, depth = operands.q.shape
    _, page_size, num_kv_heads, _ = operands.k_pages.shape
    dtype = operands.q.dtype
    rows = rows_of(plan, plan.block_q, heads // num_kv_heads)
    block = plan.block_pages * page_size
    depth_v = _depth_v(plan, operands)
    if operands.v_pages is None:
        held = [pltpu.VMEM((BUFFERS, plan.block_pages, page_size, depth), dtype)]
        apart = []
    else:
        stored = operands.k_pages.dtype
        held = [pltpu.VMEM((BUFFERS, block, num_kv_heads, width), stored) for width in (depth, depth_v)]
        apart = [pltpu.VMEM((num_kv_heads, block, width), dtype) for width in (depth, depth_v)]
    if operands.page_scales is not None:
        lanes = operands.page_scales.shape[2]
        held.append(pltpu.VMEM((BUFFERS, plan.block_pages, page_size, lanes), jnp.float32))
        apart.append(pltpu.VMEM((lanes, block), jnp.float32))
    return [
        *held,
        pltpu.SemaphoreType.DMA((len(held), BUFFERS)),
        pltpu.VMEM((num_kv_heads, rows, depth), dtype),
        *(pltpu.VMEM((num_kv_heads, rows, width), jnp.float32) for width in (depth_v, LANES, LANES)),
        *apart,
        *(pltpu.VMEM((plan.block_q, heads, width), jnp.float32) for width in (depth_v, LANES)),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def _kernel(plan: PagedPlan, pages_per_seq: int, copied: int, page_indices: Any, *refs: Any) -> None:
    scalars, (q, *arrays) = refs[: _TILES + _BLOCKS], refs[_TILES + _BLOCKS :]
    pages, (out, statistics, *scratch) = arrays[:copied], arrays[copied:]
    held, (arrived, *heads, tile_out, tile_statistics, written) = scratch[:copied], scratch[copied:]
    steps: Any = pl.num_programs(0)
    compute_tile(
        plan,
        Tiles(steps, *scalars[:_TILES]),
        Blocks(*scalars[_TILES:]),
        q,
        Cache(page_indices, tuple(pages), tuple(held), arrived, pages_per_seq, plan.block_pages),
        Heads(*heads),
        Results((tile_out, tile_statistics), (out, statistics), written),
    )


_TILES = len(Tiles._fields) - 1
_BLOCKS = len(Blocks._fields)


def _f32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)  # type: ignore[no-untyped-call]  # JAX leaves it untyped
