"""Bugs of lightning indexers: the score of a key, which keys may be chosen, and how a list is padded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.execution.plain_functions import build_implementation
from conformance.mutation.kernels.triggers import Trigger, has
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug

Array = jax.Array
Step = Callable[..., Any]


def _choose(scores: Array, top_k: int) -> Array:
    """Return the places of the highest scores, `[B, T, top_k]`; -1 where there is no candidate."""
    count = min(top_k, scores.shape[-1])
    values, found = jax.lax.top_k(scores, count)
    found = jnp.where(values == -jnp.inf, -1, found)
    return jnp.pad(found, ((0, 0), (0, 0), (0, top_k - count)), constant_values=-1).astype(jnp.int32)


def _choose_by_sorting(scores: Array, top_k: int) -> Array:
    """Do the same by a stable sort, which returns the keys in another order."""
    order = jnp.argsort(-scores, axis=-1, stable=True)[..., :top_k]
    found = jnp.where(jnp.take_along_axis(scores, order, axis=-1) == -jnp.inf, -1, order)
    missing = top_k - found.shape[-1]
    return jnp.pad(found, ((0, 0), (0, 0), (missing, 0)), constant_values=-1)[..., ::-1].astype(jnp.int32)


def _hide_later(x: Array, hidden: float = -jnp.inf, ahead: int = 0) -> Array:
    """Replace the scores of keys after the query's own by `hidden`."""
    return jnp.where(jnp.tri(x.shape[1], x.shape[2], ahead, dtype=bool), x, hidden)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerSteps:
    """The steps of an indexer, in order; the defaults are correct."""

    multiply: Step = lambda q, k: jnp.einsum("bthd,bsd->bths", q, k, precision="highest")
    bend: Step = jax.nn.relu
    weigh: Step = lambda x, w: jnp.einsum("bth,bths->bts", w, x, precision="highest")
    hide: Step = _hide_later
    choose: Step = _choose


def indexer(name: str, steps: IndexerSteps = IndexerSteps()) -> Implementation:
    """The indexer made of `steps`, as an implementation."""

    def choose_keys(q: Array, k: Array, weights: Array, *, top_k: int, causal: bool = False) -> Array:
        """Choose the keys with the highest scores."""
        q, k, weights = (x.astype(jnp.float32) for x in (q, k, weights))
        scores = steps.weigh(steps.bend(steps.multiply(q, k)), weights)
        return steps.choose(steps.hide(scores) if causal else scores, top_k)

    return build_implementation(choose_keys, name)


SORTING = IndexerSteps(choose=_choose_by_sorting)
"""Another correct indexer."""


_ANY = has("lightning")


def _bug(
    name: str, steps: IndexerSteps, *, kind: str, reference: str = "inferred", trigger: Trigger = _ANY
) -> PlantedBug:
    return PlantedBug(
        name=f"indexer-{name}",
        family="masks",
        kind=f"indexer.{kind}",
        reference=reference,
        shows=("out",),
        build=functools.partial(indexer, f"indexer-{name}", steps),
        trigger=trigger,
    )


def _is_causal(case: Case) -> bool:
    return case.mask.endswith("-causal")


def _is_long(case: Case) -> bool:
    return "lightning-300" in case.mask


def _ties(case: Case) -> bool:
    return case.distribution == "ties" and "lightning-300" not in case.mask


def _several_heads(case: Case) -> bool:
    return "lightning" in case.features and case.num_q_heads > 1


def _are_far(case: Case) -> bool:
    return case.distribution == "levels"


def _choose_hidden(scores: Array, top_k: int) -> Array:
    count = min(top_k, scores.shape[-1])
    found = jax.lax.top_k(scores, count)[1]
    return jnp.pad(found, ((0, 0), (0, 0), (0, top_k - count)), constant_values=-1).astype(jnp.int32)


def _choose_last_of_equal(scores: Array, top_k: int) -> Array:
    found = _choose(scores[..., ::-1], top_k)
    return jnp.where(found < 0, -1, scores.shape[-1] - 1 - found)


def _choose_positive(scores: Array, top_k: int) -> Array:
    return _choose(jnp.where(scores > 0, scores, -jnp.inf), top_k)


def _pad_by_zero(scores: Array, top_k: int) -> Array:
    return jnp.maximum(_choose(scores, top_k), 0)


def _repeat_first(scores: Array, top_k: int) -> Array:
    found = _choose(scores, top_k)
    return jnp.where(found < 0, found[..., :1], found)


def _weigh_and_clip(x: Array, w: Array) -> Array:
    return jnp.clip(IndexerSteps.weigh(x, w), -65504, 65504)


def _multiply_in_bf16(q: Array, k: Array) -> Array:
    return jnp.einsum("bthd,bsd->bths", q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)).astype(jnp.float32)


BUGS: tuple[PlantedBug, ...] = (
    _bug("without-relu", IndexerSteps(bend=lambda x: x), kind="score"),
    _bug(
        "relu-after-the-sum",
        IndexerSteps(bend=lambda x: x, weigh=lambda x, w: jax.nn.relu(jnp.einsum("bth,bths->bts", w, x))),
        kind="score",
        trigger=_several_heads,
    ),
    _bug("weights-left-out", IndexerSteps(weigh=lambda x, w: x.sum(axis=2)), kind="score"),
    _bug(
        "magnitude-of-weights",
        IndexerSteps(weigh=lambda x, w: jnp.einsum("bth,bths->bts", jnp.abs(w), x)),
        kind="score",
    ),
    _bug(
        "first-head-only",
        IndexerSteps(weigh=lambda x, w: x[:, :, 0] * w[:, :, :1]),
        kind="heads",
        trigger=_several_heads,
    ),
    _bug("products-in-16-bits", IndexerSteps(multiply=_multiply_in_bf16), kind="precision"),
    _bug(
        "scores-up-to-the-largest-f16",
        IndexerSteps(weigh=_weigh_and_clip),
        kind="precision",
        reference="inferred from scores kept in f16",
        trigger=_are_far,
    ),
    _bug("causal-ignored", IndexerSteps(hide=lambda x: x), kind="causal", trigger=_is_causal),
    _bug(
        "own-key-hidden",
        IndexerSteps(hide=functools.partial(_hide_later, ahead=-1)),
        kind="causal",
        trigger=_is_causal,
    ),
    _bug(
        "hidden-keys-scored-zero",
        IndexerSteps(hide=functools.partial(_hide_later, hidden=0.0)),
        kind="causal",
        reference="inferred from ml-explore/mlx-lm#1454, where all scores are zero",
        trigger=_is_causal,
    ),
    _bug("hidden-keys-chosen-to-fill-a-list", IndexerSteps(choose=_choose_hidden), kind="padding", trigger=_is_causal),
    _bug("list-padded-by-key-0", IndexerSteps(choose=_pad_by_zero), kind="padding", trigger=_is_causal),
    _bug("list-padded-by-its-first-key", IndexerSteps(choose=_repeat_first), kind="padding", trigger=_is_causal),
    _bug(
        "only-positive-scores",
        IndexerSteps(choose=_choose_positive),
        kind="padding",
        reference="inferred from ml-explore/mlx-lm#1454, where all scores are zero",
    ),
    _bug("last-of-equal-scores", IndexerSteps(choose=_choose_last_of_equal), kind="ties", trigger=_ties),
    _bug("lowest-scores", IndexerSteps(choose=lambda scores, top_k: _choose(-scores, top_k)), kind="order"),
    _bug(
        "one-key-fewer",
        IndexerSteps(choose=lambda scores, top_k: _choose(scores, top_k).at[..., -1].set(-1)),
        kind="length",
    ),
)
