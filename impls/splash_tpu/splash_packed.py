"""Splash attention over packed sequences: the public call, and the operations before the kernels."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from impls.jax_compat import Interpret, resolve_interpret
from impls.packed_sequences import (
    SequenceTables,
    Side,
    build_tables,
    check_packed_operands,
    compute_key_ranges,
    resolve_window,
)
from impls.splash_tpu.packed_schedule import build_packed_steps, list_step_kinds
from impls.splash_tpu.splash_kernel import PHASE_ORDERS, StepLists, attend
from impls.splash_tpu.splash_plan import BlockSizes, Layouts, Operands, Precision, SplashPlan
from impls.varying_axes import find_varying_axes, mark_varying


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
    block_sizes: BlockSizes = BlockSizes(),  # noqa: B008  a frozen value
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
