"""Splash attention over packed sequences: the public call, and the lists of steps from each query's range of keys.

Each query sees the keys `low` to `high - 1` (`impls.packed_sequences`). These two numbers of a block's queries decide
whether a pair of blocks is empty, partial or full. The lists have the maximal length for the given sizes, but the grid
only runs the actual steps. So the work grows with the sequences.

The lists lie in scalar memory at twelve bytes per step. Without a window every pair of blocks may be a step, since a
single sequence may fill everything.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from impls.jax_compat import Interpret, resolve_interpret
from impls.packed_sequences import (
    SequenceTables,
    Side,
    build_tables,
    check_packed_operands,
    compute_key_ranges,
    resolve_window,
)
from impls.pallas_tpu.tpu_tiles import round_up
from impls.splash_tpu.splash_kernel import PHASE_ORDERS, StepLists, attend
from impls.splash_tpu.splash_plan import Blocks, BlockSizes, Layouts, Operands, Precision, SplashPlan, StepKinds
from impls.splash_tpu.splash_schedule import COMPUTE, FIRST, LAST, MASKED, PART, Order, Steps
from impls.varying_axes import find_varying_axes, mark_varying


def list_step_kinds(blocks: Blocks) -> StepKinds:
    """List the kinds of steps that may occur: all except stored masks, since nothing is known at trace time."""
    parts = blocks.parts != (blocks.q, blocks.kv)
    return StepKinds(full=True, masked=True, empty=True, stored=False, parts=parts, dead=True)


def build_packed_steps(
    low: Int32[Array, " T"],
    high: Int32[Array, " T"],
    kv_length: int,
    blocks: Blocks,
    order: Order,
    *,
    seen: int | None = None,
) -> Steps:
    """Build the steps of a call: every non-empty pair of blocks, and one step for each result block without any.

    Args:
      low: int32 `[T]`, the first key that each query sees. It grows along the queries that see any key.
      high: int32 `[T]`, one past the last key that each query sees; it grows too. Both are 0 for a query without keys.
      order: `"q"` if results are blocks of queries, `"kv"` if they are blocks of keys.
      seen: upper bound of the keys that a query sees, if there is a static one.
    """
    left, full = _classify_pairs(low, high, kv_length, blocks)
    holds = left.any(axis=-1)
    num_q, num_kv = holds.shape
    most = _bound_steps(num_q, num_kv, blocks, seen)
    if order == "kv":
        left, full, holds = left.swapaxes(0, 1), full.T, holds.T
    visited = holds.at[:, 0].set(holds[:, 0] | ~holds.any(axis=1))
    total = visited.sum(dtype=jnp.int32)
    (place,) = jnp.nonzero(visited.reshape(-1), size=most, fill_value=visited.size - 1)
    row, column = (x.astype(jnp.int32) for x in jnp.divmod(place, visited.shape[1]))
    computes, masked = holds[row, column], holds[row, column] & ~full[row, column]
    number = jnp.arange(most, dtype=jnp.int32)
    before, after = jnp.roll(row, 1), jnp.roll(row, -1)
    flags = FIRST * ((number == 0) | (row != before)) + LAST * ((number == total - 1) | (row != after))
    flags = flags + COMPUTE * computes + MASKED * masked
    if list_step_kinds(blocks).parts:
        flags = flags + masked * (left[row, column] @ (PART << jnp.arange(left.shape[2], dtype=jnp.int32)))
    # An idle step points to the blocks of the step before, so that nothing is fetched for it.
    column = column[lax.cummax(jnp.where(computes, number, 0))]
    q, kv = (row, column) if order == "q" else (column, row)
    lists = (x.astype(jnp.int32)[None, None, None] for x in (q, kv, flags))
    q, kv, flags = lists
    return Steps(q=q, kv=kv, head=None, flags=flags, place=None, stored=None, total=total)


def _classify_pairs(
    low: Int32[Array, " T"], high: Int32[Array, " T"], kv_length: int, blocks: Blocks
) -> tuple[Bool[Array, "q_blocks kv_blocks parts"], Bool[Array, "q_blocks kv_blocks"]]:
    """Find the parts `[q blocks, kv blocks, parts]` with an allowed pair, and the blocks with all pairs allowed.

    XLA fuses the comparisons of every query with every part of the keys, so they take no memory.
    """
    (q_part, kv_part), padded = blocks.parts, round_up(len(low), blocks.q)
    low, high = (jnp.pad(x, (0, padded - len(x))).reshape(-1, q_part, 1) for x in (low, high))
    start = jnp.arange(0, round_up(kv_length, blocks.kv), kv_part, dtype=jnp.int32)
    end = start + kv_part
    some = ((low < end) & (high > start)).any(axis=1)
    every = ((low <= start) & (high >= end)).all(axis=1)

    def by_block(x: jax.Array) -> jax.Array:
        q_parts, kv_parts = blocks.q // q_part, blocks.kv // kv_part
        x = x.reshape(len(x) // q_parts, q_parts, -1, kv_parts).swapaxes(1, 2)
        return x.reshape(*x.shape[:2], -1)

    return by_block(some), by_block(every).all(axis=-1)


def _bound_steps(num_q: int, num_kv: int, blocks: Blocks, seen: int | None) -> int:
    """Bound the number of steps for this many blocks of queries and of keys.

    Key ranges only move forward, so a block of keys is seen by consecutive queries. It counts once, and once more for
    every boundary between query blocks among these queries. At most the keys of one query reach across a boundary.
    """
    if seen is None:
        return num_q * num_kv
    touched = -(-(seen - 1) // blocks.kv) + 1
    return min(num_q * num_kv, num_kv + (num_q - 1) * touched + max(num_q, num_kv))


def packed_attention(
    q: Float[Array, "total_q N H"],
    k: Float[Array, "total_kv K H"],
    v: Float[Array, "total_kv K V"],
    *,
    cu_q_lens: Int[Array, " borders"],
    cu_kv_lens: Int[Array, " borders"],
    num_seqs: Int[Array, "1"],
    causal: bool = False,
    window: tuple[Side, Side] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    block_sizes: BlockSizes = BlockSizes(),
    precision: Precision = "exact",
    interpret: Interpret = None,
) -> Any:
    """Compute softmax attention of concatenated sequences on a TPU (docs/contract.md, section 8).

    Query `i` of a sequence has the position `kv_len - q_len + i`. The kernels are those of
    `impls.splash_tpu.attention`, with lists of steps computed at run time. Blocks without a query and a key of the same
    sequence have no step: the work grows with the sequences, not with the square of the total length.

    q, k, v and sinks are differentiable in reverse mode. So is `logsumexp`; `max_logits` has gradient zero. The
    residuals of the backward pass are tagged `"splash_residuals"` for `jax.checkpoint` policies.

    The operands and results are those of packed calls in the contract (docs/contract.md, section 8).

    Args:
      block_sizes: block sizes of each phase. Lists of steps take 12 bytes of scalar memory per pair of blocks.
      precision: whether products of f32 operands are `"exact"`, or round the operands to `"bf16"`.
      interpret: as for `pallas_call`; by default true unless the process runs on a TPU.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: operands are float16, or a second derivative was requested.
    """
    check_packed_operands(q, k, v, sinks, soft_cap, scale)
    tables = build_tables(cu_q_lens, cu_kv_lens, num_seqs)
    if q.dtype == jnp.float16:
        raise NotImplementedError("splash_tpu_packed does not support f16: the matrix unit multiplies no float16")
    kinds: dict[str, Any] = {
        phase: list_step_kinds(getattr(block_sizes, phase).clip(len(q), len(k))) for phase in PHASE_ORDERS
    }
    plan = SplashPlan(
        mask=None,
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        q_length=len(q),
        kv_length=len(k),
        scale=None if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        block_sizes=block_sizes,
        layouts=Layouts(),
        precision=precision,
        mask_value=-float("inf"),
        # Always computed, so that calls with and without residuals share one kernel.
        save_max_logits=True,
        checkpoint_name="splash_residuals",
        vmem_limit_bytes=None,
        interpret=resolve_interpret(interpret, "tpu"),
        **kinds,
    )
    arrays = jax.tree.map(jnp.asarray, (q, k, v, sinks))
    found = _attend(plan, resolve_window(causal, window), arrays, tables)
    out, *residuals = (x[0].swapaxes(0, 1) for x in found)
    return (out, dict(zip(("logsumexp", "max_logits"), residuals, strict=True))) if save_residuals else out


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(plan: SplashPlan, sides: tuple[Side, Side], arrays: Any, tables: SequenceTables) -> Any:
    """Compute `out [1, N, total_q, V]`, `logsumexp` and `max_logits` `[1, N, total_q]`, with the lists of steps."""
    q, k, v, sinks = arrays
    low, high = compute_key_ranges(tables, sides, plan.q_length)
    # A query outside all sequences may be NaN, and in the backward pass 0 * NaN is not 0.
    q = jnp.where((low < high)[:, None, None], q, jnp.zeros((), q.dtype))
    q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))
    operands = Operands(q, k, v, sinks, None, None, low[None], high[None])
    operands = mark_varying(operands, find_varying_axes(operands))
    return attend(plan, _build_lists(plan, sides, low, high), operands)


def _build_lists(plan: SplashPlan, sides: tuple[Side, Side], low: jax.Array, high: jax.Array) -> StepLists:
    left, right = sides
    seen = None if left is None or right is None else left + right + 1
    steps = {
        phase: build_packed_steps(
            low,
            high,
            plan.kv_length,
            getattr(plan.block_sizes, phase).clip(plan.q_length, plan.kv_length),
            order,
            seen=seen,
        )
        for phase, order in PHASE_ORDERS.items()
    }
    dq = None if plan.block_sizes.fused_backward else steps["dq"]
    return StepLists(steps["forward"], dq, steps["dkv"], np.zeros(1, np.int32))
