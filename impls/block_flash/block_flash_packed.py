"""Block-sparse flash attention over packed sequences: the public call and its derivative rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int

from impls.block_flash.block_sizes import look_up
from impls.block_flash.forward import Outputs
from impls.block_flash.packed_passes import PackedOperands, PackedPlan, PairOperands, backward, forward
from impls.derivative_refusals import refuse_reverse_mode
from impls.packed_sequences import SequenceTables, Side, build_tables, check_packed_operands, resolve_window

_KERNEL_NAME = "block_flash_packed"


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
    mask_mod: Callable[..., Any] | None = None,
    mask: Bool[Array, "total_q S"] | None = None,
    tree_mask: Bool[Array, "total_q W"] | None = None,
    segment_ids: tuple[Int[Array, " total_q"], Int[Array, " total_kv"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float32[Array, " N"] | None = None,
    score_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Any:
    """Compute softmax attention over packed sequences (docs/contract.md, section 8).

    The sequences are concatenated along one axis, and a query attends only to keys of its own sequence.
    Query `i` of a sequence has the position `kv_len - q_len + i`. Pairs of blocks without a query and a key of the same
    sequence are skipped. So the work grows with the number of pairs within sequences, not with the square of the total
    length. Memory is linear in the lengths.

    No blocks are skipped for `mask_mod`, `mask`, `tree_mask` and `segment_ids`. The memory of `mask` is the caller's.

    q, k, v and sinks are differentiable in reverse mode. So is `logsumexp`; `max_logits` has gradient zero. The
    residuals of the backward pass are tagged `"out"` and `"logsumexp"` for `jax.checkpoint` policies.

    The operands and results are those of packed calls in the contract (docs/contract.md, section 8).

    Args:
      block_q: queries per block, at most all of them; with the default of `impls.block_flash.attention`.
      block_kv: keys per block, at most all of them; with the default of `impls.block_flash.attention`.

    Raises:
      ValueError: an operand or an option is invalid; the message names it.
      NotImplementedError: a second derivative in reverse mode was requested.
    """
    check_packed_operands(q, k, v, sinks, soft_cap, scale)
    tables = build_tables(cu_q_lens, cu_kv_lens, num_seqs)
    left, right = resolve_window(causal, window)
    sizes = look_up(len(q), len(k))
    plan = PackedPlan(
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        q_length=len(q),
        kv_length=len(k),
        block_q=min(sizes["block_q"] if block_q is None else block_q, len(q)),
        block_kv=min(sizes["block_kv"] if block_kv is None else block_kv, len(k)),
        scale=1 / math.sqrt(q.shape[2]) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        left=left,
        right=right,
        mask_mod=mask_mod,
        score_mod=score_mod,
    )
    operands = jax.tree.map(jnp.asarray, PackedOperands(q, k, v, sinks))
    of_pairs = jax.tree.map(jnp.asarray, PairOperands(segment_ids, mask, tree_mask, alibi_slopes))
    outputs = _attend(plan, operands, tables, of_pairs)
    if not save_residuals:
        return outputs.out[0]
    return outputs.out[0], {"logsumexp": outputs.logsumexp[0].T, "max_logits": outputs.max_logits[0].T}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: PackedPlan, operands: PackedOperands, tables: SequenceTables, of_pairs: PairOperands) -> Outputs:
    return forward(plan, operands, tables, of_pairs)


_Saved = tuple[PackedOperands, SequenceTables, PairOperands, jax.Array, jax.Array]


def _flash_forward(
    plan: PackedPlan, operands: PackedOperands, tables: SequenceTables, of_pairs: PairOperands
) -> tuple[Outputs, _Saved]:
    run = functools.partial(forward, plan)
    outputs = refuse_reverse_mode(_KERNEL_NAME, run, operands, tables, of_pairs)
    out = checkpoint_name(outputs.out, "out")
    logsumexp = checkpoint_name(outputs.logsumexp, "logsumexp")
    return Outputs(out, logsumexp, outputs.max_logits), (operands, tables, of_pairs, out, logsumexp)


def _flash_backward(plan: PackedPlan, saved: _Saved, cotangents: Outputs) -> tuple[PackedOperands, None, None]:
    pulled = functools.partial(backward, plan)
    return refuse_reverse_mode(_KERNEL_NAME, pulled, *saved, cotangents.out, cotangents.logsumexp), None, None


_flash.defvjp(_flash_forward, _flash_backward)

# Jitted so that calls outside `jit` compile once for each plan, not once a call.
_attend = jax.jit(_flash, static_argnums=0)
