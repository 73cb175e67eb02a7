"""Bugs of softmax over pages: parts that are merged, sinks, soft cap, rows without keys, padding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from conformance.mutation.kernels.triggers import grouped, has
from tests.bank import PlantedBug
from tests.planted.planting.paged_bug import bug, in_pages
from tests.planted.planting.served import Call, PagedSteps, softmax

Array = jax.Array


def _halves(x: Array, allowed: Array, v: Array, sinks: Array | None) -> list[tuple[Array, Array, Array]]:
    """Both halves of the keys, each as if there were no others; the sink belongs to the first."""
    half = (x.shape[-1] + 1) // 2
    cuts = (slice(0, half), slice(half, None))
    return [softmax(x[..., cut], allowed[..., cut], v[:, cut], sinks if n == 0 else None) for n, cut in enumerate(cuts)]


def _merge_halves_unguarded(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Two halves of the keys, merged as if at least one of them had a key."""
    (out, lse, top), (other, other_lse, other_top) = _halves(x, allowed, v, sinks)
    high = jnp.maximum(lse, other_lse)
    one, two = jnp.exp(lse - high), jnp.exp(other_lse - high)
    total = one + two
    merged = (one[..., None] * out + two[..., None] * other) / total[..., None]
    joined = jnp.where(total > 0, high + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    return merged, joined, jnp.maximum(top, other_top)


_SPLITS = 8


def narrow_splits(normalised: bool, x: Array, allowed: Array, v: Array, sinks: Array | None) -> Any:
    """Merge eight splits of the keys whose results, or sums of weighted values, are in the dtype of the values."""
    lse, top = softmax(x, allowed, v, sinks)[1:]
    length = -(-x.shape[-1] // _SPLITS)
    total = jnp.zeros((*x.shape[:-1], v.shape[-1]), jnp.float32)
    for start in range(0, x.shape[-1], length):
        cut = slice(start, start + length)
        out, part, _ = softmax(x[..., cut], allowed[..., cut], v[:, cut], None)
        share = jnp.where(jnp.isneginf(part), 0, jnp.exp(part - jnp.where(jnp.isfinite(lse), lse, 0)))[..., None]
        narrow = out.astype(v.dtype) * share if normalised else (out * share).astype(v.dtype)
        total += narrow.astype(jnp.float32)
    return total, lse, top


def _sink_in_both(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Two halves of the keys, and the sink joins both of them."""
    right = softmax(x, allowed, v, sinks)
    if sinks is None:
        return right
    twice = softmax(x, allowed, v, sinks + jnp.log(2.0))
    return twice[0], twice[1], right[2]


def _empty_is_nan(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    out, lse, top = softmax(x, allowed, v, sinks)
    none = ~allowed.any(axis=-1)
    return jnp.where(none[..., None], jnp.nan, out), lse, top


def _interleaved(x: Array, count: int) -> Array:
    return jnp.tile(x, (1, 1, count // x.shape[2], 1))


def _capped_if(when: str, x: Array, allowed: Array, call: Call) -> Array:
    if call.soft_cap is None:
        return x
    bent = call.soft_cap * jnp.tanh(x / call.soft_cap)
    if when == "masked":
        return call.soft_cap * jnp.tanh(jnp.where(allowed, x, -1e30) / call.soft_cap)
    one = (call.q_lens.max() <= 1) if when == "prefill" else jnp.asarray(False)
    return jnp.where(one, x, bent)


def _lse_or(value: float, lse: Array, allowed: Array) -> Array:
    return jnp.where(allowed.any(axis=-1), lse, value)


BUGS: tuple[PlantedBug, ...] = (
    bug(
        "nan-without-keys",
        PagedSteps(attend=_empty_is_nan),
        kind="padding",
        reference="sgl-project/sglang#1779",
        shows="out",
    ),
    bug(
        "logsumexp-of-no-keys-finite",
        PagedSteps(logsumexp=functools.partial(_lse_or, 0.0)),
        kind="no keys",
        reference="flashinfer-ai/flashinfer#4452",
        shows="logsumexp",
    ),
    bug(
        "paged-merge-of-two-empty-parts",
        PagedSteps(attend=_merge_halves_unguarded),
        kind="split keys",
        reference="vllm-project/vllm#39148",
        shows="out logsumexp",
    ),
    bug(
        "paged-sums-of-splits-in-16-bits",
        PagedSteps(attend=functools.partial(narrow_splits, False)),
        kind="splitkv.partial-dtype",
        reference="flash-attn PR 2336, over pages",
        shows="out",
        trigger=lambda case: in_pages(case) and case.dtype != "f32",
    ),
    bug(
        "paged-sink-in-both-parts",
        PagedSteps(attend=_sink_in_both),
        kind="sinks",
        reference="rocm-libraries#12227",
        shows="out logsumexp",
        trigger=has("paged", "sinks"),
    ),
    bug(
        "no-cap-for-single-tokens",
        PagedSteps(cap=functools.partial(_capped_if, "prefill")),
        kind="soft cap",
        reference="vllm-metal#665",
        trigger=has("paged", "soft_cap", "decode"),
    ),
    bug(
        "paged-heads-interleaved",
        PagedSteps(heads=_interleaved),
        kind="heads",
        reference="inferred from native-sparse-attention-triton#27",
        trigger=lambda case: in_pages(case) and grouped(case),
    ),
)
