"""Attention over a ring that keeps the first tokens, made of steps of which a planted bug replaces one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.masks import FIRST_TOKENS
from impls.contract.implementation import Implementation
from tests.planted.planting import ring_cache, stored_bug
from tests.planted.planting.ring_cache import RingSteps, Step, find_tokens, in_ring

Array = jax.Array


def find_kept_tokens(lengths: Array, slots: int, first: int) -> Array:
    """Return the token in each slot, `[rows, slots]`: the first tokens, then those of the ring; negative if none."""
    slot = jnp.arange(first)
    kept = jnp.where(slot < lengths[:, None], slot, -1)
    token = find_tokens(lengths - first, slots - first)
    return jnp.concatenate([kept, jnp.where(token >= 0, token + first, -1)], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptSteps:
    """Steps of attention over such a ring, in order; the defaults are correct."""

    first: Step = lambda first: first
    tokens: Step = find_kept_tokens  # (lengths, slots, first) -> [rows, slots]
    written: Step = lambda token, lengths: token >= 0
    shown: Step = lambda within, token, first: within | (token < first)[:, None]  # [rows, T, slots]


def build_call(steps: KeptSteps) -> Callable[..., Any]:
    """Build the call made of `steps`."""

    def attention(
        q: Array, k_cache: Array, v_cache: Array, *, cache_seqlens: Array, num_sink_tokens: int = 0, **options: Any
    ) -> Any:
        first = steps.first(num_sink_tokens)
        ring = RingSteps(
            tokens=lambda lengths, slots: steps.tokens(lengths, slots, first),
            written=steps.written,
            window=lambda token, position, left, slots: steps.shown(
                RingSteps().window(token, position, left, slots), token, first
            ),
        )
        return ring_cache.build_call(ring)(q, k_cache, v_cache, cache_seqlens=cache_seqlens, **options)

    return attention


def build_implementation(name: str, steps: KeptSteps = KeptSteps()) -> Implementation:
    """Build the kernel made of `steps` as the gate takes it."""
    return dataclasses.replace(
        ring_cache.build_implementation(name), call=build_call(steps), offers=frozenset({FIRST_TOKENS})
    )


def keeps(case: Case) -> bool:
    """Return whether the ring of a case keeps first tokens, and a sequence has lost others."""
    return in_ring(case) and case.first_tokens > 0 and ring_cache.has_turned(case)


bug = functools.partial(
    stored_bug.bug, family="ring", build=build_implementation, shows="out logsumexp max_logits", trigger=keeps
)
"""A kernel over such a ring of which one of `KeptSteps` is wrong."""
