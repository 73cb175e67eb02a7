"""Bugs of segment ids."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    capped,
    planted,
    same_segment,
)
from conformance.mutation.kernels.triggers import both, has, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "segments")
_FORWARD = "out logsumexp max_logits"
_segments = has("segment_ids")


def _padded(*features: str) -> Callable[..., bool]:
    return both(has(*features), lambda case: case.segments == "segpad")


def _of(ids: Callable[[Array, Array], tuple[Array, Array]]) -> PlainSteps:
    """The kernel that compares other ids."""
    return PlainSteps(segments=lambda q_ids, kv_ids, call: same_segment(*ids(q_ids, kv_ids), call))


def _resized(ids: Array, length: int) -> Array:
    return jax.vmap(lambda row: jnp.resize(row, (length,)))(ids)


def _both_from_q(q_ids: Array, kv_ids: Array) -> tuple[Array, Array]:
    return q_ids, _resized(q_ids, kv_ids.shape[1])


def _both_from_kv(q_ids: Array, kv_ids: Array) -> tuple[Array, Array]:
    return _resized(kv_ids, q_ids.shape[1]), kv_ids


def _wildcard(q_ids: Array, kv_ids: Array, call: Call) -> Array:
    return same_segment(q_ids, kv_ids, call) | (q_ids < 0)[:, None, :, None]


def _p_without_segments(saved: Saved) -> Array:
    call = saved.call
    mask = call.mask.dense(call.q_length, call.kv_length)
    return saved.probabilities_of(jnp.where(mask & ~call.empty[..., None], capped(saved.forward.x, call), -jnp.inf))


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "segments-ignored",
        says="Segment ids are ignored, so that queries see keys of other segments.",
        kind="mask.ignored-attnmask",
        reference="LLM-Workshop issue 1; maxdiffusion PR 236",
        shows=_FORWARD,
        trigger=_segments,
        steps=PlainSteps(both=lambda mask, segments, call: mask),
    ),
    _bug(
        "segments-clamped-to-one",
        says="Segment ids above 1 are taken for 1, so later segments see each other.",
        kind="packing.ignored-when-mask",
        reference="open-instruct issue 669",
        shows=_FORWARD,
        trigger=_segments,
        steps=_of(lambda q_ids, kv_ids: (jnp.minimum(q_ids, 1), jnp.minimum(kv_ids, 1))),
    ),
    _bug(
        "segments-of-q-for-kv",
        says="Keys are given the segment ids of the queries.",
        kind="seg.q-used-for-kv",
        reference="MaxText commit 48da5ee09",
        shows=_FORWARD,
        trigger=_segments,
        steps=_of(_both_from_q),
    ),
    _bug(
        "segments-of-kv-for-q",
        says="Queries are given the segment ids of the keys.",
        kind="seg.swap",
        reference="inferred from MaxText commit 48da5ee09",
        shows=_FORWARD,
        trigger=_segments,
        steps=_of(_both_from_kv),
    ),
    _bug(
        "segments-compared-by-order",
        says="A query sees all segments with an id up to its own.",
        kind="seg.le",
        reference="inferred from packing with ever growing ids",
        shows=_FORWARD,
        trigger=_segments,
        steps=PlainSteps(
            segments=lambda q_ids, kv_ids, call: q_ids[:, None, :, None] >= kv_ids[:, None, None, :],
        ),
    ),
    _bug(
        "segments-of-first-row-for-all",
        says="All batch rows use the segment ids of the first.",
        kind="mask.per-batch",
        reference="inferred from masks shared across the batch",
        shows=_FORWARD,
        trigger=both(_segments, lambda case: case.batch > 1),
        steps=_of(lambda q_ids, kv_ids: (q_ids[:1], kv_ids[:1])),
    ),
    _bug(
        "segments-start-one-late",
        says="Segments of keys begin one key too late.",
        kind="packing.pos-min",
        reference="inferred from transformers PR 47525, where boundaries are missed",
        shows=_FORWARD,
        trigger=_segments,
        steps=_of(lambda q_ids, kv_ids: (q_ids, jnp.concatenate([kv_ids[:, :1], kv_ids[:, :-1]], axis=1))),
    ),
    _bug(
        "padding-attends-to-padding",
        says="All negative segment ids match each other, so padding sees padding.",
        kind="seg.padding-ids",
        reference="ejkernel commit e99bc5a",
        shows=_FORWARD,
        trigger=_padded("segment_ids"),
        steps=_of(lambda q_ids, kv_ids: (jnp.maximum(q_ids, -1), jnp.maximum(kv_ids, -1))),
    ),
    _bug(
        "padding-attends-to-everything",
        says="Queries with a negative segment id (padding) see keys of all segments.",
        kind="seg.pad-wildcard",
        reference="inferred from ejkernel commit e99bc5a",
        shows=_FORWARD,
        trigger=_padded("segment_ids"),
        steps=PlainSteps(segments=_wildcard),
    ),
    _bug(
        "backward-ignores-segments",
        says="The backward pass ignores the segment ids.",
        kind="te.thd-bwd",
        reference="inferred from TransformerEngine issue 3333",
        shows="dq dk dv",
        trigger=trains("segment_ids"),
        back=BackwardSteps(p=_p_without_segments),
    ),
)
