"""Wrong steps of decode attention, each in place of a right one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cases.masks import Window
from impls.ragged.ragged_plan import RaggedPlan, compute_allowed
from impls.ragged.ragged_tpu import RaggedSteps, build_steps
from impls.softmax_merge import Part
from tests.kernels.split_decode import BLOCK, DecodeSteps, compute_part, is_allowed

Array = Any


def first_row_for_all(lengths: Array, plan: RaggedPlan) -> Array:
    return jnp.broadcast_to(lengths[:1], lengths.shape)


def of_next_row(lengths: Array, plan: RaggedPlan) -> Array:
    return jnp.roll(lengths, -1)


def at_the_end_of_the_cache(positions: Array, lengths: Array, plan: RaggedPlan) -> Array:
    """What is right as long as the cache is full: a single token is taken to be the last that it can hold."""
    return jnp.full_like(positions, plan.kv_length - 1) if plan.q_length == 1 else positions


def at_the_start(positions: Array, lengths: Array, plan: RaggedPlan) -> Array:
    return jnp.zeros_like(positions) if plan.q_length == 1 else positions


def of_the_first_row(positions: Array, lengths: Array, plan: RaggedPlan) -> Array:
    return jnp.broadcast_to(positions[:1], positions.shape)


def last_tokens_of_the_cache(positions: Array, lengths: Array, plan: RaggedPlan) -> Array:
    return jnp.where(windowed(plan), plan.kv_length - plan.q_length, positions)


def behind_the_last_token(positions: Array, lengths: Array, plan: RaggedPlan) -> Array:
    """The length, which is where the next token will be, is taken for the last one's position."""
    return jnp.where(windowed(plan), positions + 1, positions)


def windowed(plan: RaggedPlan) -> bool:
    return isinstance(plan.mask, Window) and plan.mask.left is not None


def of_the_last_query(plan: RaggedPlan, positions: Array, j: Array) -> Array:
    """Where a window starts is asked of the last query and not of each."""
    return is_allowed(plan, positions, j) & is_allowed(plan, positions[:, :, -1:], j)


def first_query_for_all(plan: RaggedPlan, positions: Array, j: Array) -> Array:
    return compute_allowed(plan, plan.kv_length, positions[:, :, :1], j)


def window_one_wider(plan: RaggedPlan, positions: Array, j: Array) -> Array:
    return is_allowed(plan, positions, j) | is_allowed(plan, positions, j + 1)


def whole_blocks_of_a_window(plan: RaggedPlan, positions: Array, j: Array) -> Array:
    """A block that the window starts in is left out."""
    first = is_allowed(plan, positions, j // BLOCK * BLOCK)
    return is_allowed(plan, positions, j) & (first | (j // BLOCK == positions // BLOCK))


def never_written(z: Array, v: Array) -> Part:
    """Splits without keys keep what their memory held, which is another call's result at best."""
    part = compute_part(z, v)
    nothing = part.max == -jnp.inf
    return Part(*(jnp.where(nothing, 1.0, x) for x in part))


def garbage_of_a_short_row(lengths: Array, plan: RaggedPlan) -> Array:
    return jnp.where(lengths == 0, plan.kv_length, lengths)


def zero_over_zero(part: Part) -> Any:
    found = DecodeSteps().normalise(part)
    return found._replace(out=part.out / part.sum)


def mask_value(z: Array, v: Array) -> Part:
    """Hidden logits are a large negative number: a split that sees none of its keys has them all, with weight 1."""
    return compute_part(jnp.where(z == -jnp.inf, -1e30, z), v)


def highest_of_two_splits(parts: Part, plan: RaggedPlan) -> Part:
    """The running maximum is carried on to the next split, and the sum is not rescaled to it."""
    return parts._replace(max=jax.lax.cummax(parts.max, axis=2))


def cap_dropped(plan: RaggedPlan, products: Array) -> Array:
    return products * plan.scale


def scale_of_values(plan: RaggedPlan, products: Array) -> Array:
    """The scale before the cap's derivative is folded in base 2, and never taken out again."""
    x = products * plan.scale
    if plan.soft_cap is None:
        return x
    return plan.soft_cap * jnp.tanh(x * 1.4426950408889634 / plan.soft_cap) / 1.4426950408889634


def kept_in_f32(out: Array, dtype: Any) -> Array:
    return out


def no_steps_for_nothing(plan: RaggedPlan, lengths: Array, positions: Array, block: int) -> RaggedSteps:
    """Rows without keys have no step, so that nothing writes what they are."""
    steps = build_steps(plan, lengths, positions, block)
    computes = steps.blocks[steps.row] > 0
    order = jnp.argsort(~computes, stable=True)
    total = jnp.maximum(1, jnp.sum(computes & (jnp.arange(len(order)) < steps.total), dtype=jnp.int32))
    return RaggedSteps(total, steps.row[order], steps.kv_row[order], steps.kv_block[order], steps.blocks)


def whole_blocks_only(plan: RaggedPlan, lengths: Array, positions: Array, block: int) -> RaggedSteps:
    return build_steps(plan, lengths // block * block, positions, block)


def ahead_of_the_last_row(plan: RaggedPlan, lengths: Array, positions: Array, block: int) -> RaggedSteps:
    """A row without keys fetches the first block of the next one meanwhile, be there a next one or not."""
    steps = build_steps(plan, lengths, positions, block)
    nothing = steps.blocks[steps.row] == 0
    return steps._replace(
        kv_row=jnp.where(nothing, steps.row + 1, steps.kv_row), kv_block=jnp.where(nothing, 0, steps.kv_block)
    )


def block_before_the_first(plan: RaggedPlan, lengths: Array, positions: Array, block: int) -> RaggedSteps:
    """A row without keys points to its last block, number -1."""
    steps = build_steps(plan, lengths, positions, block)
    nothing = steps.blocks[steps.row] == 0
    return steps._replace(
        kv_row=jnp.where(nothing, steps.row, steps.kv_row), kv_block=jnp.where(nothing, -1, steps.kv_block)
    )


def another_rows_blocks(plan: RaggedPlan, lengths: Array, positions: Array, block: int) -> RaggedSteps:
    return build_steps(plan, jnp.roll(lengths, -1), positions, block)
