"""Bugs at the ends: of sizes beyond the grids, and of values where the backward pass computes weights anew."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.plain import Array, BackwardSteps, Call, PlainSteps, Saved, capped, hidden, planted
from conformance.mutation.kernels.triggers import both, has, one_query, trains
from tests.bank import PlantedBug
from tests.planted.planting import wrapped
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


def _without(name: str, when: Callable[[Arrays, Statics], bool]) -> Kernel:
    """A path for which somebody forgot one argument."""

    def kernel(arrays: Arrays, statics: Statics) -> object:
        if not when(arrays, statics):
            return correct(arrays, statics)
        return correct(
            {n: x for n, x in arrays.items() if n != name}, {**statics, **dict.fromkeys({name} & {*statics})}
        )

    return kernel


def _lengths(arrays: Arrays) -> tuple[int, int]:
    return arrays["q"].shape[1], arrays["k"].shape[1]


def _whole_blocks_of_256(arrays: Arrays, statics: Statics) -> object:
    """`(S + 254) // 256` blocks, which lack the last key where it is alone in its block."""
    length = arrays["k"].shape[1]
    if length == 1 or length % 256 != 1:
        return correct(arrays, statics)
    there = (jnp.arange(length) < length - 1)[None, None, None]
    return correct({**arrays, "mask": there & arrays.get("mask", True)}, statics)


def _mask_by_rows_alone(arrays: Arrays, statics: Statics) -> object:
    """A mask has either batch rows or heads, so one of the two is the first."""
    mask: Any = arrays.get("mask")
    if mask is None or 1 in mask.shape[:2]:
        return correct(arrays, statics)
    return correct({**arrays, "mask": mask[:, :1]}, statics)


def _open_to_the_left(arrays: Arrays, statics: Statics) -> bool:
    return statics["window"] is not None and statics["window"][0] is None and not statics["window"][1]


# Values.


def _cap_is_the_pivot(arrays: Arrays, statics: Statics) -> object:
    """No logit is above the cap, so none needs a maximum: of rows far below it nothing is left."""
    results = correct(arrays, {**statics, "save_residuals": True})
    cap = statics["soft_cap"]
    if cap is None or cap > 50:
        return results if statics["save_residuals"] else results[0]
    out, residuals = results
    lost = residuals["logsumexp"] < cap - 87.0  # [B, N, T]
    out = jnp.where(lost.transpose(0, 2, 1)[..., None], 0, out)
    return (out, residuals) if statics["save_residuals"] else out


def _hidden_rows_average(arrays: Arrays, statics: Statics) -> object:
    """Rows whose keys a bias hides average the values, whether they have a sink or not."""
    out, residuals = correct(arrays, {**statics, "save_residuals": True})
    if arrays.get("bias") is not None and statics["soft_cap"] is None:
        hidden_rows = jnp.isneginf(residuals["max_logits"]).transpose(0, 2, 1)[..., None]
        mean = arrays["v"].astype(jnp.float32).mean(axis=1, keepdims=True)
        mean = jnp.repeat(mean, out.shape[2] // mean.shape[2], axis=2)
        out = jnp.where(hidden_rows, mean.astype(out.dtype), out)
    return (out, residuals) if statics["save_residuals"] else out


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
        "one-key-needs-no-softmax",
        _without("sinks", lambda arrays, statics: arrays["k"].shape[1] == 1),
        kind="dispatch.one-key",
        reference="inferred from kernels that return the only value there is",
        trigger=has("sinks"),
    ),
    _size(
        "one-query-over-whole-blocks-of-512-drops-sinks",
        _without("sinks", lambda arrays, statics: _lengths(arrays)[0] == 1 and _lengths(arrays)[1] % 512 == 0),
        kind="dispatch.cache",
        reference="inferred from kernels for decoding that are chosen by the size of the cache, a power of two",
        trigger=has("sinks"),
    ),
    _size(
        "whole-blocks-of-512-drop-soft-cap",
        _without("soft_cap", lambda arrays, statics: all(n % 512 == 0 for n in _lengths(arrays))),
        kind="dispatch.blocks",
        reference="inferred from routes for whole blocks of the largest block size",
        trigger=has("soft_cap"),
    ),
    _size(
        "key-alone-in-its-block-of-256-is-lost",
        _whole_blocks_of_256,
        kind="blocks.count",
        reference="inferred from counts of blocks that are rounded up by one too little",
        trigger=lambda case: case.kv_length % 256 == 1,
    ),
    _size(
        "mask-of-batch-rows-and-heads-read-by-rows",
        _mask_by_rows_alone,
        kind="mask.axes",
        reference="inferred from kernels that take a mask of batch rows or one of heads",
    ),
    _size(
        "mask-dropped-beside-a-window",
        _without("mask", lambda arrays, statics: statics["window"] is not None),
        kind="dispatch.mask",
        reference="inferred from routes for windows that were written for windows alone",
    ),
    _size(
        "window-of-none-and-zero-is-none",
        _without("window", _open_to_the_left),
        kind="window.truth",
        reference="inferred from wrappers that test the sides of a window for truth",
    ),
    wrapped.planted(
        "soft-cap-is-the-pivot",
        _cap_is_the_pivot,
        family="values",
        kind="pivot.cap",
        reference="inferred from kernels that skip the running maximum where logits are capped, at 50 in Gemma 2",
        shows=("out",),
        trigger=has("soft_cap"),
    ),
    wrapped.planted(
        "rows-hidden-by-bias-forget-their-sink",
        _hidden_rows_average,
        family="values",
        kind="sinks.empty",
        reference="inferred from guards for rows whose largest logit is -inf, written before there were sinks",
        shows=("out",),
        trigger=has("sinks", "bias"),
    ),
    wrapped.planted(
        "bias-of-all-keys-dropped",
        _without("bias", lambda arrays, statics: "bias" in arrays and arrays["bias"].shape[-1] == 1),
        family="values",
        kind="bias.shared",
        reference="inferred from simplifications: what all keys share does not change a softmax, but for a sink",
        shows=("out", "dbias"),
        trigger=has("bias"),
    ),
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
