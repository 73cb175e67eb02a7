"""Bugs of attention to listed keys in a call that also writes keys: lists may name those that it writes."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from conformance.mutation.kernels.triggers import has
from tests.bank import PlantedBug
from tests.planted.planting.listed_writes import Array, ListWriteSteps, written


def _bug(name: str, steps: Any, shows: str = "out") -> PlantedBug:
    return PlantedBug(
        name=f"listed-writes-{name}",
        family="masks",
        kind="lists.writes",
        reference="inferred",
        shows=tuple(shows.split()),
        build=functools.partial(written, f"listed-writes-{name}", steps),
        trigger=has("indices", "paged"),
    )


def _skip_new(lists: Array, position: Array, queries: Array) -> Array:
    """Skip the keys that the call writes before the query's own."""
    return jnp.where((lists > position - queries) & (lists < position), -1, lists)


def _drop_sign_of_zero(x: Array) -> Array:
    """Return 0.0 for -0.0, as an addition of 0 does."""
    return jnp.where(x == 0, 0, x)


def _add_own(lists: Array, position: Array, queries: Array) -> Array:
    is_listed = (lists == position).any(axis=-1, keepdims=True)
    return jnp.concatenate([lists, jnp.where(is_listed, -1, position)], axis=-1)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "pages-from-before",
        ListWriteSteps(pick_pages=lambda before, after: before),
    ),
    _bug("values-from-before", ListWriteSteps(pick_pages=lambda before, after: [after[0], before[1]])),
    _bug("zeros-lose-their-sign", ListWriteSteps(store=_drop_sign_of_zero), "k_pages v_pages"),
    _bug("new-keys-not-listed", ListWriteSteps(read=_skip_new)),
    _bug("own-key-not-listed", ListWriteSteps(read=lambda lists, at, queries: jnp.where(lists == at, -1, lists))),
    _bug("own-key-always-seen", ListWriteSteps(read=_add_own)),
    _bug("places-behind-the-new-keys", ListWriteSteps(read=lambda lists, at, queries: lists - queries)),
)
