"""Bugs of kernels that were written without a look at the cases, and that `quick` left."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from conformance.sensitivity import PlantedBug
from tests.planted.planting.served import PackedSteps, PagedSteps, packed, paged, softmax
from tests.planted.planting.triggers import both, has, one_query
from tests.planted.planting.wrapped import Arrays, Statics, correct, planted

_FAMILY = "unseen"
_SPLITS = 4
_LONG = 256
_BLOCK = 64
# What a pivot begins with that is to be below all logits.
_FIRST_PIVOT = -100.0

Array = jax.Array


def _seen(arrays: Arrays, statics: Statics, seen: Array) -> Any:
    """The correct result under a mask that also hides the pairs `~seen`, `[T, S]` or `[1, S]`."""
    seen = seen[None, None]
    return correct({**arrays, "mask": arrays["mask"] & seen if "mask" in arrays else seen}, statics)


def _splits_drop_the_rest(arrays: Arrays, statics: Statics) -> Any:
    """One query reads a long cache in four splits of `S // 4` keys."""
    kv_length = arrays["k"].shape[1]
    if arrays["q"].shape[1] > 1 or kv_length < _LONG:
        return correct(arrays, statics)
    return _seen(arrays, statics, (jnp.arange(kv_length) < kv_length // _SPLITS * _SPLITS)[None])


def _last_block_ahead_floored(arrays: Arrays, statics: Statics) -> Any:
    """The loop over key blocks ends at `(first query of the block + block + right) // block`, if right is wide."""
    right = None if statics["window"] is None else statics["window"][1]
    if right is None or right <= _BLOCK:
        return correct(arrays, statics)
    first = jnp.arange(arrays["q"].shape[1])[:, None] // _BLOCK * _BLOCK
    ends = (first + _BLOCK + min(right, 2**20)) // _BLOCK * _BLOCK
    return _seen(arrays, statics, jnp.arange(arrays["k"].shape[1]) < ends)


def _pivot_from_a_number(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """The pivot begins with a number, and what lies below it underflows."""
    low = jnp.max(x, axis=-1, keepdims=True, where=allowed, initial=-jnp.inf) < 2 * _FIRST_PIVOT
    out, logsumexp, top = softmax(x, allowed & ~low, v, sinks)
    return out, logsumexp, jnp.maximum(top, _FIRST_PIVOT)


def _wide_right(case: Any) -> bool:
    return "-r75" in case.mask or "-r99999" in case.mask


_ALL = ("out", "logsumexp", "dq", "dk", "dv")

BUGS: tuple[PlantedBug, ...] = (
    planted(
        "splits-of-a-cache-drop-the-rest",
        _splits_drop_the_rest,
        family=_FAMILY,
        kind="splitkv.rest",
        reference="inferred from jax b8b9f2bc33 (bounds rounded down), for splits of a cache",
        shows=("out", "logsumexp"),
        trigger=both(one_query, lambda case: case.kv_length >= _LONG and case.kv_length % _SPLITS > 0),
    ),
    planted(
        "last-block-ahead-of-a-wide-window-floored",
        _last_block_ahead_floored,
        family=_FAMILY,
        kind="window.block-skip",
        reference="inferred from jax b8b9f2bc33 (bounds rounded down), for keys ahead of the query",
        shows=_ALL,
        trigger=both(has("window"), _wide_right),
    ),
    PlantedBug(
        name="paged-pivot-begins-with-a-number",
        family=_FAMILY,
        kind="softmax.pivot",
        reference="inferred from kernels that begin with what no logit of theirs was below",
        shows=("out", "logsumexp"),
        build=functools.partial(paged, "paged-pivot-begins-with-a-number", PagedSteps(attend=_pivot_from_a_number)),
        trigger=has("paged"),
    ),
    PlantedBug(
        name="packed-pivot-begins-with-a-number",
        family=_FAMILY,
        kind="softmax.pivot",
        reference="inferred from kernels that begin with what no logit of theirs was below",
        shows=(*_ALL,),
        build=functools.partial(packed, "packed-pivot-begins-with-a-number", PackedSteps(attend=_pivot_from_a_number)),
        trigger=has("packed"),
    ),
)
