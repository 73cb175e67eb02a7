"""Decode attention in plain JAX: a loop over key blocks up to the end of the longest sequence.

It computes a part: equations (1) to (6) of `impls/__init__.py`. `impls.softmax_merge` adds the sink and divides.

`max`, `sum` and `out` of a `Part` are m, l and the sum of (6). They are kept for the keys so far. A block that raises m
multiplies the others by `decay = exp(old m - new m)` (Milakov and Gimelshein 2018, arXiv:1805.02867).

The number of blocks that the loop visits is known at run time only. The work grows with the lengths, not with the size
of the cache.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from impls.block_arithmetic import multiply, replace_neg_inf
from impls.jax_compat import Scalar
from impls.ragged.ragged_plan import Operands, RaggedPlan, compute_allowed, compute_logits, find_block_range
from impls.softmax_merge import Part
from impls.varying_axes import find_varying_axes, mark_varying


def attend(plan: RaggedPlan, operands: Operands, *, block_kv: int) -> Part:
    """Attend to every key that exists; the part has arrays `[B, K, R, .]`."""
    block = min(block_kv, plan.kv_length)
    first, count = find_block_range(plan, operands.lengths, operands.positions, block)
    end = jnp.max(first + count, initial=0, where=count > 0)
    begin = jnp.min(jnp.where(count > 0, first, end))
    rows = operands.q.shape[:3]
    nothing = Part(
        out=jnp.zeros((*rows, operands.v.shape[3]), jnp.float32),
        max=jnp.full((*rows, 1), -jnp.inf, jnp.float32),
        sum=jnp.zeros((*rows, 1), jnp.float32),
    )
    nothing = mark_varying(nothing, find_varying_axes(operands))
    found: Part = lax.fori_loop(begin, end, functools.partial(_add_block, plan, operands, block), nothing)
    return found


def _add_block(plan: RaggedPlan, operands: Operands, block: int, number: Scalar, old: Part) -> Part:
    """Update the online softmax with one more block of keys."""
    # The last block starts early enough to be whole. Its keys that the block before has already counted are masked.
    start = jnp.minimum(number * block, plan.kv_length - block)
    k, v = (lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (operands.k, operands.v))  # [B, block, K, .]
    j = start + jnp.arange(block, dtype=jnp.int32)
    t = jnp.arange(operands.q.shape[2], dtype=jnp.int32) // plan.group
    i = operands.positions[:, None, None] + t[:, None]  # [B, R, 1]
    found = compute_allowed(plan, operands.lengths[:, None, None], i, j) & (j >= number * block)  # [B, R, block]
    z = compute_logits(plan, multiply("bkrh,bskh->bkrs", operands.q, k))  # logits with soft cap, equations (1) and (2)
    z = jnp.where(found[:, None], z, -jnp.inf)  # hidden pairs get -inf, equation (3)
    top = jnp.maximum(old.max, z.max(axis=-1, keepdims=True))  # maximum, equation (4)
    weights, decay = jnp.exp(z - replace_neg_inf(top)), jnp.exp(old.max - replace_neg_inf(top))
    # Values that no query sees may be NaN, and 0 * NaN is not 0.
    v = jnp.where(found.any(axis=1)[:, :, None, None], v, jnp.zeros_like(v))
    out = multiply("bkrs,bskv->bkrv", weights.astype(v.dtype), v)
    return Part(
        out=old.out * decay + out,  # weighted sum of values, equation (6)
        max=top,
        sum=old.sum * decay + weights.sum(axis=-1, keepdims=True),  # sum of weights, equation (5)
    )
