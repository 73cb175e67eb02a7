"""Bugs of the scores that an indexer returns for the keys that it chooses, and of their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.triggers import has
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting.scored_indexer import Array, PullSteps, SortSteps, pulled_scores, sorted_scores


def _bug(name: str, steps: Any, *, build: Callable[[str, Any], Implementation], shows: str) -> PlantedBug:
    return PlantedBug(
        name=f"index-scores-{name}",
        family="gradients",
        kind="indexer.scores",
        reference="inferred",
        shows=tuple(shows.split()),
        build=functools.partial(build, f"index-scores-{name}", steps),
        trigger=has("lightning"),
    )


_sorted = functools.partial(_bug, build=sorted_scores)
_pulled = functools.partial(_bug, build=pulled_scores)


def _pass_straight_through(x: Array) -> Array:
    """Return relu with the derivative of the identity."""
    return x + jax.lax.stop_gradient(jax.nn.relu(x) - x)


def _weigh_by_constants(x: Array, w: Array) -> Array:
    return jnp.einsum("bth,bths->bts", jax.lax.stop_gradient(w), x, precision="highest")


def _add_in_16_bits(total: Array, at: Any, found: Array) -> Array:
    return total.astype(jnp.bfloat16).at[at].add(found.astype(jnp.bfloat16)).astype(total.dtype)


BUGS: tuple[PlantedBug, ...] = (
    _sorted("not-weighed", SortSteps(weigh=lambda x, w: x.sum(axis=2)), shows="scores dq dk dweights"),
    _sorted(
        "in-16-bits",
        SortSteps(finish=lambda scores: scores.astype(jnp.bfloat16).astype(jnp.float32)),
        shows="scores dq dk dweights",
    ),
    _sorted(
        "up-to-the-largest-f16",
        SortSteps(finish=lambda scores: jnp.clip(scores, -65504, 65504)),
        shows="scores dq dk dweights",
    ),
    _sorted("in-another-order", SortSteps(finish=lambda scores: scores[..., ::-1]), shows="scores dq dk dweights"),
    _sorted("straight-through", SortSteps(bend=_pass_straight_through), shows="dq dk"),
    _sorted("weights-are-constants", SortSteps(weigh=_weigh_by_constants), shows="dweights"),
    _sorted("without-gradients", SortSteps(finish=jax.lax.stop_gradient), shows="dq dk dweights"),
    _pulled("all-heads-active", PullSteps(is_active=lambda x: x == x), shows="dq dk"),
    _pulled("weights-by-raw-products", PullSteps(bend=lambda x: x), shows="dweights"),
    _pulled(
        "key-gradient-of-one-list-only",
        PullSteps(add=lambda total, at, found: total.at[at].set(found)),
        shows="dk",
    ),
    _pulled("key-gradient-added-in-16-bits", PullSteps(add=_add_in_16_bits), shows="dk"),
    _pulled("key-gradient-of-head-0", PullSteps(heads=lambda x: x.at[:, :, 1:].set(0)), shows="dk"),
)
