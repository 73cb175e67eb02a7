"""Paged attention for TPUs in Pallas: a grid step per tile of queries, and pages that the kernel prefetches itself.

Tables, tiles and blocks lie in scalar memory, pages and results in HBM. A step of the grid is one tile of queries, all
of one sequence (`impls.paged.query_tiles`): a part of a prompt or a single token. So the work grows with the actual
queries and keys, not with `max_seqs` and `pages_per_seq`.

The kernel itself copies two things that a pipeline cannot copy (`impls.paged.page_copies`). The pages of a block may
lie anywhere. A tile may have fewer than `block_q` rows of results, and the rows after them belong to another sequence.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from impls.block_arithmetic import make_shape
from impls.jax_compat import Interpret, Ref
from impls.paged.page_blocks import LANES, NUM_BUFFERS, PageBlocks, build_blocks, find_chip_room
from impls.paged.page_copies import PageCache, Results
from impls.paged.paged_kernel import HeadRefs, compute_tile, count_rows
from impls.paged.paged_plan import Operands, PagedPlan
from impls.paged.query_tiles import QueryTiles, build_tiles
from impls.softmax_merge import Part
from impls.varying_axes import find_varying_axes, mark_shapes_varying, mark_varying


def attend(plan: PagedPlan, operands: Operands, *, interpret: Interpret) -> Part:
    """Attend to every key that each query sees; the part `[total_q, N, .]` is empty past the last sequence."""
    total, heads, depth = operands.q.shape
    depth_v = _get_value_depth(plan, operands)
    tiles = build_tiles(operands, plan.block_q)
    blocks = build_blocks(plan, operands, tiles)
    # Padded for a tile that begins with the last query.
    q = jnp.pad(operands.q, ((0, plan.block_q), (0, 0), (0, 0)))
    scalars = (operands.page_indices.reshape(-1), *tiles[1:], *blocks)
    arrays = (q, *_list_pages(operands))
    scalars, arrays = mark_varying((scalars, arrays), find_varying_axes((scalars, arrays)))
    kernel = functools.partial(_kernel, plan, operands.page_indices.shape[1], len(arrays) - 1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    of_tile = tuple(pl.Element(size) for size in (plan.block_q, heads, depth))
    out, statistics = pl.pallas_call(
        kernel,
        out_shape=mark_shapes_varying(
            [make_shape((total, heads, width), jnp.float32) for width in (depth_v, LANES)], arrays[0]
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles.total,),
            in_specs=[
                pl.BlockSpec(of_tile, lambda tile, table, sequence, row, *_: (row[tile], 0, 0)),
                *[anywhere] * len(arrays[1:]),
            ],
            out_specs=[anywhere] * 2,
            scratch_shapes=_build_scratch(plan, operands),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=find_chip_room().vmem
        ),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, *arrays)
    there = (jnp.arange(total, dtype=jnp.int32) < operands.cu_q_lens[operands.num_seqs[0]])[:, None, None]
    return Part(
        out=jnp.where(there, out, 0.0),
        max=jnp.where(there, statistics[..., :1], -jnp.inf),
        sum=jnp.where(there, statistics[..., 1:2], 0.0),
    )


def _get_value_depth(plan: PagedPlan, operands: Operands) -> int:
    if operands.v_pages is not None:
        return int(operands.v_pages.shape[3])
    assert plan.value_dim is not None
    return plan.value_dim


def _list_pages(operands: Operands) -> tuple[jax.Array, ...]:
    """List the arrays that are copied page by page. Latents lose the axis of heads, so that tokens fill tiles."""
    if operands.v_pages is None:
        return (operands.k_pages[:, :, 0],)
    scales = () if operands.page_scales is None else (operands.page_scales,)
    return operands.k_pages, operands.v_pages, *scales


def _build_scratch(plan: PagedPlan, operands: Operands) -> list[Any]:
    """Build the scratch memory of the kernel, in the order of `_kernel`."""
    _, heads, depth = operands.q.shape
    _, page_size, num_kv_heads, _ = operands.k_pages.shape
    dtype = operands.q.dtype
    rows = count_rows(plan, plan.block_q, heads // num_kv_heads)
    block = plan.block_pages * page_size
    depth_v = _get_value_depth(plan, operands)
    if operands.v_pages is None:
        held = [pltpu.VMEM((NUM_BUFFERS, plan.block_pages, page_size, depth), dtype)]
        apart = []
    else:
        stored = operands.k_pages.dtype
        held = [pltpu.VMEM((NUM_BUFFERS, block, num_kv_heads, width), stored) for width in (depth, depth_v)]
        apart = [pltpu.VMEM((num_kv_heads, block, width), dtype) for width in (depth, depth_v)]
    if operands.page_scales is not None:
        lanes = operands.page_scales.shape[2]
        held.append(pltpu.VMEM((NUM_BUFFERS, plan.block_pages, page_size, lanes), jnp.float32))
        apart.append(pltpu.VMEM((lanes, block), jnp.float32))
    return [
        *held,
        pltpu.SemaphoreType.DMA((len(held), NUM_BUFFERS)),
        pltpu.VMEM((num_kv_heads, rows, depth), dtype),
        *(pltpu.VMEM((num_kv_heads, rows, width), jnp.float32) for width in (depth_v, LANES, LANES)),
        *apart,
        *(pltpu.VMEM((plan.block_q, heads, width), jnp.float32) for width in (depth_v, LANES)),
        pltpu.SemaphoreType.DMA((2,)),
    ]


def _kernel(plan: PagedPlan, pages_per_seq: int, copied: int, page_indices: Any, *refs: Ref) -> None:
    scalars, (q, *arrays) = refs[: _NUM_TILE_LISTS + _NUM_BLOCK_LISTS], refs[_NUM_TILE_LISTS + _NUM_BLOCK_LISTS :]
    pages, (out, statistics, *scratch) = arrays[:copied], arrays[copied:]
    held, (arrived, *heads, tile_out, tile_statistics, written) = scratch[:copied], scratch[copied:]
    steps: Any = pl.num_programs(0)
    compute_tile(
        plan,
        QueryTiles(steps, *scalars[:_NUM_TILE_LISTS]),
        PageBlocks(*scalars[_NUM_TILE_LISTS:]),
        q,
        PageCache(page_indices, tuple(pages), tuple(held), arrived, pages_per_seq, plan.block_pages),
        HeadRefs(*heads),
        Results((tile_out, tile_statistics), (out, statistics), written),
    )


_NUM_TILE_LISTS = len(QueryTiles._fields) - 1
_NUM_BLOCK_LISTS = len(PageBlocks._fields)
