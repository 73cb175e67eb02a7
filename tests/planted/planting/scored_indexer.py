"""Indexers that also return the scores of the keys that they choose, made of steps that a bug may replace.

One scores all keys and takes the scores that it sorted, which JAX differentiates. The other gathers the chosen keys,
scores them again, and has a backward pass written by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation

Array = jax.Array
Step = Callable[..., Any]


def _multiply(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision="highest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortSteps:
    """The steps of the indexer that returns the scores that it sorted; the defaults are correct."""

    bend: Step = jax.nn.relu
    weigh: Step = lambda x, w: _multiply("bth,bths->bts", w, x)
    finish: Step = lambda scores: scores


def _choose(scores: Array, top_k: int) -> tuple[Array, Array]:
    """Return places and scores of the highest scores, `[B, T, top_k]`; -1 and 0 where there is no candidate."""
    count = min(top_k, scores.shape[-1])
    values, places = jax.lax.top_k(scores, count)
    is_there = values > -jnp.inf
    widths = ((0, 0), (0, 0), (0, top_k - count))
    places = jnp.pad(jnp.where(is_there, places, -1), widths, constant_values=-1)
    return places, jnp.pad(jnp.where(is_there, values, 0), widths)


def _score_all(steps: SortSteps, q: Array, k: Array, weights: Array, causal: bool) -> Array:
    scores = steps.weigh(steps.bend(_multiply("bthd,bsd->bths", q, k)), weights)
    return jnp.where(jnp.tri(scores.shape[1], scores.shape[2], dtype=bool), scores, -jnp.inf) if causal else scores


def sorting(steps: SortSteps = SortSteps()) -> Callable[..., Any]:
    """The indexer that returns the scores that it sorted."""

    def indexer(
        q: Array, k: Array, weights: Array, *, top_k: int, causal: bool = False, return_scores: bool = False
    ) -> Any:
        """Choose the keys with the highest scores."""
        q, k, weights = (x.astype(jnp.float32) for x in (q, k, weights))
        places, _ = _choose(_score_all(SortSteps(), q, k, weights, causal), top_k)
        if not return_scores:
            return places
        all_scores = _score_all(steps, q, k, weights, causal)
        scores = jnp.take_along_axis(all_scores, jnp.maximum(places, 0), axis=2)
        return places, steps.finish(jnp.where(places < 0, 0, scores))

    return indexer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PullSteps:
    """The steps of the backward pass written by hand; the defaults are correct."""

    is_active: Step = lambda x: x > 0
    bend: Step = jax.nn.relu  # for the gradient of weights
    add: Step = lambda total, at, found: total.at[at].add(found)
    heads: Step = lambda x: x  # terms `[B, T, N, e]` of dk


def pulling(steps: PullSteps = PullSteps()) -> Callable[..., Any]:
    """The indexer with a backward pass written by hand."""

    @jax.custom_vjp
    def score(q: Array, k: Array, weights: Array, places: Array) -> Array:
        return _multiply("btn,btne->bte", weights, jax.nn.relu(_multiply("btnd,bted->btne", q, _gather(k, places))))

    def save(*given: Array) -> tuple[Array, tuple[Array, ...]]:
        return score(*given), given

    def pull_back(given: tuple[Array, ...], cotangent: Array) -> tuple[Any, ...]:
        q, k, weights, places = given
        keys = _gather(k, places)
        x = _multiply("btnd,bted->btne", q, keys)
        cotangent = jnp.where(places < 0, 0, cotangent)[:, :, None]
        dx = jnp.where(steps.is_active(x), cotangent * weights[..., None], 0)
        dk = _multiply("btne,btnd->bted", steps.heads(dx), q)
        at = jnp.arange(q.shape[0])[:, None, None], jnp.maximum(places, 0)
        dw = (cotangent * steps.bend(x)).sum(axis=-1)
        return _multiply("btne,bted->btnd", dx, keys), steps.add(jnp.zeros_like(k), at, dk), dw, None

    score.defvjp(save, pull_back)

    def indexer(
        q: Array, k: Array, weights: Array, *, top_k: int, causal: bool = False, return_scores: bool = False
    ) -> Any:
        """Choose the keys with the highest scores."""
        q, k, weights = (x.astype(jnp.float32) for x in (q, k, weights))
        places, _ = _choose(jax.lax.stop_gradient(_score_all(SortSteps(), q, k, weights, causal)), top_k)
        return (places, jnp.where(places < 0, 0, score(q, k, weights, places))) if return_scores else places

    return indexer


def _gather(k: Array, places: Array) -> Array:
    return k[jnp.arange(len(k))[:, None, None], jnp.maximum(places, 0)]


def sorted_scores(name: str, steps: SortSteps = SortSteps()) -> Implementation:
    """The indexer that returns the scores that it sorted, as an implementation."""
    return build_implementation(sorting(steps), name)


def pulled_scores(name: str, steps: PullSteps = PullSteps()) -> Implementation:
    """The indexer with a backward pass written by hand, as an implementation."""
    return build_implementation(pulling(steps), name)
