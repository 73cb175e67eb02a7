"""Bugs of softmax over pages: parts that are merged, sinks, soft cap, rows without keys, padding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tests.bank import PlantedBug
from tests.planted.planting.paged_bug import bug, in_pages
from tests.planted.planting.served import Call, PagedSteps, softmax
from tests.planted.planting.triggers import grouped, has

Array = jax.Array


def _halves(x: Array, allowed: Array, v: Array, sinks: Array | None) -> list[tuple[Array, Array, Array]]:
    """Both halves of the keys, each as if there were no others; the sink belongs to the first."""
    half = (x.shape[-1] + 1) // 2
    cuts = (slice(0, half), slice(half, None))
    return [softmax(x[..., cut], allowed[..., cut], v[:, cut], sinks if n == 0 else None) for n, cut in enumerate(cuts)]


def _merged_by(weigh: str, x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Two halves of the keys, merged with a mistake."""
    (out, lse, top), (other, other_lse, other_top) = _halves(x, allowed, v, sinks)
    if weigh == "empty_is_infinite":
        lse, other_lse = (jnp.where(jnp.isneginf(part), jnp.inf, part) for part in (lse, other_lse))
    if weigh == "empty_is_finite":
        lse, other_lse = (jnp.maximum(part, 0.0) for part in (lse, other_lse))
    high = jnp.maximum(lse, other_lse)
    if weigh != "both_empty":
        high = jnp.where(jnp.isfinite(high), high, 0.0)
    one, two = (jnp.exp2(p - high) if weigh == "base_two" else jnp.exp(p - high) for p in (lse, other_lse))
    one, two = (jnp.where(jnp.isposinf(p), 1.0, w) for p, w in ((lse, one), (other_lse, two)))
    if weigh == "unweighted":
        one, two = (jnp.where(jnp.isneginf(p), 0.0, 1.0) for p in (lse, other_lse))
    total = one + two
    some = total if weigh == "both_empty" else jnp.where(total > 0, total, 1)
    merged = (one[..., None] * out + two[..., None] * other) / some[..., None]
    joined = jnp.where(total > 0, high + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    right = softmax(x, allowed, v, sinks)
    return merged, right[1] if weigh in ("unweighted", "base_two") else joined, jnp.maximum(top, other_top)


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


def _shared_shift(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """One maximum for all queries of a tile, those of padding among them."""
    out, lse, top = softmax(x, allowed, v, sinks)
    return out + 0 * x.max(), lse, top


def _padded_tile(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Keys that fill up a tile have a logit of zero, and are not masked."""
    out, lse, top = softmax(x, allowed, v, sinks)
    more = 8 * jnp.exp(-jnp.where(jnp.isfinite(lse), lse, 0.0))
    return out / (1 + more)[..., None], lse + jnp.log1p(more), top


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
        "padding-reaches-real-rows",
        PagedSteps(attend=_shared_shift),
        kind="padding",
        reference="sgl-project/sglang#18659",
    ),
    bug(
        "nan-without-keys",
        PagedSteps(attend=_empty_is_nan),
        kind="padding",
        reference="sgl-project/sglang#1779",
        shows="out",
    ),
    bug(
        "tile-of-short-pages-filled-with-zeros",
        PagedSteps(attend=_padded_tile),
        kind="unit of a page",
        reference="tenstorrent/tt-metal#38004",
        shows="out logsumexp",
    ),
    bug(
        "logsumexp-of-no-keys-finite",
        PagedSteps(logsumexp=functools.partial(_lse_or, 0.0)),
        kind="no keys",
        reference="flashinfer-ai/flashinfer#4452",
        shows="logsumexp",
    ),
    bug(
        "logsumexp-of-no-keys-plus-infinity",
        PagedSteps(logsumexp=functools.partial(_lse_or, jnp.inf)),
        kind="no keys",
        reference="Dao-AILab/flash-attention#978",
        shows="logsumexp",
    ),
    *(
        bug(
            name,
            PagedSteps(attend=functools.partial(_merged_by, weigh)),
            kind="split keys",
            reference=reference,
            shows="out logsumexp",
        )
        for name, weigh, reference in (
            ("paged-merge-of-two-empty-parts", "both_empty", "vllm-project/vllm#39148"),
            ("paged-empty-part-takes-all", "empty_is_infinite", "vllm-project/vllm#15492"),
            ("paged-empty-part-counts", "empty_is_finite", "vllm-project/vllm#49294"),
            ("paged-merge-in-base-two", "base_two", "vllm-project/vllm#52796"),
            ("paged-parts-averaged", "unweighted", "inferred"),
        )
    ),
    *(
        bug(
            name,
            PagedSteps(attend=functools.partial(narrow_splits, normalised)),
            kind="splitkv.partial-dtype",
            reference=reference,
            shows="out",
            trigger=lambda case: in_pages(case) and case.dtype != "f32",
        )
        for name, normalised, reference in (
            ("paged-splits-rounded-before-they-are-merged", True, "flash-attn PR 2336, over pages"),
            ("paged-sums-of-splits-in-16-bits", False, "flash-attn PR 2336, over pages"),
        )
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
        "paged-sinks-dropped",
        PagedSteps(sinks=lambda sinks, call: None),
        kind="sinks",
        reference="sglang-jax#905",
        shows="out logsumexp",
        trigger=has("paged", "sinks"),
    ),
    bug(
        "paged-sinks-by-key-head",
        PagedSteps(sinks=lambda sinks, call: None if sinks is None else sinks.reshape(call.kv_heads, -1).T.reshape(-1)),
        kind="sinks",
        reference="vllm-project/tpu-inference#3167, sinks not grouped as heads are",
        shows="out logsumexp",
        trigger=has("paged", "sinks", "gqa"),
    ),
    bug(
        "paged-cap-after-mask",
        PagedSteps(
            cap=functools.partial(_capped_if, "masked"),
            allowed=lambda allowed, call: (
                allowed if call.soft_cap is None else allowed.any(axis=1, keepdims=True) & True
            ),
        ),
        kind="soft cap",
        reference="flashinfer-ai/flashinfer#350",
        trigger=has("paged", "soft_cap"),
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
