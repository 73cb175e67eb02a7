"""A small split-KV decode attention with replaceable steps, and the Pallas TPU decode kernel with its schedule.

Keys are split, each split is computed separately, and the parts are merged. Each batch row has its own length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.masks import Full, Mask
from impls import softmax_merge
from impls.block_arithmetic import replace_neg_inf
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Accelerator, Implementation, validate_mask
from impls.ragged import ragged_tpu
from impls.ragged.attention import UNSUPPORTED
from impls.ragged.implementation import lower_mask, refuse_mixed_windows
from impls.ragged.ragged_plan import (
    Operands,
    RaggedPlan,
    compute_allowed,
    compute_logits,
    flatten_queries,
    lower_lengths,
    restore_queries,
)
from impls.ragged.ragged_tpu import build_steps
from impls.softmax_merge import Part

BLOCK = 16
SPLITS = 3
_EVERY = Full()

Array = Any
Step = Callable[..., Any]


def keep_lengths(lengths: Array, plan: RaggedPlan) -> Array:
    return lengths


def keep_positions(positions: Array, lengths: Array, plan: RaggedPlan) -> Array:
    return positions


def count_blocks(lengths: Array) -> Array:
    """Return the number of blocks that hold a key."""
    return -(-lengths // BLOCK)


def compute_split_length(kv_length: int) -> int:
    """Return the number of keys per split, a whole number of blocks."""
    blocks = -(-kv_length // BLOCK)
    return -(-blocks // SPLITS) * BLOCK


def is_before_end(j: Array, lengths: Array) -> Array:
    return j < lengths


def is_allowed(plan: RaggedPlan, positions: Array, j: Array) -> Array:
    return compute_allowed(plan, plan.kv_length, positions, j)


def clear_hidden(v: Array, seen: Array) -> Array:
    return jnp.where(seen, v, jnp.zeros_like(v))


def compute_part(z: Array, v: Array) -> Part:
    """Return the part for logits `z [B, K, A, R, L]` and values `v [B, K, A, L, V]`."""
    top = z.max(axis=-1, keepdims=True)
    weights = jnp.exp(z - replace_neg_inf(top))
    out = jnp.einsum("bkarl,bkalv->bkarv", weights.astype(v.dtype), v, **_PRODUCT)
    return Part(out, top, weights.sum(axis=-1, keepdims=True))


def keep_parts(parts: Part, plan: RaggedPlan) -> Part:
    """Return what each split writes before the splits are merged."""
    return parts


def add_sink_once(splits: Part, merged: Part, sinks: Array, merge: Step) -> Part:
    """Merge the sinks `[1, K, R, 1]` into the merged part, as one more part.

    `splits` are `[B, K, A, R, .]`.
    """
    return merge([merged, build_sink_part(merged, sinks)])


def build_sink_part(like: Part, sinks: Array) -> Part:
    sinks = jnp.broadcast_to(sinks, like.max.shape)
    return Part(jnp.zeros_like(like.out), sinks, jnp.ones_like(sinks))


def keep_sinks(sinks: Array, plan: RaggedPlan) -> Array:
    return sinks


def round_out(out: Array, dtype: Any) -> Array:
    return out.astype(dtype)


def keep_part(part: Part) -> Part:
    return part


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSteps:
    """The replaceable steps of the kernel, in order; the defaults are correct."""

    lengths: Step = keep_lengths
    positions: Step = keep_positions
    blocks: Step = count_blocks
    share: Step = compute_split_length
    exists: Step = is_before_end
    allows: Step = is_allowed
    logits: Step = compute_logits
    hide: Step = clear_hidden
    part: Step = compute_part
    store: Step = keep_parts
    merge: Step = softmax_merge.merge
    sinks: Step = keep_sinks
    add_sinks: Step = add_sink_once
    returned: Step = keep_part
    normalise: Step = softmax_merge.normalise
    round_out: Step = round_out


_PRODUCT: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}


def _kernel(steps: DecodeSteps, plan: RaggedPlan, x: Operands, sinks: Array | None) -> tuple[Part, Array]:
    """Return the part over all keys, arrays `[B, K, R, .]`, and the largest logit."""
    lengths = steps.lengths(x.lengths, plan)
    positions = steps.positions(x.positions, lengths, plan)
    share = steps.share(plan.kv_length)

    def split(a: Array) -> Array:
        """Split `[B, S, K, D]` to `[B, K, A, L, D]`, with zeros past the end."""
        a = jnp.pad(a, ((0, 0), (0, max(0, SPLITS * share - a.shape[1])), (0, 0), (0, 0)))[:, : SPLITS * share]
        return a.reshape(a.shape[0], SPLITS, share, *a.shape[2:]).transpose(0, 3, 1, 2, 4)

    k, v = split(x.k), split(x.v)
    j = jnp.arange(SPLITS * share, dtype=jnp.int32).reshape(SPLITS, 1, share)  # [A, 1, L]
    t = jnp.arange(x.q.shape[2], dtype=jnp.int32)[:, None] // plan.group  # [R, 1]
    of_row = (slice(None), None, None, None)
    visible = (
        (j < steps.blocks(lengths)[of_row] * BLOCK)
        & steps.exists(j, lengths[of_row])
        & steps.allows(plan, positions[of_row] + t, j)
    )  # [B, A, R, L]
    z = steps.logits(plan, jnp.einsum("bkrh,bkalh->bkarl", x.q, k, **_PRODUCT))
    z = jnp.where(visible[:, None], z, -jnp.inf)
    splits = steps.store(steps.part(z, steps.hide(v, visible.any(axis=2)[:, None, :, :, None])), plan)
    merged = steps.merge([Part(*(a[:, :, n] for a in splits)) for n in range(SPLITS)])
    top = z.max(axis=(2, 4))
    if sinks is None:
        return merged, top
    by_row = jnp.tile(steps.sinks(sinks, plan).reshape(1, x.q.shape[1], plan.group), plan.q_length)
    return steps.add_sinks(splits, merged, by_row[..., None], steps.merge), top


@jax.custom_jvp
def _not_differentiable(q: Array) -> Array:
    return q


@_not_differentiable.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    """Raise: the kernel has no backward pass."""
    raise NotImplementedError("passes no gradient")


def _build_operands(
    q: Array, k: Array, v: Array, mask: Mask, lengths: Array, positions: Array, soft_cap: Any, scale: Any
) -> tuple[RaggedPlan, Operands]:
    """Lower the mask and bring the operands into the kernel's layout."""
    batch, q_length, num_q_heads, depth = q.shape
    formula, own, moved = lower_lengths(mask, batch, k.shape[1])
    plan = RaggedPlan(
        mask=formula,
        q_length=q_length,
        group=num_q_heads // k.shape[2],
        kv_length=k.shape[1],
        scale=1 / math.sqrt(depth) if scale is None else scale,
        soft_cap=soft_cap,
    )
    lengths = jnp.asarray(own) if lengths is None else jnp.minimum(jnp.asarray(lengths), own)
    positions = jnp.asarray(moved) if positions is None else jnp.asarray(positions) + moved
    rows = flatten_queries(_not_differentiable(jnp.asarray(q)), k.shape[2])
    return plan, Operands(rows, jnp.asarray(k), jnp.asarray(v), lengths, positions)


def attention(
    steps: DecodeSteps,
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask = _EVERY,
    lengths: Array = None,
    positions: Array = None,
    segment_ids: Any = None,
    soft_cap: float | None = None,
    sinks: Array = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    returns_part: bool = False,
) -> Any:
    """Compute the canonical call; with `returns_part`, return the unnormalised part."""
    if segment_ids is not None or bias is not None:
        raise NotImplementedError("takes neither segment ids nor a bias")
    plan, operands = _build_operands(q, k, v, mask, lengths, positions, soft_cap, scale)
    part, top = _kernel(steps, plan, operands, None if sinks is None else jnp.asarray(sinks))
    if returns_part:
        return steps.returned(restore_queries(part, plan.q_length))
    return _finish_call(steps, plan, part, top, q.dtype, save_residuals)


def _finish_call(steps: DecodeSteps, plan: RaggedPlan, part: Part, top: Array, dtype: Any, save_residuals: bool) -> Any:
    """Normalise the part; return `out`, with residuals if asked."""
    found = steps.normalise(restore_queries(part, plan.q_length))
    out = steps.round_out(found.out, dtype)
    if not save_residuals:
        return out
    top = top.reshape(*top.shape[:2], plan.q_length, -1).swapaxes(2, 3).reshape(top.shape[0], -1, plan.q_length)
    return out, {"logsumexp": found.logsumexp.swapaxes(1, 2), "max_logits": top}


def lower_fixed_mask(mask: Mask, *sizes: int) -> Any:
    """Lower the mask for kernels that support no window of each sequence's own."""
    validate_mask(mask, *sizes)
    return lower_mask(mask, *sizes)


def build_decode_implementation(
    steps: DecodeSteps, name: str = "decode", offers: frozenset[str] = frozenset()
) -> Implementation:
    """Build the kernel with these steps."""
    return Implementation(
        name=name,
        call=functools.partial(attention, steps),
        unsupported=UNSUPPORTED,
        offers=offers,
        supports_case=refuse_mixed_windows,
        arithmetic=Arithmetic(),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="zero",
        lower_mask=lower_mask if "own_window" in offers else lower_fixed_mask,
        parts=functools.partial(attention, steps, returns_part=True),
        merge=steps.merge,
    )


Schedule = ragged_tpu.BuildSteps


def tpu_attention(
    schedule: Schedule,
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask = _EVERY,
    lengths: Array = None,
    positions: Array = None,
    segment_ids: Any = None,
    soft_cap: float | None = None,
    sinks: Array = None,
    bias: Any = None,
    scale: float | None = None,
    save_residuals: bool = False,
    interpret: Any = True,
) -> Any:
    """Compute the canonical call by the Pallas TPU kernel with this schedule."""
    if segment_ids is not None or bias is not None:
        raise NotImplementedError("takes neither segment ids nor a bias")
    if q.shape[1] != 1:
        raise NotImplementedError("takes one query token")
    if q.dtype == jnp.float16:
        raise NotImplementedError("takes no float16")
    plan, operands = _build_operands(q, k, v, mask, lengths, positions, soft_cap, scale)
    part = ragged_tpu.attend(plan, operands, block_kv=64, interpret=interpret, schedule=schedule)
    top = part.max[..., 0]
    if sinks is not None:
        by_row = jnp.tile(jnp.asarray(sinks).reshape(1, operands.q.shape[1], plan.group), plan.q_length)
        part = add_sink_once(part, part, by_row[..., None], softmax_merge.merge)
    return _finish_call(DecodeSteps(), plan, part, top, q.dtype, save_residuals)


def build_decode_tpu_implementation(schedule: Schedule = build_steps, name: str = "decode_tpu") -> Implementation:
    """Build the Pallas TPU kernel with this schedule."""
    return Implementation(
        name=name,
        call=functools.partial(tpu_attention, schedule),
        unsupported=UNSUPPORTED | {"f16": "takes no float16"},
        supports_case=_find_unsupported_phase,
        arithmetic=Arithmetic(),
        differentiable_residuals=frozenset(),
        gradients=frozenset(),
        empty_rows="zero",
        lower_mask=lower_fixed_mask,
        accelerator=Accelerator(
            platform="tpu",
            interpreted=True,
            under_interpreter=lambda parameters: functools.partial(tpu_attention, schedule, interpret=parameters),
        ),
    )


def _find_unsupported_phase(case: Case) -> str | None:
    return None if case.phase == "decode" else "takes one query token"
