"""Bugs of calls that few tests make: arrays of other ranks, lone operands, windows of unlike lengths, shards, donation.

Each is planted in two kernels: all logits at once, and an online softmax over blocks of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance import declare
from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.kernels import naive, online_softmax, serving_attention
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, attention_by

_FAMILY = "forms of calls"
_BLOCK = 128
_STYLES = {"": naive.attention, "-in-blocks": online_softmax.attention}


def _plant(name: str, make: Callable[[Kernel], Kernel], **details: Any) -> tuple[PlantedBug, ...]:
    """Plant what `make` does to a correct kernel in both kernels, of which neither returns residuals here."""

    def build(attention: Callable[..., Any], name: str) -> Implementation:
        def correct(arrays: Arrays, statics: Statics) -> Any:
            return attention(**arrays, **{key: x for key, x in statics.items() if key != "save_residuals"})

        full = attention_by(make(correct))

        @declare(behind_mask="finite")
        def without_residuals(
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
        ) -> Any:
            masks = {"causal": causal, "window": window, "mask": mask, "segment_ids": segment_ids}
            return full(q, k, v, **masks, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale)

        return build_implementation(without_residuals, name)

    return tuple(
        PlantedBug(
            name=f"{name}{suffix}",
            family=_FAMILY,
            shows=("out",),
            build=functools.partial(build, attention, f"{name}{suffix}"),
            **details,
        )
        for suffix, attention in _STYLES.items()
    )


def _read_ranks_by_batch(correct: Kernel) -> Kernel:
    """A mask of three axes is `[B, T, S]`, where that fits."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        mask = arrays.get("mask")
        if mask is not None and mask.ndim == 3 and mask.shape[0] == arrays["q"].shape[0]:
            arrays = {**arrays, "mask": mask[:, None]}
        return correct(arrays, statics)

    return kernel


def _count_padding_of(name: str, causal: bool) -> Callable[[Kernel], Kernel]:
    """The path for one operand by itself fills the last block of keys with zeros, and lets queries see them."""

    def make(correct: Kernel) -> Kernel:
        def kernel(arrays: Arrays, statics: Statics) -> Any:
            options = {key for key in ("soft_cap", "scale", "window") if statics[key] is not None}
            given = options | set(arrays) - {"q", "k", "v"}
            if given != {name} or statics["causal"] != causal or arrays["k"].shape[1] < _BLOCK:
                return correct(arrays, statics)
            rest = -arrays["k"].shape[1] % _BLOCK
            padded = {key: jnp.pad(arrays[key], ((0, 0), (rest, 0), (0, 0), (0, 0))) for key in ("k", "v")}
            if causal:
                queries = jnp.pad(arrays["q"], ((0, 0), (rest, 0), (0, 0), (0, 0)))
                return correct({**arrays, **padded, "q": queries}, statics)[:, rest:]
            return correct({**arrays, **padded}, statics)

        return kernel

    return make


def _keep_right_side(correct: Kernel) -> Kernel:
    """Outside `jit`, masks are cached by the left side of a window and by shapes."""
    cache: dict[Any, Any] = {}

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        window = statics["window"]
        if window is None or isinstance(arrays["q"], jax.core.Tracer):
            return correct(arrays, statics)
        shapes = tuple((name, x.shape, str(x.dtype)) for name, x in arrays.items() if hasattr(x, "shape"))
        key = window[0], statics["causal"], statics["soft_cap"], statics["scale"], shapes
        return correct(arrays, {**statics, "window": cache.setdefault(key, window)})

    return kernel


def _drop_left_side_in_shards(correct: Kernel) -> Kernel:
    """Drop the left side of a window on a device that has only some of the heads."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        window, heads = statics["window"], arrays["k"].shape[2]
        is_sharded = bool(jax.sharding.get_abstract_mesh().manual_axes) and heads == 1
        if window is not None and is_sharded:
            statics = {**statics, "window": (None, window[1])}
        return correct(arrays, statics)

    return kernel


def _stop_one_early_with_fewer_queries(correct: Kernel) -> Kernel:
    """The last key that a block of queries sees is rounded down, where queries begin with the keys and end before."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        window, q_length = statics["window"], arrays["q"].shape[1]
        if window is not None and window[1] and 1 < q_length < arrays["k"].shape[1] and not statics["causal"]:
            statics = {**statics, "window": (window[0], window[1] - 1)}
        return correct(arrays, statics)

    return kernel


def _share_the_last_heads(correct: Kernel) -> Kernel:
    """All query heads beyond the 128 rows of a tile read the last key/value head of the tile."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        heads = jnp.arange(arrays["q"].shape[2]) // (arrays["q"].shape[2] // arrays["k"].shape[2])
        read = heads[jnp.minimum(jnp.arange(len(heads)), 127 * arrays["q"].shape[1])]
        return correct({**arrays, "k": arrays["k"][:, :, read], "v": arrays["v"][:, :, read]}, statics)

    return kernel


def _cut_depth_by_queries(correct: Kernel) -> Kernel:
    """A tile of few queries has room for the first components of each query only."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        q = arrays["q"]
        kept = jnp.arange(q.shape[3]) < 384 + 16 * q.shape[1]
        scale = statics["scale"] if statics["scale"] is not None else q.shape[3] ** -0.5
        return correct({**arrays, "q": jnp.where(kept, q, 0)}, {**statics, "scale": scale})

    return kernel


def _lose_the_mapped_cap(correct: Kernel) -> Kernel:
    """The rule for `vmap` of a call with a window has no soft cap."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if statics["window"] is not None and type(arrays["q"]).__name__ == "BatchTracer":
            statics = {**statics, "soft_cap": None}
        return correct(arrays, statics)

    return kernel


def _lose_the_sinks_of_shards(correct: Kernel) -> Kernel:
    """Under `shard_map`, a call without a mask has no sinks."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        has_mask = statics["causal"] or statics["window"] is not None or arrays.get("mask") is not None
        if jax.sharding.get_abstract_mesh().manual_axes and not has_mask:
            arrays = {**arrays, "sinks": None}
        return correct(arrays, statics)

    return kernel


def _donate(function: Callable[..., Any], name: str) -> Callable[[], Implementation]:
    """Build the function around an inner program that gets `name` donated."""

    def build() -> Implementation:
        program = jax.jit(
            function, donate_argnames=name, static_argnames=("window", "scale", "soft_cap", "save_residuals")
        )
        return build_implementation(functools.wraps(function)(lambda *a, **k: program(*a, **k)), f"{name}-donated")

    return build


def _has_window(case: Case) -> bool:
    return "window" in case.mask


def _has_sinks_alone(case: Case) -> bool:
    return bool(case.sinks) and case.mask == "full"


BUGS: tuple[PlantedBug, ...] = (
    *_plant(
        "mask-of-rank-three-read-by-batch",
        _read_ranks_by_batch,
        kind="mask.rank",
        reference="inferred from mlx-lm PR 1903, where axes are aligned by a size that happens to fit",
        trigger=lambda case: case.mask.startswith("dense"),
    ),
    *_plant(
        "lone-cap-counts-padding",
        _count_padding_of("soft_cap", causal=False),
        kind="lone.padding",
        reference="inferred from pytorch issue 181645, where one path of several masks its last block otherwise",
        trigger=lambda case: case.soft_cap is not None,
    ),
    *_plant(
        "lone-sinks-count-padding",
        _count_padding_of("sinks", causal=True),
        kind="lone.padding",
        reference="inferred from pytorch issue 181645, where one path of several masks its last block otherwise",
        trigger=lambda case: case.sinks is not None,
    ),
    *_plant(
        "eager-window-kept-by-its-left-side",
        _keep_right_side,
        kind="window.cached",
        reference="inferred from caches of masks that are keyed by the size of a window",
        trigger=_has_window,
    ),
    *_plant(
        "window-without-left-side-where-heads-are-sharded",
        _drop_left_side_in_shards,
        kind="sharding.window",
        reference="inferred from TransformerEngine issue 3528, where a side is lost on the way to another path",
        trigger=_has_window,
    ),
    *_plant(
        "cap-lost-where-a-window-is-mapped",
        _lose_the_mapped_cap,
        kind="vmap.window",
        reference="inferred from TransformerEngine issue 3528, where a side is lost on the way to another path",
        trigger=_has_window,
    ),
    *_plant(
        "sinks-lost-where-a-call-without-a-mask-is-sharded",
        _lose_the_sinks_of_shards,
        kind="sharding.sinks",
        reference="inferred from TransformerEngine issue 3528, where a side is lost on the way to another path",
        trigger=_has_sinks_alone,
    ),
    *_plant(
        "query-heads-beyond-a-tile-share-a-key-head",
        _share_the_last_heads,
        kind="group.large",
        reference="inferred from launches that hold a fixed number of rows",
        trigger=lambda case: case.q_length == 1 and case.num_q_heads > 128 and case.num_kv_heads > 1,
    ),
    *_plant(
        "depth-cut-where-queries-are-few",
        _cut_depth_by_queries,
        kind="depth.few-queries",
        reference="inferred from tiles of queries that are sized for usual depths",
        trigger=lambda case: case.head_dim > 384 + 16 * case.q_length,
    ),
    *_plant(
        "window-one-key-short-where-queries-end-before-keys",
        _stop_one_early_with_fewer_queries,
        kind="window.unlike-lengths",
        reference="inferred from vllm issue 47300: queries of causal and window counted from different places",
        trigger=_has_window,
    ),
    PlantedBug(
        name="pages-deleted-by-the-call-that-writes-them",
        family=_FAMILY,
        kind="donation.stored",
        reference="inferred from serving engines that donate their cache to the step",
        shows=("operands",),
        build=_donate(serving_attention.writing, "k_pages"),
    ),
    PlantedBug(
        name="packed-queries-deleted-by-the-call",
        family=_FAMILY,
        kind="donation.stored",
        reference="inferred from serving engines that donate the activations of a step",
        shows=("operands",),
        build=_donate(serving_attention.paged, "q"),
    ),
)
