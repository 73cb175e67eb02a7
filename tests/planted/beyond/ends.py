"""Bugs at the ends: of sizes beyond the grids, and of values where the backward pass computes weights anew."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.sensitivity import PlantedBug
from tests.planted.planting import wrapped
from tests.planted.planting.plain import Array, BackwardSteps, Call, PlainSteps, Saved, capped, hidden, planted
from tests.planted.planting.triggers import both, has, one_query, trains
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct

_value = functools.partial(planted, "values")
_size = functools.partial(wrapped.planted, family="sizes", shows=("out", "logsumexp"))
_HIDDEN = -1e5


# Sizes.


def _one_query_sees_all(arrays: Arrays, statics: Statics) -> object:
    """A decoding step needs no mask: true of the last query alone."""
    return correct(arrays, {**statics, "causal": statics["causal"] and arrays["q"].shape[1] > 1})


def _first_again(operand: str, axis: int, count: int) -> Kernel:
    """Beyond `count` along an axis the first come again."""

    def kernel(arrays: Arrays, statics: Statics) -> object:
        x = arrays[operand]
        places = jnp.arange(x.shape[axis]) % count
        return correct({**arrays, operand: jnp.take(x, places, axis=axis)}, statics)

    return kernel


def _at_most_256_channels(arrays: Arrays, statics: Statics) -> object:
    scale = arrays["q"].shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
    cut = {name: arrays[name][..., :256] for name in ("q", "k")}
    return correct({**arrays, **cut}, {**statics, "scale": scale})


def _thirty_two_sequences(arrays: Arrays, statics: Statics) -> object:
    """A table of the sequences has 32 rows, and the last is for all that come after."""
    if arrays.get("segment_ids") is None:
        return correct(arrays, statics)

    def rank(ids: Array, kv_ids: Array) -> Array:
        found = jnp.unique(kv_ids, size=kv_ids.shape[0], fill_value=jnp.iinfo(jnp.int32).max)
        return jnp.where(jnp.isin(ids, found), jnp.minimum(jnp.searchsorted(found, ids), 31), -1)

    q_ids, kv_ids = arrays["segment_ids"]
    ranks = tuple(jax.vmap(rank)(ids, kv_ids) for ids in (q_ids, kv_ids))
    return correct({**arrays, "segment_ids": ranks}, statics)


# Values.


def _one_pivot_for_all_sinks(arrays: Arrays, statics: Statics) -> object:
    """Weights are taken relative to the largest sink of all heads, and underflow in heads whose own is far below."""
    results = correct(arrays, {**statics, "save_residuals": True})
    if arrays.get("sinks") is None:
        return results if statics["save_residuals"] else results[0]
    out, residuals = results
    lost = residuals["logsumexp"] < arrays["sinks"].max() - 87.0  # [B, N, T]
    out = jnp.where(lost.transpose(0, 2, 1)[..., None], 0, out)
    return (out, residuals) if statics["save_residuals"] else out


def _nan_is_zero(arrays: Arrays, statics: Statics) -> object:
    """What was meant for rows that see nothing hides every NaN."""
    return jax.tree.map(lambda x: jnp.where(jnp.isnan(x), 0, x), correct(arrays, statics))


def _hidden_if_low(z: Array, call: Call) -> Array:
    """What is so low was meant to be hidden."""
    return hidden(jnp.where(z < _HIDDEN, -jnp.inf, z), call)


def _infinite_stays(x: Array, call: Call) -> Array:
    """A bias of -inf is taken for a mask before the cap."""
    return jnp.where(jnp.isneginf(x), x, capped(x, call))


def _cap_gradient_by_exponentials(dz: Array, saved: Saved) -> Array:
    """`4 e / (1 + e)^2`, which is infinity over infinity where `e` overflows."""
    cap = saved.call.soft_cap
    if cap is None:
        return dz
    e = jnp.exp(2 * saved.forward.x / cap)
    return dz * 4 * e / (1 + e) ** 2


def _dsinks_by_two_exponentials(d: Array, dlse: Array, saved: Saved) -> Array:
    """`exp(sink) / exp(logsumexp)`, each of which overflows."""
    assert saved.call.sinks is not None
    weight = jnp.exp(saved.call.sinks[:, None]) / jnp.exp(saved.forward.logsumexp)
    return weight * (dlse - d)[..., 0]


def _one_causal_query(case: Case) -> bool:
    return one_query(case) and case.mask == "causal"


BUGS: tuple[PlantedBug, ...] = (
    _size(
        "one-query-drops-causal",
        _one_query_sees_all,
        kind="dispatch.one-query",
        reference="inferred from flash-attention, where one query is never causal: it stands at the last key",
        trigger=_one_causal_query,
    ),
    _size(
        "batch-rows-beyond-eight-are-the-first-again",
        _first_again("q", 0, 8),
        kind="table.batch",
        reference="inferred from kernels with tables of a fixed number of sequences",
        trigger=lambda case: case.batch > 8,
    ),
    _size(
        "heads-beyond-forty-are-the-first-again",
        _first_again("q", 2, 40),
        kind="table.heads",
        reference="inferred from kernels that are made for a few head counts",
        trigger=lambda case: case.num_q_heads > 40,
    ),
    _size(
        "depth-is-at-most-256-channels",
        _at_most_256_channels,
        kind="depth.limit",
        reference="inferred from kernels with a largest depth of 256, asked for the 576 of latent attention",
        trigger=lambda case: case.head_dim > 256,
    ),
    _size(
        "sequences-beyond-32-are-one",
        _thirty_two_sequences,
        kind="table.segments",
        reference="inferred from kernels with a table of the sequences that are packed, of a fixed size",
        trigger=has("segments"),
    ),
    wrapped.planted(
        "one-pivot-for-the-sinks-of-all-heads",
        _one_pivot_for_all_sinks,
        family="values",
        kind="sinks.pivot",
        reference="inferred from kernels that start the running maximum from a block of sinks",
        shows=("out",),
        trigger=has("sinks"),
    ),
    wrapped.planted(
        "nan-becomes-zero",
        _nan_is_zero,
        family="values",
        kind="nan.swallowed",
        reference="inferred from kernels that clear NaN from their results, for rows that see nothing",
        shows=("out",),
    ),
    _value(
        "logits-below-minus-100000-are-hidden",
        kind="mask.threshold",
        reference="inferred from kernels that take a bias of -1e5 and less for a mask",
        shows="out logsumexp",
        trigger=has("bias"),
        steps=PlainSteps(hide=_hidden_if_low),
    ),
    _value(
        "infinite-bias-hides-under-a-soft-cap",
        kind="cap.order",
        reference="inferred from kernels that turn a bias of -inf into a mask ahead of the cap",
        shows="out logsumexp",
        trigger=has("bias", "soft_cap"),
        steps=PlainSteps(cap=_infinite_stays),
    ),
    _value(
        "cap-gradient-by-exponentials-that-overflow",
        kind="cap.overflow",
        reference="inferred from vllm issue 56578, a tanh by exponentials, in a backward pass",
        shows="dq dk dbias",
        trigger=trains("soft_cap"),
        back=BackwardSteps(dx=_cap_gradient_by_exponentials),
    ),
    _value(
        "dsinks-by-two-exponentials",
        kind="sinks.overflow",
        reference="inferred from backward passes of sinks that recompute their weight without the maximum",
        shows="dsinks",
        trigger=both(trains("sinks"), lambda case: case.dtype == "f32"),
        back=BackwardSteps(dsinks=_dsinks_by_two_exponentials),
    ),
)
