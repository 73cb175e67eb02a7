"""Forward kernel: each program owns one block of queries of one head, and visits the key blocks that it may see.

From the logits z of `impls.flash_gpu.triton.triton_program`:

    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j keep_ij exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

keep_ij is 0 where dropout drops the weight and 1 / (1 - rate) elsewhere; without dropout it is 1. The factor
1 / (1 - rate) multiplies the sum, not the weights.

`RunningSoftmax` holds m times log2(e) (`maximum`), l (`total`) and the sum of (6) (`out`) for the keys visited so far,
without the sink. A block that raises m multiplies `total` and `out` by `decay = exp(old m - new m)`.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (running maximum and sum); Dao et al. 2022, arXiv:2205.14135 and
Dao 2023, arXiv:2307.08691 (blocks, normalisation once at the end).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float32

from impls.block_arithmetic import LN_2, LOG2_E, convert_sinks, make_shape, replace_neg_inf
from impls.dropout_bits import compute_keep_factor
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands, Outputs
from impls.flash_gpu.triton.triton_program import (
    Arrays,
    Launch,
    TilePair,
    compute_allowed,
    compute_logits,
    drop_weights,
    get_logit_unit,
    get_program_ids,
    multiply,
    visit_blocks,
)
from impls.jax_compat import Scalar
from impls.pallas_gpu.triton_tiles import (
    compute_fused_exp2,
    find_seen_keys,
    load_rows,
    store_rows,
    store_values,
    zero_hidden_rows,
)


class RunningSoftmax(NamedTuple):
    """The online softmax over the keys visited so far, f32."""

    maximum: Float32[Array, " block_q"]  # m times log2(e)
    total: Float32[Array, " block_q"]
    out: Float32[Array, "block_q padded_V"]


def forward(plan: FlashGpuPlan, operands: Operands) -> Outputs:
    """Compute attention. Device memory holds only operands, outputs and the schedule."""
    batch = operands.q.shape[0]
    launch = Launch(plan, plan.sizes.forward, "q", batch)
    arrays, specs = launch.inputs(operands)
    if operands.sinks is not None:
        arrays["sinks"], specs["sinks"] = operands.sinks.astype(jnp.float32), launch.see_head_scalars()
    block_q = launch.tiles.block_q
    rows = make_shape((batch, plan.num_q_heads, plan.q_length), jnp.float32)
    row_spec = pl.BlockSpec((None, None, block_q), lambda i, n, b: (b, n, i))
    outputs = launch(
        "flash_gpu_forward",
        functools.partial(_kernel, launch),
        arrays,
        specs,
        out_shapes={
            "out": make_shape((*operands.q.shape[:3], plan.v_head_dim), operands.q.dtype),
            "logsumexp": rows,
            "max_logits": rows,
        },
        out_specs={
            "out": pl.BlockSpec((None, block_q, None, plan.v_head_tile), lambda i, n, b: (b, i, n, jnp.int32(0))),
            "logsumexp": row_spec,
            "max_logits": row_spec,
        },
    )
    return Outputs(outputs["out"], outputs["logsumexp"], outputs["max_logits"])


def _kernel(launch: Launch, inputs: Arrays, outputs: Arrays) -> None:
    plan, block_q, block_kv = launch.plan, launch.tiles.block_q, launch.tiles.block_kv
    row, _, batch = get_program_ids()
    q_start = row * block_q
    q = load_rows(inputs["q"], q_start, block_q, plan.q_length, plan.head_dim, head=0, at=0)  # [block_q, H]
    unit = get_logit_unit(plan, inputs)

    def visit(masked: bool, block: Scalar, running: RunningSoftmax) -> RunningSoftmax:
        pair = TilePair(batch, 0, q_start, block * block_kv, block_q, block_kv, keys_first=False)
        k = load_rows(inputs["k"], pair.kv_start, block_kv, plan.kv_length, plan.head_dim)  # [block_kv, H]
        v = load_rows(inputs["v"], pair.kv_start, block_kv, plan.kv_length, plan.v_head_dim)  # [block_kv, V]
        may = compute_allowed(plan, inputs, pair) if masked else None  # [block_q, block_kv]
        y, _ = compute_logits(plan, inputs, pair, q, k, may)  # [block_q, block_kv]
        v = zero_hidden_rows(v, find_seen_keys(may) if may is not None and plan.has_dead_keys else None)
        drop = functools.partial(drop_weights, plan, inputs, pair)
        return update_softmax(plan, running, y, v, unit, drop, some=not masked and "bias" not in inputs)

    running = RunningSoftmax(
        maximum=jnp.full((block_q,), -jnp.inf, jnp.float32),
        total=jnp.zeros((block_q,), jnp.float32),
        out=jnp.zeros((block_q, plan.v_head_tile), jnp.float32),
    )
    running = visit_blocks(launch, inputs, 0, visit, running)
    store_values(outputs["max_logits"], q_start, running.maximum * jnp.float32(LN_2), plan.q_length)
    running = add_sink(running, inputs["sinks"][0]) if "sinks" in inputs else running
    some = running.total != 0
    total = jnp.where(some, running.total, 1.0)
    logsumexp = jnp.where(some, running.maximum * jnp.float32(LN_2) + jnp.log(total), -jnp.inf)  # logsumexp, eq. (7)
    if "sinks" in inputs:
        logsumexp = jnp.maximum(logsumexp, inputs["sinks"][0])  # exact for a sink that takes all the weight
    store_values(outputs["logsumexp"], q_start, logsumexp, plan.q_length)
    out = running.out / total[:, None]
    if plan.dropout_rate is not None:
        out = out * jnp.float32(compute_keep_factor(plan.dropout_rate))
    store_rows(outputs["out"], q_start, out, plan.q_length, plan.v_head_dim)  # out, eq. (6)


def update_softmax(
    plan: FlashGpuPlan,
    old: RunningSoftmax,
    y: jax.Array,
    v: jax.Array,
    unit: float,
    drop: Callable[[jax.Array], tuple[jax.Array, ...]],
    *,
    some: bool,
) -> RunningSoftmax:
    """Update the softmax with a tile of logits `unit y [block_q, block_kv]` and values `[block_kv, V]`.

    `drop` zeroes the weights that dropout drops. `some` says that every row has at least one finite logit.
    """
    factor = unit * LOG2_E
    maximum = jnp.maximum(old.maximum, jnp.max(y, axis=1) * jnp.float32(factor))  # maximum, equation (4)
    shift = maximum if some else replace_neg_inf(maximum)
    weights = compute_fused_exp2(y, shift[:, None], factor=factor, interpret=plan.interpret)  # [block_q, block_kv]
    decay = jnp.exp2(old.maximum - shift)  # [block_q]
    (kept,) = drop(weights)
    out = old.out * decay[:, None] + multiply(plan, kept.astype(v.dtype), v, over=(1, 0))  # undivided eq. (6)
    return RunningSoftmax(maximum, old.total * decay + jnp.sum(weights, axis=1), out)  # sum of weights, equation (5)


def add_sink(old: RunningSoftmax, sink: jax.Array) -> RunningSoftmax:
    """Add the sink to the maximum (4) and to the sum of weights (5); it has no value to add to the output (6)."""
    sink = convert_sinks(sink)
    maximum = jnp.maximum(old.maximum, sink)  # maximum, equation (4)
    shift = replace_neg_inf(maximum)
    decay = jnp.exp2(old.maximum - shift)  # [block_q]
    # The total is the sum of weights, equation (5).
    return RunningSoftmax(maximum, old.total * decay + jnp.exp2(sink - shift), old.out * decay[:, None])
