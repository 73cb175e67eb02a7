"""Bugs of served kernels at extreme values: logits far below zero, far apart, and sinks as large as f32 allows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import both
from tests.bank import PlantedBug
from tests.planted.planting import latent, packed_bug, paged_bug
from tests.planted.planting.latent import LatentSteps
from tests.planted.planting.served import Call, PackedSteps, PagedSteps, softmax

Array = jax.Array
_SMALLEST = -104.0  # exp of less is zero in f32


def _maximum_from(start: float, x: Array, allowed: Array, call: Call) -> Array:
    """Begin the running maximum at `start` in the path for single tokens, so that weights far below it are zero."""
    x = PagedSteps().cap(x, allowed, call)
    single = call.q_lens.max() <= 1
    return jnp.where(single & (x - start < _SMALLEST), -jnp.inf, x)


def _shift_at_least(least: float, x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, ...]:
    """Begin the running maximum at `least`."""
    lost = jax.lax.stop_gradient(jnp.where(x - least < _SMALLEST, -jnp.inf, 0.0))
    out, lse, _ = softmax(jnp.where(jnp.isneginf(lost), -jnp.inf, x), allowed, v, sinks)
    return out, lse, jnp.where(allowed, x, -jnp.inf).max(axis=-1)


def _finite_sinks(sinks: Array | None, call: Call) -> Array | None:
    """Clip sinks to the range of f16."""
    return None if sinks is None else jnp.clip(sinks, -65504.0, 65504.0)


def _empty_as_sink_zero(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, ...]:
    """Divide rows without keys by their sum, which is zero where a sink is minus infinity."""
    out, lse, top = softmax(x, allowed, v, sinks)
    if sinks is None:
        return out, lse, top
    none = ~allowed.any(axis=-1) & jnp.isneginf(sinks)
    return jnp.where(none[..., None], jnp.nan, out), jnp.where(none, jnp.nan, lse), top


def _of(distribution: str, case: Case) -> bool:
    return case.distribution == distribution


def _single(case: Case) -> bool:
    return case.q_length == 1


def _extreme_sinks(case: Case) -> bool:
    return case.sinks == "sinksedge"


BUGS: tuple[PlantedBug, ...] = (
    paged_bug.bug(
        "paged-maximum-from-minus-1e4-for-single-tokens",
        PagedSteps(cap=functools.partial(_maximum_from, -1e4)),
        kind="extreme logits",
        reference="inferred from kernels whose m_i begins at -1e4, as a mask of f16 does",
        trigger=both(paged_bug.in_pages, _single, functools.partial(_of, "low")),
    ),
    latent.bug(
        "latent-maximum-from-zero-for-single-tokens",
        LatentSteps(pages=PagedSteps(cap=functools.partial(_maximum_from, 0.0))),
        kind="extreme logits",
        reference="inferred from kernels whose m_i begins at zeros",
        trigger=both(latent.in_pages, _single, functools.partial(_of, "low")),
    ),
    packed_bug.bug(
        "packed-maximum-from-zero",
        PackedSteps(attend=functools.partial(_shift_at_least, 0.0)),
        kind="extreme logits",
        reference="inferred from kernels whose m_i begins at zeros",
        trigger=both(packed_bug.in_packs, functools.partial(_of, "low")),
    ),
    paged_bug.bug(
        "paged-sinks-cut-to-f16",
        PagedSteps(sinks=_finite_sinks),
        kind="extreme sinks",
        reference="inferred from checkpoints whose sinks are stored in f16",
        shows="logsumexp",
        trigger=both(paged_bug.in_pages, _extreme_sinks),
    ),
    packed_bug.bug(
        "packed-no-keys-beside-no-sink-is-nan",
        PackedSteps(attend=_empty_as_sink_zero),
        kind="extreme sinks",
        reference="inferred from guards of empty rows that ask only whether there are sinks",
        shows="out logsumexp",
        trigger=both(packed_bug.in_packs, _extreme_sinks, lambda case: 0 in case.kv_lengths),
    ),
)
