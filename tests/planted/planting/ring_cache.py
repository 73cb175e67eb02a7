"""Attention over a ring buffer, made of steps of which a planted bug replaces one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import has
from impls.contract.implementation import Implementation
from tests.planted.planting import stored_bug
from tests.planted.planting.served import softmax

Array = jax.Array
Step = Callable[..., Any]


def find_tokens(lengths: Array, slots: int) -> Array:
    """Return the token in each slot, `[rows, slots]`: the last one that the ring put there; negative if none did."""
    slot = jnp.arange(slots)
    return lengths[:, None] - 1 - (lengths[:, None] - 1 - slot) % slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingSteps:
    """Steps of attention over a ring buffer, in order; the defaults are correct."""

    keys: Step = lambda x: x.swapaxes(1, 2)  # k_cache [rows, K, slots, H] -> [rows, slots, K, H]
    values: Step = lambda x: x.swapaxes(1, 2)
    lengths: Step = lambda lengths, slots: lengths
    tokens: Step = find_tokens  # (lengths, slots) -> [rows, slots]
    position: Step = lambda lengths, count, slots: lengths[:, None] - count + jnp.arange(count)  # [rows, T]
    written: Step = lambda token, lengths: token >= 0
    causal: Step = lambda token, position, slots: token[:, None, :] <= position[..., None]  # [rows, T, slots]
    window: Step = lambda token, position, left, slots: token[:, None, :] >= position[..., None] - left
    clean: Step = lambda x, seen: jnp.where(seen[..., None, None], x, 0)  # of keys
    clean_values: Step = lambda x, seen: jnp.where(seen[..., None, None], x, 0)


def build_call(steps: RingSteps) -> Callable[..., Any]:
    """Build the call made of `steps`."""

    def attention(
        q: Array,  # [rows, T, N, H]
        k_cache: Array,  # [rows, K, slots, H]
        v_cache: Array,  # [rows, K, slots, V]
        *,
        cache_seqlens: Array,  # [rows]
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        save_residuals: bool = False,
    ) -> Any:
        rows, count, heads, depth = q.shape
        slots, kv_heads = k_cache.shape[2], k_cache.shape[1]
        lengths = steps.lengths(cache_seqlens, slots)
        token, position = steps.tokens(lengths, slots), steps.position(lengths, count, slots)
        allowed = steps.causal(token, position, slots) & steps.written(token, lengths)[:, None, :]
        if window is not None:
            allowed &= steps.window(token, position, window[0], slots)
        seen = allowed.any(axis=1)
        k, v = steps.clean(steps.keys(k_cache), seen), steps.clean_values(steps.values(v_cache), seen)
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        x = jnp.einsum("btnh,bsnh->btns", q, k, preferred_element_type=jnp.float32)
        x *= depth**-0.5 if scale is None else scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        per_query = jnp.repeat(v, count, axis=0)
        shown = jnp.broadcast_to(allowed[:, :, None], x.shape)
        logits, shown = (y.reshape(rows * count, *y.shape[2:]) for y in (x, shown))
        out, lse, top = softmax(logits, shown, per_query, sinks)
        out = out.reshape(rows, count, heads, -1).astype(q.dtype)
        if not save_residuals:
            return out
        lse, top = (y.reshape(rows, count, heads).swapaxes(1, 2) for y in (lse, top))
        return out, {"logsumexp": lse, "max_logits": top}

    return attention


def build_implementation(name: str, steps: RingSteps = RingSteps()) -> Implementation:
    """Build the kernel made of `steps` as the gate takes it."""
    return Implementation(
        name=name,
        call=build_call(steps),
        storage="ring",
        gradients=frozenset(),
        differentiable_residuals=frozenset(),
        empty_rows="zero",
        unsupported={"train": "a cache is read, not differentiated"},
        refuses_by_signature=True,
    )


in_ring = has("ring")


def has_turned(case: Case) -> bool:
    """Return whether a sequence has more tokens than its ring has slots."""
    return in_ring(case) and case.stored is not None and max(case.kv_lengths) > (case.stored.size or 0)


def has_free_slots(case: Case) -> bool:
    """Return whether a sequence has fewer tokens than its ring has slots."""
    return in_ring(case) and case.stored is not None and min(case.kv_lengths) < (case.stored.size or 0)


bug = functools.partial(
    stored_bug.bug, family="ring", build=build_implementation, shows="out logsumexp max_logits", trigger=in_ring
)
"""A kernel over a ring buffer of which one of `RingSteps` is wrong."""
