"""Bugs of rings that keep the first tokens of each sequence: where tokens lie, and which of them a query sees.

Bugs of the first half are steps of `tests.planted.planting.kept_ring`. Those of the second half change a passage of
`tests.kernels.ring_attention.attend_by_token`, which looks up the slot of each token that a query sees.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.execution.plain_functions import build_implementation
from conformance.mutation.kernels.triggers import Trigger
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting.kept_ring import KeptSteps, bug, find_kept_tokens, keeps
from tests.planted.planting.ring_cache import find_tokens, has_free_slots
from tests.planted.planting.source_change import Change, changed

Array = jax.Array
_PLACE = "slot of a token"
_SEEN = "tokens that a query sees"
_RESULTS = "out logsumexp max_logits"


def _turn_over_all_slots(lengths: Array, slots: int, first: int) -> Array:
    """Take the number of all slots for the modulus of the ring."""
    token = lengths[:, None] - 1 - (lengths[:, None] - 1 - jnp.arange(slots)) % slots
    return jnp.where(jnp.arange(slots) < first, find_kept_tokens(lengths, slots, first), token)


def _start_from_length(lengths: Array, slots: int, first: int) -> Array:
    """Take the slot of the oldest token for that of the newest."""
    kept = find_kept_tokens(lengths, slots, first)
    return jnp.where(jnp.arange(slots) < first, kept, find_kept_tokens(lengths + 1, slots, first))


def _has_one_free_slot(case: Case) -> bool:
    return case.stored is not None and (case.stored.size or 0) - 1 in case.kv_lengths


def _lose_newest_of_nearly_full(lengths: Array, slots: int, first: int) -> Array:
    """Take a ring with one free slot for a full one, whose newest token is in the last slot."""
    token = find_kept_tokens(lengths, slots, first)
    is_newest = token == lengths[:, None] - 1
    return jnp.where((lengths == slots - 1)[:, None] & is_newest & (first > 0), -1, token)


_IN_STEPS = (
    bug(
        "first-tokens-overwritten-on-wrap",
        KeptSteps(tokens=lambda lengths, slots, first: find_tokens(lengths, slots)),
        kind=_PLACE,
        reference="inferred from ml-explore/mlx-lm's RotatingKVCache, whose `keep` is left out of the index",
    ),
    bug(
        "kept-ring-turns-over-all-slots",
        KeptSteps(tokens=_turn_over_all_slots),
        kind=_PLACE,
        reference="inferred: modulus slots where slots - F is meant",
    ),
    bug(
        "oldest-slot-of-a-kept-ring-off-by-one",
        KeptSteps(tokens=_start_from_length),
        kind=_PLACE,
        reference="inferred: the index of the next write is kept, and read as that of the last",
    ),
    bug(
        "newest-of-a-nearly-full-kept-ring-lost",
        KeptSteps(tokens=_lose_newest_of_nearly_full),
        kind=_PLACE,
        reference="inferred: lengths that are compared with slots - 1",
        trigger=lambda case: case.first_tokens > 0 and _has_one_free_slot(case),
    ),
    bug(
        "one-first-token-too-few-kept",
        KeptSteps(first=lambda first: max(0, first - 1)),
        kind=_PLACE,
        reference="inferred",
    ),
    bug(
        "one-first-token-too-many-kept",
        KeptSteps(first=lambda first: first + 1 if first else 0),
        kind=_PLACE,
        reference="inferred",
    ),
    bug(
        "first-tokens-hidden-behind-the-window",
        KeptSteps(shown=lambda within, token, first: within),
        kind=_SEEN,
        reference="ml-explore/mlx-lm#1443, sinks evicted",
    ),
    bug(
        "unwritten-slots-taken-for-first-tokens",
        KeptSteps(written=lambda token, lengths: jnp.ones(token.shape, bool)),
        kind=_SEEN,
        reference="inferred: -1 marks a slot without a token, and is less than F",
        trigger=lambda case: case.first_tokens > 0 and has_free_slots(case),
    ),
)


def _build_changed(name: str, before: str, after: str) -> Implementation:
    package = f"planted_{name.replace('-', '_')}"
    changed("tests.kernels", package, Change("ring_attention", before, after))
    return build_implementation(importlib.import_module(f"{package}.ring_attention").attend_by_token, name)


def _in_text(name: str, before: str, after: str, *, kind: str, trigger: Trigger = keeps) -> PlantedBug:
    return PlantedBug(
        name=name,
        family="ring",
        kind=kind,
        reference="inferred",
        shows=tuple(_RESULTS.split()),
        build=functools.partial(_build_changed, name, before, after),
        trigger=trigger,
    )


_IN_TEXT = (
    _in_text("text-modulus-of-all-slots", "(seen - first) % (slots - first)", "(seen - first) % slots", kind=_PLACE),
    _in_text("text-ring-begins-at-slot-0", "first + (seen - first) %", "(seen - first) %", kind=_PLACE),
    _in_text("text-oldest-slot-off-by-one", "(seen - first) % (", "(seen - first + 1) % (", kind=_PLACE),
    _in_text(
        "text-first-tokens-counted-twice",
        "(seen >= first)",
        "(seen >= 0)",
        kind=_SEEN,
        trigger=lambda case: case.first_tokens > 0,
    ),
    _in_text(
        "text-first-tokens-hidden-behind-the-window",
        "kept <= position[..., None]",
        "(kept <= position[..., None]) & (kept >= position[..., None] - left)",
        kind=_SEEN,
    ),
    _in_text(
        "text-later-first-tokens-seen",
        "kept <= position[..., None]",
        "(kept >= 0) & (position[..., None] >= 0)",
        kind=_SEEN,
        trigger=lambda case: case.first_tokens > 1 and case.q_length > 1,
    ),
    _in_text(
        "text-window-shortened-by-the-first-tokens",
        "jnp.arange(left + 1)",
        "jnp.arange(max(left + 1 - first, 1))",
        kind=_SEEN,
    ),
)

BUGS: tuple[PlantedBug, ...] = (*_IN_STEPS, *_IN_TEXT)
