"""Block-sparse flash attention over packed sequences: the public call and its derivative rule."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from conformance.contract import FLOATS
from impls.block_flash.block_sizes import look_up
from impls.block_flash.forward import Outputs
from impls.block_flash.packed_passes import PackedOperands, backward, forward
from impls.block_flash.ranges import PackedPlan, Tables
from impls.once import once_in_reverse

_NAME = "block_flash_packed"
# No token stands at 2**30 or beyond, so a side that reaches as far is open.
_OPEN = 2**30
Side = int | None


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    num_seqs: jax.Array,
    causal: bool = False,
    window: tuple[Side, Side] | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Any:
    """Softmax attention of sequences that lie behind one another, each to itself (docs/contract.md, section 8).

    Query `i` of a sequence has the position `kv_len - q_len + i`. Blocks of the pack that hold no pair of one sequence
    are not computed, so the work follows the sequences and not the square of the pack. Memory is linear in the lengths.

    q, k, v and sinks are differentiable in reverse mode, and `logsumexp` is; `max_logits` has gradient zero. The
    residuals of the backward are tagged `"out"` and `"logsumexp"` for `jax.checkpoint` policies.

    Args:
      q: queries `[total_q, N, H]`. Tokens past the last sequence may hold anything, here and in k and v.
      k: keys `[total_kv, K, H]`, `N % K == 0`.
      v: values `[total_kv, K, V]`.
      cu_q_lens: int32 `[max_seqs + 1]`, where the queries of each sequence begin.
      cu_kv_lens: int32 `[max_seqs + 1]`, likewise its keys. A sequence may have no queries, or no keys.
      num_seqs: int32 `[1]`; entries of tables past so many sequences may be anything.
      causal: whether a query sees no later key of its sequence.
      window: `(left, right)`: the keys that a query sees beside its own, None for an open side.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.
      sinks: `[N]`, one more logit in each query head's softmax denominator.
      scale: factor of `<q, k>`, default `1 / sqrt(H)`.
      save_residuals: also return `logsumexp` and `max_logits`.
      block_q: queries a block, at most all of them; by default as for dense operands.
      block_kv: keys a block, likewise.

    Returns:
      `out [total_q, N, V]` in q's dtype, or `(out, {"logsumexp": ..., "max_logits": ...})`, both f32 `[total_q, N]`. A
      query that sees no key gets `out = 0`, `logsumexp = -inf` (or its sink) and `max_logits = -inf`, and so do rows
      past the last sequence. These and keys past it have gradient zero.

    Raises:
      ValueError: an operand or an option is not as above; the message names it.
      NotImplementedError: a second derivative in reverse mode.
    """
    _check(q, k, v, sinks, soft_cap, scale, block_q, block_kv)
    tables = {"cu_q_lens": cu_q_lens, "cu_kv_lens": cu_kv_lens, "num_seqs": num_seqs}
    _check_tables(**tables)
    left, right = _sides(causal, window)
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
    )
    operands = jax.tree.map(jnp.asarray, PackedOperands(q, k, v, sinks))
    outputs = _attend(plan, operands, Tables(**{name: jnp.asarray(x, jnp.int32) for name, x in tables.items()}))
    if not save_residuals:
        return outputs.out[0]
    return outputs.out[0], {"logsumexp": outputs.logsumexp[0].T, "max_logits": outputs.max_logits[0].T}


def _check(q: Any, k: Any, v: Any, sinks: Any, soft_cap: Any, scale: Any, *blocks: int | None) -> None:
    for name, x, axes in (
        ("q", q, "[total_q, heads, depth]"),
        ("k", k, "[total_kv, heads, depth]"),
        ("v", v, "[total_kv, heads, depth]"),
    ):
        if x.ndim != 3 or 0 in x.shape:
            raise ValueError(f"{name} must have the axes {axes}, none of them of size 0, got shape {x.shape}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must agree in length and heads, got {k.shape} and {v.shape}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k has head_dim {k.shape[2]}, q has {q.shape[2]}: they must be equal")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which must be a multiple of the {k.shape[1]} heads of k")
    if not (q.dtype == k.dtype == v.dtype and str(q.dtype) in FLOATS):
        raise ValueError(f"q, k and v must have one dtype of {FLOATS}, got {q.dtype}, {k.dtype} and {v.dtype}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must have shape {(q.shape[1],)}, one logit a query head, got {sinks.shape}")
    for name, size in zip(("block_q", "block_kv"), blocks, strict=True):
        if size is not None and size <= 0:
            raise ValueError(f"{name} must be positive, got {size}")
    for name, number in (("soft_cap", soft_cap), ("scale", scale)):
        if number is not None and not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{name} must be positive and finite, got {number}")


def _check_tables(cu_q_lens: Any, cu_kv_lens: Any, num_seqs: Any) -> None:
    shape = cu_q_lens.shape
    if len(shape) != 1 or shape[0] < 2:
        raise ValueError(f"cu_q_lens must have shape (max_seqs + 1,), got {shape}")
    for name, x, wanted in (("cu_kv_lens", cu_kv_lens, shape), ("num_seqs", num_seqs, (1,))):
        if x.shape != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {x.shape}")
    for name, x in (("cu_q_lens", cu_q_lens), ("cu_kv_lens", cu_kv_lens), ("num_seqs", num_seqs)):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {x.dtype}")


def _sides(causal: bool, window: tuple[Side, Side] | None) -> tuple[Side, Side]:
    left, right = (None, None) if window is None else window
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(f"window must be (left, right), each at least 0 or None, got {window}")
    right = 0 if causal else right
    return _bounded(left), _bounded(right)


def _bounded(side: Side) -> Side:
    return None if side is None or side >= _OPEN else int(side)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: PackedPlan, operands: PackedOperands, tables: Tables) -> Outputs:
    return forward(plan, operands, tables)


_Saved = tuple[PackedOperands, Tables, jax.Array, jax.Array]


def _flash_forward(plan: PackedPlan, operands: PackedOperands, tables: Tables) -> tuple[Outputs, _Saved]:
    outputs = once_in_reverse(_NAME, functools.partial(forward, plan), operands, tables)
    out = checkpoint_name(outputs.out, "out")  # type: ignore[no-untyped-call]  # JAX leaves it untyped
    logsumexp = checkpoint_name(outputs.logsumexp, "logsumexp")  # type: ignore[no-untyped-call]  # likewise
    return Outputs(out, logsumexp, outputs.max_logits), (operands, tables, out, logsumexp)


def _flash_backward(plan: PackedPlan, saved: _Saved, cotangents: Outputs) -> tuple[PackedOperands, None]:
    pulled = functools.partial(backward, plan)
    return once_in_reverse(_NAME, pulled, *saved, cotangents.out, cotangents.logsumexp), None


_flash.defvjp(_flash_forward, _flash_backward)

# Jitted so that calls outside `jit` compile once for each plan, not once a call.
_attend = jax.jit(_flash, static_argnums=0)
