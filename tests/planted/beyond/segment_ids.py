"""Bugs in how segment ids are read: zero, negative, large, unsorted, reappearing, absent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from conformance.mutation.kernels import plain
from conformance.mutation.kernels.plain import Array, Call, same_segment
from conformance.mutation.kernels.triggers import has
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="arguments", shows=("out", "logsumexp"), trigger=has("segment_ids"))
_BLOCK = 64
_TILE = 32
_SENTINEL = 2**31 - 1


def _segments(same: Callable[[Any, Any], Any]) -> Kernel:
    """The kernel with another rule for which ids belong together: `(q ids [B, T, 1], kv ids [B, 1, S])`."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if "segment_ids" not in arrays:
            return correct(arrays, statics)
        q_ids, kv_ids = (jnp.asarray(ids) for ids in arrays["segment_ids"])
        together = same(q_ids[:, :, None], kv_ids[:, None, :])[:, None]
        rest = {name: x for name, x in arrays.items() if name != "segment_ids"}
        return correct({**rest, "mask": together & arrays.get("mask", True)}, statics)

    return kernel


def _blocks_by_first_and_last(q: Any, kv: Any) -> Any:
    """Pairs of blocks are skipped by their first and last ids, as if ids only grew."""
    t, s = q.shape[1], kv.shape[2]
    i, j = jnp.arange(t) // _BLOCK * _BLOCK, jnp.arange(s) // _BLOCK * _BLOCK
    first_q, last_q = q[:, i], q[:, jnp.minimum(i + _BLOCK, t) - 1]
    first_kv, last_kv = kv[:, :, j], kv[:, :, jnp.minimum(j + _BLOCK, s) - 1]
    return (q == kv) & (first_q <= last_kv) & (last_q >= first_kv)


def _blocks_full_by_first_and_last(q: Any, kv: Any) -> Any:
    """Pairs of blocks are taken as one sequence where their first and last ids are all equal, as if ids only grew."""
    t, s = q.shape[1], kv.shape[2]
    i, j = jnp.arange(t) // _TILE * _TILE, jnp.arange(s) // _TILE * _TILE
    first_q, last_q = q[:, i], q[:, jnp.minimum(i + _TILE, t) - 1]
    first_kv, last_kv = kv[:, :, j], kv[:, :, jnp.minimum(j + _TILE, s) - 1]
    return (q == kv) | ((first_q == last_q) & (first_q == first_kv) & (first_kv == last_kv))


def _by_run(q: Any, kv: Any) -> Any:
    """At equal lengths, segments are the runs of equal ids: one that comes back is another one."""
    if q.shape[1] != kv.shape[2]:
        return q == kv
    runs = [jnp.cumsum(jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1) for ids in (q[..., 0], kv[:, 0])]
    alike = jnp.all(q[..., 0] == kv[:, 0])
    return (q == kv) & (~alike | (runs[0][:, :, None] == runs[1][:, None]))


def _first_key_if_absent(q_ids: Array, kv_ids: Array, call: Call) -> Array:
    """The start of a segment is the first key with its id, and an id that no key has starts at the first."""
    same = same_segment(q_ids, kv_ids, call)
    return same | (~same.any(axis=-1, keepdims=True) & (jnp.arange(call.kv_length) == 0))


def _zero_is_padding(q: Any, kv: Any) -> Any:
    return (q == kv) & (q != 0)


def _negative_is_padding(q: Any, kv: Any) -> Any:
    return (q == kv) & (q >= 0)


def _sentinel_is_padding(q: Any, kv: Any) -> Any:
    return (q == kv) & (kv != _SENTINEL)


def _in_f32(q: Any, kv: Any) -> Any:
    return q.astype(jnp.float32) == kv.astype(jnp.float32)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "segments-zero-is-padding",
        _segments(_zero_is_padding),
        kind="seg.pad0",
        reference="inferred from NeMo Automodel PR 3704, where an id of 0 is taken for none",
    ),
    _bug(
        "segments-below-zero-are-padding",
        _segments(_negative_is_padding),
        kind="seg.pad-negative",
        reference="inferred from ejkernel commit e99bc5a, where padding is -1",
    ),
    _bug(
        "segments-largest-id-is-padding",
        _segments(_sentinel_is_padding),
        kind="seg.sentinel",
        reference="inferred from kernels that pad ids with the largest integer",
    ),
    _bug(
        "segments-compared-in-f32",
        _segments(_in_f32),
        kind="seg.width",
        reference="inferred from kernels that hold ids as floats",
    ),
    _bug(
        "segments-blocks-skipped-by-first-and-last",
        _segments(_blocks_by_first_and_last),
        kind="seg.sorted",
        reference="inferred from block skipping that goes by the range of ids",
    ),
    _bug(
        "segments-blocks-full-by-first-and-last",
        _segments(_blocks_full_by_first_and_last),
        kind="seg.sorted",
        reference="inferred from block skipping that goes by the range of ids: blocks of one sequence need no mask",
    ),
    _bug(
        "segments-that-come-back-are-others",
        _segments(_by_run),
        kind="seg.reappear",
        reference="inferred from transformers PR 47525, where borders stand for segments",
    ),
    plain.planted(
        "arguments",
        "segments-absent-from-keys-see-the-first",
        kind="seg.absent",
        reference="inferred from flash-attention issue 2562: segments of length zero",
        shows="out logsumexp",
        trigger=has("segment_ids"),
        steps=plain.PlainSteps(segments=_first_key_if_absent),
    ),
)
