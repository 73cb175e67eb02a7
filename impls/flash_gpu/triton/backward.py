"""Backward kernels: probabilities are recomputed from `logsumexp`, and no two programs write to the same place.

Dao 2023, arXiv:2307.08691, algorithm 2, extended by the cotangent `dlse` of `logsumexp`, soft cap, bias and sinks. With
the logits z of `impls.flash_gpu.triton.triton_program`:

    (8)  p_ij = exp(z_ij - logsumexp_i) = 2 ** (c y_ij - log2(e) logsumexp_i), with z = unit y and c = unit log2(e)
    (9)  dv_j = sum_i keep_ij p_ij dout_i
    (10) dp_ij = keep_ij <dout_i, v_j>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j
    (15) dk_j = scale sum_i dx_ij q_i
    (16) dbias = dx, summed over the axes along which the bias is broadcast

keep_ij is that of `impls.flash_gpu.triton.forward`. `D - dlse` comes from `impls.flash_gpu.attention`, as `row_sums`.
One kernel owns blocks of queries and computes dq (14). A second owns blocks of keys and computes dv (9) and dk (15),
summed over the query heads of its group. A third writes dx of every pair for dbias (16); it runs only where the
gradient of a bias is used. All sums are in f32 and in a fixed order, so the same call gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32

from impls.block_arithmetic import LOG2_E, make_shape
from impls.dropout_bits import compute_keep_factor
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands, QueryRows
from impls.flash_gpu.triton.triton_program import (
    Arrays,
    Launch,
    Specs,
    TilePair,
    compute_allowed,
    compute_logits,
    drop_weights,
    get_logit_unit,
    get_program_ids,
    load_key_ranges,
    multiply,
    visit_blocks,
)
from impls.jax_compat import Scalar
from impls.pallas_gpu.triton_tiles import (
    compute_fused_exp2,
    find_seen_keys,
    load_rows,
    load_values,
    store_rows,
    zero_hidden_rows,
)


def _build_inputs(launch: Launch, operands: Operands, rows: QueryRows) -> tuple[Arrays, Specs]:
    arrays, specs = launch.inputs(operands)
    arrays |= rows._asdict() | {"shift": rows.shift * jnp.float32(LOG2_E)}
    specs |= {
        "d_out": launch.see_query_rows(launch.plan.v_head_tile),
        "shift": launch.see_query_scalars(),
        "row_sums": launch.see_query_scalars(),
    }
    return arrays, specs


class _QueryBlock(NamedTuple):
    """One block of queries of one head, with the values per query that the backward pass needs."""

    q: Float[Array, "block_q H"]
    d_out: Float[Array, "block_q V"]
    shift: Float32[Array, " block_q"]  # logsumexp times log2(e)
    row_sums: Float32[Array, " block_q"]


def _load_queries(
    plan: FlashGpuPlan, inputs: Arrays, start: Scalar, size: int, head: Scalar, at: Scalar, there: Any = None
) -> _QueryBlock:
    length = plan.q_length
    return _QueryBlock(
        load_rows(inputs["q"], start, size, length, plan.head_dim, head=head, at=at, there=there),
        load_rows(inputs["d_out"], start, size, length, plan.v_head_dim, head=head, at=at, there=there),
        load_values(inputs["shift"], start, size, length, head=head, at=at),
        load_values(inputs["row_sums"], start, size, length, head=head, at=at),
    )


def compute_pair_gradients(
    plan: FlashGpuPlan,
    inputs: Arrays,
    pair: TilePair,
    rows: _QueryBlock,
    k: jax.Array,
    v: jax.Array,
    may: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the weights `keep p` and the gradient dx of the scaled logits of a tile, f32."""
    z, slope = compute_logits(plan, inputs, pair, rows.q, k, may)
    factor = get_logit_unit(plan, inputs) * LOG2_E
    p = compute_fused_exp2(z, pair.queries(rows.shift), factor=factor, interpret=plan.interpret)  # p, eq. (8)
    operands = (v, rows.d_out) if pair.keys_first else (rows.d_out, v)
    dp = multiply(plan, *operands, over=(1, 1))  # dp, equation (10)
    kept = p
    if plan.dropout_rate is not None:
        keep = jnp.float32(compute_keep_factor(plan.dropout_rate))
        kept, dp = drop_weights(plan, inputs, pair, p * keep, dp * keep)
    dx = p * (dp - pair.queries(rows.row_sums))  # dz, equation (12)
    if slope is not None:
        dx = dx * slope  # dx, equation (13)
    # For a hidden pair p is 0, and so is dx, unless no query attends to the key and its value is NaN.
    return kept, jnp.where(may, dx, 0.0) if may is not None and plan.has_dead_keys else dx


def compute_dq(plan: FlashGpuPlan, operands: Operands, rows: QueryRows) -> Float[Array, "B T N H"]:
    """Compute the gradient of q, `[B, T, N, H]`."""
    launch = Launch(plan, plan.sizes.dq, "q", operands.q.shape[0])
    block = (None, launch.tiles.block_q, None, plan.head_tile)
    outputs = launch(
        "flash_gpu_dq",
        functools.partial(_dq_kernel, launch),
        *_build_inputs(launch, operands, rows),
        out_shapes={"dq": make_shape(operands.q.shape, operands.q.dtype)},
        out_specs={"dq": pl.BlockSpec(block, lambda i, n, b: (b, i, n, jnp.int32(0)))},
    )
    return outputs["dq"]


def _dq_kernel(launch: Launch, inputs: Arrays, outputs: Arrays) -> None:
    plan, block_q, block_kv = launch.plan, launch.tiles.block_q, launch.tiles.block_kv
    row, _, batch = get_program_ids()
    q_start = row * block_q
    rows = _load_queries(plan, inputs, q_start, block_q, 0, at=0)

    def visit(masked: bool, block: Scalar, dq: jax.Array) -> jax.Array:
        pair = TilePair(batch, 0, q_start, block * block_kv, block_q, block_kv, keys_first=False)
        k = load_rows(inputs["k"], pair.kv_start, block_kv, plan.kv_length, plan.head_dim)  # [block_kv, H]
        v = load_rows(inputs["v"], pair.kv_start, block_kv, plan.kv_length, plan.v_head_dim)  # [block_kv, V]
        may = compute_allowed(plan, inputs, pair) if masked else None  # [block_q, block_kv]
        _, dx = compute_pair_gradients(plan, inputs, pair, rows, k, v, may)  # [block_q, block_kv]
        k = zero_hidden_rows(k, find_seen_keys(may) if may is not None and plan.has_dead_keys else None)
        return dq + multiply(plan, dx.astype(k.dtype), k, over=(1, 0))  # dq, equation (14), not yet scaled

    dq = jnp.zeros((block_q, plan.head_tile), jnp.float32)  # padded H
    dq = visit_blocks(launch, inputs, 0, visit, dq)
    store_rows(outputs["dq"], q_start, dq * jnp.float32(plan.scale), plan.q_length, plan.head_dim)  # dq, equation (14)


def compute_dkv(
    plan: FlashGpuPlan, operands: Operands, rows: QueryRows
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Compute the gradients of k and v, `[B, S, K, .]`."""
    launch = Launch(plan, plan.sizes.dkv, "kv", operands.q.shape[0])

    def spec(columns: int) -> Any:
        block = (None, launch.tiles.block_kv, None, columns)
        return pl.BlockSpec(block, lambda i, n, b: (b, i, n, jnp.int32(0)))

    outputs = launch(
        "flash_gpu_dkv",
        functools.partial(_dkv_kernel, launch),
        *_build_inputs(launch, operands, rows),
        out_shapes={
            "dk": make_shape(operands.k.shape, operands.k.dtype),
            "dv": make_shape(operands.v.shape, operands.v.dtype),
        },
        out_specs={"dk": spec(plan.head_tile), "dv": spec(plan.v_head_tile)},
    )
    return outputs["dk"], outputs["dv"]


def _dkv_kernel(launch: Launch, inputs: Arrays, outputs: Arrays) -> None:
    plan, block_q, block_kv = launch.plan, launch.tiles.block_q, launch.tiles.block_kv
    row, _, batch = get_program_ids()
    kv_start = row * block_kv
    k = load_rows(inputs["k"], kv_start, block_kv, plan.kv_length, plan.head_dim, at=0)  # [block_kv, H]
    v = load_rows(inputs["v"], kv_start, block_kv, plan.kv_length, plan.v_head_dim, at=0)  # [block_kv, V]

    def visit(
        head: Scalar, masked: bool, block: Scalar, sums: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        pair = TilePair(batch, head, block * block_q, kv_start, block_q, block_kv, keys_first=True)
        there = None
        if plan.packed and masked:
            # Queries outside all sequences may be NaN, and they are factors of these products.
            low, high = load_key_ranges(plan, inputs, pair)
            there = low < high
        rows = _load_queries(plan, inputs, pair.q_start, block_q, head, at=pair.q_at, there=there)
        p, dx = compute_pair_gradients(
            plan, inputs, pair, rows, k, v, compute_allowed(plan, inputs, pair) if masked else None
        )
        dk, dv = sums  # [block_kv, H], [block_kv, V]
        # k and v are no factors of these two products, and p and dx of hidden keys are 0. So NaN does not spread.
        dk = dk + multiply(plan, dx.astype(rows.q.dtype), rows.q, over=(1, 0))  # dk, equation (15); scaled when stored
        dv = dv + multiply(plan, p.astype(rows.d_out.dtype), rows.d_out, over=(1, 0))  # dv, equation (9)
        return dk, dv

    def visit_head(head: Scalar, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return visit_blocks(launch, inputs, head, functools.partial(visit, head), sums)

    sums = tuple(jnp.zeros((block_kv, columns), jnp.float32) for columns in (plan.head_tile, plan.v_head_tile))
    if launch.heads == 1:
        dk, dv = visit_head(0, sums)  # type: ignore[arg-type] # a pair, as annotated
    else:
        dk, dv = lax.fori_loop(jnp.int32(0), jnp.int32(launch.heads), visit_head, sums)
    store_rows(outputs["dk"], kv_start, dk * jnp.float32(plan.scale), plan.kv_length, plan.head_dim)  # dk, eq. (15)
    store_rows(outputs["dv"], kv_start, dv, plan.kv_length, plan.v_head_dim)


def compute_dbias(
    plan: FlashGpuPlan, operands: Operands, bias: Float[Array, "b n t s"], rows: QueryRows
) -> Float[Array, "b n t s"]:
    """Compute the gradient of the bias: `dx` of every pair, summed over the axes that the bias broadcasts along."""
    batch = operands.q.shape[0]
    launch = Launch(plan, plan.sizes.dq, "q", batch)
    shape = (batch, plan.num_q_heads, plan.q_length, plan.kv_length)
    rows_of_blocks, columns_of_blocks = launch.q_tail, launch.kv_tail
    outputs = launch(
        "flash_gpu_dbias",
        functools.partial(_dbias_kernel, launch),
        *_build_inputs(launch, operands, rows),
        out_shapes={"dx": make_shape((*shape[:2], rows_of_blocks, columns_of_blocks), jnp.float32)},
        out_specs={
            "dx": pl.BlockSpec(
                (None, None, launch.tiles.block_q, columns_of_blocks), lambda i, n, b: (b, n, i, jnp.int32(0))
            )
        },
    )
    dx = _zero_unvisited(launch, outputs["dx"])[:, :, : plan.q_length, : plan.kv_length]
    broadcast = tuple(axis for axis, (n, m) in enumerate(zip(bias.shape, shape, strict=True)) if n < m)
    return dx.sum(axis=broadcast, keepdims=True).astype(bias.dtype)  # dbias, equation (16)


def _zero_unvisited(launch: Launch, dx: jax.Array) -> jax.Array:
    """Zero the blocks of `dx` that the mask leaves empty: no program wrote them, so they hold arbitrary values."""
    block_q, block_kv = launch.tiles.block_q, launch.tiles.block_kv
    batch, heads, q_length, kv_length = dx.shape
    active = jnp.asarray(launch.plan.active(launch.tiles))[:, :, :, None, :, None]
    blocks = dx.reshape(batch, heads, q_length // block_q, block_q, kv_length // block_kv, block_kv)
    return jnp.where(active, blocks, 0.0).reshape(dx.shape)


def _dbias_kernel(launch: Launch, inputs: Arrays, outputs: Arrays) -> None:
    plan, block_q, block_kv = launch.plan, launch.tiles.block_q, launch.tiles.block_kv
    row, _, batch = get_program_ids()
    q_start = row * block_q
    rows = _load_queries(plan, inputs, q_start, block_q, 0, at=0)

    def visit(masked: bool, block: Scalar, carry: Any) -> Any:
        pair = TilePair(batch, 0, q_start, block * block_kv, block_q, block_kv, keys_first=False)
        k = load_rows(inputs["k"], pair.kv_start, block_kv, plan.kv_length, plan.head_dim)  # [block_kv, H]
        v = load_rows(inputs["v"], pair.kv_start, block_kv, plan.kv_length, plan.v_head_dim)  # [block_kv, V]
        _, dx = compute_pair_gradients(
            plan, inputs, pair, rows, k, v, compute_allowed(plan, inputs, pair) if masked else None
        )
        plt.store(outputs["dx"].at[pl.ds(jnp.int32(0), dx.shape[0]), pl.ds(pair.kv_start, block_kv)], dx)
        return carry

    visit_blocks(launch, inputs, 0, visit, jnp.int32(0))
