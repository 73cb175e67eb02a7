"""Bugs of kernels that were written without a look at the cases, and that `quick` left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare
from conformance.execution.plain_functions import build_implementation
from conformance.mutation.kernels.triggers import both, has, one_query
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.kernels import naive
from tests.planted.planting.latent import LatentSteps, in_pages, paged_latent
from tests.planted.planting.served import Call, PackedSteps, PagedSteps, packed, paged, sequences, softmax
from tests.planted.planting.wrapped import Arrays, Statics, correct, planted

_FAMILY = "unseen"
_BLOCK = 64
# A weight, of the largest in its row, that is left out.
_NOTHING = 1e-9
_SPLIT = 1024
_TAIL = 512
# What a pivot begins with that is to be below all logits.
_FIRST_PIVOT = -100.0

Array = jax.Array


def _seen(arrays: Arrays, statics: Statics, seen: Array) -> Any:
    """The correct result under a mask that also hides the pairs `~seen`, `[T, S]`, `[1, S]` or with all four axes."""
    seen = seen[None, None] if seen.ndim == 2 else seen
    return correct({**arrays, "mask": arrays["mask"] & seen if "mask" in arrays else seen}, statics)


def _last_block_ahead_floored(arrays: Arrays, statics: Statics) -> Any:
    """The loop over key blocks ends at `(first query of the block + block + right) // block`, if right is wide."""
    right = None if statics["window"] is None else statics["window"][1]
    if right is None or right <= _BLOCK:
        return correct(arrays, statics)
    first = jnp.arange(arrays["q"].shape[1])[:, None] // _BLOCK * _BLOCK
    ends = (first + _BLOCK + min(right, 2**20)) // _BLOCK * _BLOCK
    return _seen(arrays, statics, jnp.arange(arrays["k"].shape[1]) < ends)


def _open_window_ends_with_the_queries(arrays: Arrays, statics: Statics) -> Any:
    """Under a window that is open ahead, key blocks end with the block of the last query."""
    if statics["window"] is None or statics["window"][1] is not None:
        return correct(arrays, statics)
    end = -(-arrays["q"].shape[1] // _BLOCK) * _BLOCK
    return _seen(arrays, statics, (jnp.arange(arrays["k"].shape[1]) < end)[None])


def _pivot_from_a_number(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """The pivot begins with a number, and what lies below it underflows."""
    low = jnp.max(x, axis=-1, keepdims=True, where=allowed, initial=-jnp.inf) < 2 * _FIRST_PIVOT
    out, logsumexp, top = softmax(x, allowed & ~low, v, sinks)
    return out, logsumexp, jnp.maximum(top, _FIRST_PIVOT)


def _faint_keys_left_out(arrays: Arrays, statics: Statics) -> Any:
    """Keys whose weight is next to nothing beside the largest of the row are skipped, whatever their values."""
    fixed = jax.lax.stop_gradient(arrays)
    top = correct(fixed, {**statics, "save_residuals": True})[1]["max_logits"]
    q, k = (fixed[name].astype(jnp.float32) for name in ("q", "k"))
    scale = q.shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
    x = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)) * scale
    x = x + fixed["bias"].astype(jnp.float32) if "bias" in fixed else x
    x = x if statics["soft_cap"] is None else statics["soft_cap"] * jnp.tanh(x / statics["soft_cap"])
    return _seen(arrays, statics, x >= jnp.where(jnp.isfinite(top), top, 0)[..., None] + jnp.log(_NOTHING))


def _faint_keys_of_packs_left_out(x: Array, allowed: Array, v: Array, sinks: Array | None) -> Any:
    """Likewise of stored sequences."""
    top = jnp.max(x, axis=-1, keepdims=True, where=allowed, initial=-jnp.inf)
    return softmax(x, allowed & (x >= top + jnp.log(_NOTHING)), v, sinks)


def _left_of_zero_is_open(arrays: Arrays, statics: Statics) -> Any:
    """`if left:`, where it may be 0."""
    window = statics["window"]
    return correct(arrays, statics if not window or window[0] else {**statics, "window": (None, window[1])})


def _mask_that_hides_nothing_is_all(arrays: Arrays, statics: Statics) -> Any:
    """A mask of which every pair is true is taken for no mask at all, and the causal one beside it is forgotten."""
    if "mask" not in arrays or not statics["causal"]:
        return correct(arrays, statics)
    i, j = jnp.ogrid[: arrays["q"].shape[1], : arrays["k"].shape[1]]
    seen = (arrays["mask"] & (j <= i)) | arrays["mask"].all()
    return correct({**arrays, "mask": seen}, {**statics, "causal": False})


def _splits_and_a_tail(arrays: Arrays, statics: Statics) -> Any:
    """One query reads whole splits of a long cache, and a tail of its last keys that the rest may be longer than."""
    kv_length = arrays["k"].shape[1]
    if arrays["q"].shape[1] > 1 or kv_length < _SPLIT:
        return correct(arrays, statics)
    j = jnp.arange(kv_length)
    return _seen(arrays, statics, ((j < kv_length // _SPLIT * _SPLIT) | (j >= kv_length - _TAIL))[None])


def _bias_of_all_keys_changes_nothing(arrays: Arrays, statics: Statics) -> Any:
    """What all keys share cancels in the weights, without sinks and cap; the residuals have it all the same."""
    if "bias" in arrays and arrays["bias"].shape[3] == 1 and "sinks" not in arrays and statics["soft_cap"] is None:
        return correct({name: x for name, x in arrays.items() if name != "bias"}, statics)
    return correct(arrays, statics)


def _pages_of_the_last_query(j: Array, position: Array, call: Call, place: Array) -> Array:
    """A step of two queries begins at the first page that its last query sees."""
    if call.left is None:
        return jnp.asarray(True)
    sequence, _ = sequences(call.cu_q_lens, call, len(call.q))
    two = call.q_lens[jnp.minimum(sequence, call.rows - 1)] == 2
    page = (position - place + 1 - call.left) // call.page_size * call.page_size
    return (j >= position[:, None] - call.left) & ((j >= page[:, None]) | ~two[:, None])


def _as_single_tokens(allowed: Array, call: Call) -> Array:
    """No more queries than rows of the tables are taken for one query of each: all that lies in the cache is seen."""
    if len(call.q) > call.rows:
        return allowed
    sequence, _ = sequences(call.cu_q_lens, call, len(call.q))
    ends = jnp.where(sequence < call.rows, call.kv_lens[jnp.minimum(sequence, call.rows - 1)], 0)
    return jnp.arange(allowed.shape[-1]) < ends.reshape(-1, *[1] * (allowed.ndim - 1))


def _by_keys(place: Array, kv_length: int, given: dict[str, Any]) -> Array:
    """Under a causal mask alone slopes are a number for each key: the same weights, if there were no sinks."""
    alone = all(given[name] is None for name in ("bias", "soft_cap", "mask", "window"))
    return jnp.full_like(place, kv_length) if given["sinks"] is not None and alone else place


def _from_the_first_key(place: Array, kv_length: int, given: dict[str, Any]) -> Array:
    """Beside a window the distances are those of the window's own places, which begin at the first key."""
    return place if given["window"] is None else place - place[0]


def _sloped(places: Callable[..., Array], q: Any, k: Any, v: Any, slopes: Any, given: dict[str, Any]) -> Any:
    if slopes is None:
        return naive.attention(q, k, v, **given)
    q_length, kv_length = q.shape[1], k.shape[1]
    place = places(jnp.arange(q_length)[:, None] + kv_length - q_length, kv_length, given)
    fall = -slopes[:, None, None] * jnp.abs(place - jnp.arange(kv_length))
    bias = fall[None] if given["bias"] is None else given["bias"] + fall
    return naive.attention(q, k, v, **{**given, "bias": bias})


def _with_slopes(name: str, places: Callable[..., Array]) -> Implementation:
    @declare(behind_mask="finite")
    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        window: Any = None,
        mask: Any = None,
        segment_ids: Any = None,
        soft_cap: Any = None,
        sinks: Any = None,
        bias: Any = None,
        scale: Any = None,
        alibi_slopes: Any = None,
        save_residuals: bool = False,
    ) -> Any:
        given = {"causal": causal, "window": window, "mask": mask, "segment_ids": segment_ids, "soft_cap": soft_cap}
        given |= {"sinks": sinks, "bias": bias, "scale": scale, "save_residuals": save_residuals}
        return _sloped(places, q, k, v, alibi_slopes, given)

    return build_implementation(attention, name)


def _whole_vectors(x: Array, value_dim: int) -> Array:
    """The product over depth goes by eight coordinates at a time, and leaves the rest out."""
    del value_dim
    return jnp.where(jnp.arange(x.shape[-1]) < x.shape[-1] // 8 * 8, x, 0)


def _wide_right(case: Any) -> bool:
    return "-r75" in case.mask or "-r99999" in case.mask


_ALL = ("out", "logsumexp", "dq", "dk", "dv")
_PAGES = ("out", "logsumexp")

BUGS: tuple[PlantedBug, ...] = (
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
    planted(
        "faint-keys-left-out",
        _faint_keys_left_out,
        family=_FAMILY,
        kind="softmax.skip",
        reference="inferred from kernels that skip blocks of keys whose largest logit is far below the pivot",
        shows=("out", "dq", "dk", "dv"),
    ),
    PlantedBug(
        name="faint-keys-of-packs-left-out",
        family=_FAMILY,
        kind="softmax.skip",
        reference="inferred from kernels that skip blocks of keys whose largest logit is far below the pivot",
        shows=("out", "dq", "dk", "dv"),
        build=functools.partial(
            packed, "faint-keys-of-packs-left-out", PackedSteps(attend=_faint_keys_of_packs_left_out)
        ),
        trigger=has("packed"),
    ),
    planted(
        "left-side-of-zero-is-open",
        _left_of_zero_is_open,
        family=_FAMILY,
        kind="window.falsy",
        reference="inferred from sides of a window that are tested for their truth",
        shows=_ALL,
        trigger=lambda case: "window-l0-" in case.mask,
    ),
    planted(
        "mask-that-hides-nothing-drops-the-causal-one",
        _mask_that_hides_nothing_is_all,
        family=_FAMILY,
        kind="mask.fast-path",
        reference="inferred from paths without a mask that are chosen by what an array holds",
        shows=_ALL,
        trigger=has("causal", "dense"),
    ),
    planted(
        "tail-of-splits-shorter-than-the-rest",
        _splits_and_a_tail,
        family=_FAMILY,
        kind="splitkv.rest",
        reference="inferred from jax b8b9f2bc33 (bounds rounded down), for splits of a cache",
        shows=_PAGES,
        trigger=both(one_query, lambda case: case.kv_length > _SPLIT and case.kv_length % _SPLIT > _TAIL),
    ),
    planted(
        "bias-of-all-keys-is-not-in-the-residuals",
        _bias_of_all_keys_changes_nothing,
        family=_FAMILY,
        kind="bias.dropped",
        reference="inferred from terms that are left out since they cancel in the softmax",
        shows=("logsumexp", "max_logits"),
        trigger=has("bias"),
    ),
    PlantedBug(
        name="step-of-two-begins-at-the-page-of-its-last-query",
        family=_FAMILY,
        kind="window.pages",
        reference="vllm-project/tpu-inference pull request 1954, for a step of two queries",
        shows=_PAGES,
        build=functools.partial(
            paged, "step-of-two-begins-at-the-page-of-its-last-query", PagedSteps(window=_pages_of_the_last_query)
        ),
        trigger=has("paged"),
    ),
    PlantedBug(
        name="no-more-queries-than-rows-are-single-tokens",
        family=_FAMILY,
        kind="paged.decode-only",
        reference="inferred from paths for decoding alone that are chosen by how many queries there are in all",
        shows=_PAGES,
        build=functools.partial(
            paged, "no-more-queries-than-rows-are-single-tokens", PagedSteps(allowed=_as_single_tokens)
        ),
        trigger=has("paged"),
    ),
    PlantedBug(
        name="slopes-by-keys-beside-sinks",
        family=_FAMILY,
        kind="alibi.sinks",
        reference="inferred from kernels that add slope * j, since what a row shares cancels in the softmax",
        shows=_ALL,
        build=functools.partial(_with_slopes, "slopes-by-keys-beside-sinks", _by_keys),
        trigger=has("alibi_slopes", "sinks", "causal"),
    ),
    PlantedBug(
        name="slopes-from-the-first-key-beside-a-window",
        family=_FAMILY,
        kind="alibi.alignment",
        reference="inferred from kernels with one offset for the window and for ALiBi",
        shows=_ALL,
        build=functools.partial(_with_slopes, "slopes-from-the-first-key-beside-a-window", _from_the_first_key),
        trigger=both(has("alibi_slopes", "window"), lambda case: case.q_length != case.kv_length),
    ),
    PlantedBug(
        name="latent-depth-in-whole-vectors",
        family=_FAMILY,
        kind="latent.depth",
        reference="sgl-project/sglang issue 15522 (a block over the border of the rotary part), for a rest",
        shows=_PAGES,
        build=functools.partial(paged_latent, "latent-depth-in-whole-vectors", LatentSteps(queries=_whole_vectors)),
        trigger=in_pages,
    ),
    planted(
        "open-window-ends-with-the-queries",
        _open_window_ends_with_the_queries,
        family=_FAMILY,
        kind="window.block-skip",
        reference="flashinfer-ai/flashinfer issue 4972 (the first tile of a window), for its end",
        shows=_PAGES,
        trigger=lambda case: "-rinf" in case.mask,
    ),
)
