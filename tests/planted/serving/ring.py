"""Bugs of ring buffers: which token a slot holds, where queries stand, and how the cache is laid out."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import both
from tests.bank import PlantedBug
from tests.planted.planting.ring_cache import RingSteps, bug, find_tokens, has_free_slots, has_turned, in_ring

Array = jax.Array


def _is_windowed(case: Case) -> bool:
    return in_ring(case) and "window" in case.features


def _has_several_key_heads(case: Case) -> bool:
    return in_ring(case) and case.num_kv_heads > 1


def _has_several_queries(case: Case) -> bool:
    return in_ring(case) and case.q_length > 1


def _read_as_slots_first(x: Array) -> Array:
    """Read a head-major cache as if slots came before heads."""
    rows, heads, slots, depth = x.shape
    return x.reshape(rows, slots, heads, depth)


def _start_from_length(lengths: Array, slots: int) -> Array:
    """Take the next slot to be written for the last one that was."""
    return find_tokens(lengths + 1, slots)


def _count_turns_at_the_border(lengths: Array, slots: int) -> Array:
    """Count one turn too few where a sequence has just filled its ring."""
    full = (lengths[:, None] > slots) & (lengths[:, None] % slots == 0)
    return find_tokens(lengths, slots) - jnp.where(full, slots, 0)


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "slot-taken-for-the-token",
        RingSteps(tokens=lambda lengths, slots: jnp.broadcast_to(jnp.arange(slots), (len(lengths), slots))),
        kind="slot without modulo",
        reference="inferred from mistral-src's rolling buffer cache, which unrotates what it reads",
        trigger=has_turned,
    ),
    bug(
        "slots-that-nobody-wrote-are-read",
        RingSteps(
            written=lambda token, lengths: jnp.ones(token.shape, bool),
            window=lambda token, position, left, slots: jnp.where(
                token < 0, True, token + 0 * position[..., :1] >= position[:, -1:] - left
            )[:, None, :],
        ),
        kind="stale slots",
        reference="inferred from huggingface/transformers' StaticCache, whose unwritten slots are zeros to be masked",
        trigger=has_free_slots,
    ),
    bug(
        "next-slot-taken-for-the-last",
        RingSteps(tokens=_start_from_length),
        kind="off by one slot",
        reference="inferred: the index of the next write is kept, and read as that of the last",
    ),
    bug(
        "turn-lost-where-the-ring-is-just-full",
        RingSteps(tokens=_count_turns_at_the_border),
        kind="position at wrap-around",
        reference="inferred: length // slots where (length - 1) // slots is meant",
        trigger=has_turned,
    ),
    bug(
        "heads-and-slots-of-keys-mixed-up",
        RingSteps(keys=_read_as_slots_first),
        kind="strides of a head-major cache",
        reference="inferred from flashinfer's layouts NHD and HND, of which one is read as the other",
        trigger=_has_several_key_heads,
    ),
    bug(
        "causal-by-slot",
        RingSteps(
            causal=lambda token, position, slots: jnp.arange(slots) <= (position % slots)[..., None],
        ),
        kind="mask by slot",
        reference="inferred: a causal mask of the cache's own length, as for a cache that does not go around",
        trigger=has_turned,
    ),
    bug(
        "length-cut-to-the-slots",
        RingSteps(lengths=lambda lengths, slots: jnp.minimum(lengths, slots)),
        kind="length",
        reference="inferred: the number of valid slots where the number of tokens is meant",
        trigger=has_turned,
    ),
    bug(
        "window-taken-for-the-whole-ring",
        RingSteps(window=lambda token, position, left, slots: token[:, None, :] >= position[..., None] - slots + 1),
        kind="window",
        reference="inferred: a ring as large as the window needs no mask, and one that is larger does",
        trigger=_is_windowed,
    ),
    bug(
        "queries-stand-behind-the-cache",
        RingSteps(position=lambda lengths, count, slots: lengths[:, None] + jnp.arange(count)),
        kind="position of queries",
        reference="inferred from flash_attn_with_kvcache, where cache_seqlens are those before new keys are appended",
        trigger=both(in_ring, _is_windowed),
    ),
    bug(
        "all-queries-stand-at-the-end",
        RingSteps(position=lambda lengths, count, slots: jnp.repeat(lengths[:, None] - 1, count, axis=1)),
        kind="position of queries",
        reference="inferred: a decode kernel that is given several queries",
        trigger=_has_several_queries,
    ),
    bug(
        "length-of-the-first-row-for-all",
        RingSteps(lengths=lambda lengths, slots: jnp.broadcast_to(lengths[:1], lengths.shape)),
        kind="length",
        reference="inferred from jax-ml/jax's cache_index of flax.linen, one for the whole batch",
    ),
)
