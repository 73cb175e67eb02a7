"""Bugs of paths that are taken for one operand or none, and of sizes that cases with several do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.mutation.kernels.triggers import both, grouped, has, one_query, sixteen_bits, trains
from tests.bank import PlantedBug
from tests.planted.beyond.combined import Pulled, backward_by, pulled_back
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="few operands")

_BLOCK = 64
_TILE = 32
_OPTIONS = ("causal", "window", "soft_cap", "scale")


def _given(arrays: Arrays, statics: Statics) -> set[str]:
    """What a call has beside q, k and v."""
    options = {name for name in _OPTIONS if statics[name] not in (None, False)}
    return options | (set(arrays) - {"q", "k", "v"})


def _alone(names: set[str], change: Callable[[Arrays, Statics], tuple[Arrays, Statics]]) -> Kernel:
    """The path for 16 bits that is taken where there is nothing but `names`."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        if _given(arrays, statics) == names and arrays["q"].dtype.itemsize == 2:
            arrays, statics = change(arrays, statics)
        return correct(arrays, statics)

    return kernel


def _alone_backward(names: set[str], back: Callable[[Arrays, Any, Statics], Pulled]) -> Kernel:
    """The same of the backward pass."""
    other = backward_by(back)

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        taken = _given(arrays, statics) == names and arrays["q"].dtype.itemsize == 2
        return (other if taken else correct)(arrays, statics)

    return kernel


def _causal_to_the_end(arrays: Arrays, statics: Statics) -> tuple[Arrays, Statics]:
    q_length, kv_length = arrays["q"].shape[1], arrays["k"].shape[1]
    last = jnp.arange(q_length)[:, None] + kv_length - q_length
    return {**arrays, "mask": (jnp.arange(kv_length) <= last)[None, None]}, {**statics, "causal": False}


def without(name: str) -> Callable[[Arrays, Any, Statics], Pulled]:
    """A backward pass that has not heard of an operand, or of an option."""

    def back(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
        left = {key: x for key, x in arrays.items() if key != name}
        options = {**statics, name: None} if name in _OPTIONS else statics
        pulled = pulled_back(left, cotangent, options)
        moving = name in arrays and name != "segment_ids"
        return {**pulled, name: jnp.zeros_like(arrays[name])} if moving else pulled

    return back


def rows_of(cotangent: Any, keep: Callable[[int], Any], axis: int) -> Any:
    """The cotangent of those rows alone: `axis` is that of `out`, and of a residual `[B, N, T]` the one it has."""

    def kept(x: Any) -> Any:
        if x.dtype == jax.dtypes.float0:
            return x
        place = {1: 2, 2: 1}.get(axis, axis) if x.ndim == 3 else axis
        shape = [1] * x.ndim
        shape[place] = x.shape[place]
        return x * jnp.asarray(keep(x.shape[place]).reshape(shape), x.dtype)

    return jax.tree.map(kept, cotangent)


def _of_even_heads(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    """Keys and values hear of every second query head."""
    found = pulled_back(arrays, cotangent, statics)
    heard = pulled_back(arrays, rows_of(cotangent, lambda heads: np.arange(heads) % 2 == 0, 2), statics)
    return {**found, "k": heard["k"], "v": heard["v"]}


def _middle_twice(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    """Blocks of queries are taken from both ends at once, so that both have as much to do: the middle one is both."""
    found = pulled_back(arrays, cotangent, statics)
    blocks = -(-arrays["q"].shape[1] // _BLOCK)
    if not statics["causal"] or blocks == 1 or blocks % 2 == 0:
        return found
    again = pulled_back(arrays, rows_of(cotangent, lambda rows: np.arange(rows) // _BLOCK == blocks // 2, 1), statics)
    return {**found, "k": found["k"] + again["k"], "v": found["v"] + again["v"]}


def _dbias_of_the_first_row(arrays: Arrays, cotangent: Any, statics: Statics) -> Pulled:
    found = pulled_back(arrays, cotangent, statics)
    if "bias" in arrays and arrays["bias"].shape[:2] == (1, 1):
        of_first = pulled_back(arrays, rows_of(cotangent, lambda rows: np.arange(rows) == 0, 0), statics)
        found = {**found, "bias": of_first["bias"]}
    return found


def _taken_for_heads(name: str) -> Kernel:
    """An array of as many planes as there are heads is one for each head, also where they are batch rows."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        array, heads = arrays.get(name), arrays["q"].shape[2]
        if array is not None and array.shape[:2] == (heads, 1) and arrays["q"].shape[0] == heads:
            arrays = {**arrays, name: jnp.swapaxes(array, 0, 1)}
        return correct(arrays, statics)

    return kernel


def _last_tile_twice(arrays: Arrays, statics: Statics) -> Any:
    """The loop of late queries ends behind the last tile of keys, where a slice is moved back to where there are."""
    q_length, kv_length = arrays["q"].shape[1], arrays["k"].shape[1]
    if not statics["causal"] or q_length <= kv_length or kv_length <= _TILE:
        return correct(arrays, statics)
    late = jnp.arange(q_length)[:, None] >= -(-kv_length // _TILE) * _TILE
    last = jnp.arange(kv_length) >= (kv_length - 1) // _TILE * _TILE
    twice = jnp.where(late & last, np.float32(np.log(2)), 0)[None, None]
    return correct({**arrays, "bias": arrays.get("bias", 0) + twice}, statics)


def _lone_query_without_window(arrays: Arrays, statics: Statics) -> Any:
    return correct(arrays, {**statics, "window": None} if arrays["q"].shape[1] == 1 else statics)


def _few_queries_see_on(arrays: Arrays, statics: Statics) -> Any:
    window = statics["window"]
    if window is not None and arrays["q"].shape[1] <= 8 and _given(arrays, statics) == {"window"}:
        statics = {**statics, "window": (window[0], None)}
    return correct(arrays, statics)


def _served_without_sinks(arrays: Arrays, statics: Statics) -> Any:
    if arrays["q"].shape[1] == 1 and _given(arrays, statics) == {"mask", "sinks"}:
        arrays = {name: x for name, x in arrays.items() if name != "sinks"}
    return correct(arrays, statics)


def _pivot_of_the_group(arrays: Arrays, statics: Statics) -> Any:
    """One maximum for all heads that share keys: what lies too far below it is nothing in f32."""
    out, residuals = correct(arrays, {**statics, "save_residuals": True})
    top = residuals["max_logits"]  # [B, N, T]
    groups = top.reshape(top.shape[0], arrays["k"].shape[2], -1, top.shape[2])
    lost = (groups.max(axis=2, keepdims=True) - groups > 104).reshape(top.shape)
    out = jnp.where(jnp.swapaxes(lost, 1, 2)[..., None], 0, out).astype(out.dtype)
    return (out, residuals) if statics["save_residuals"] else out


_MASKS: dict[Any, Any] = {}


def _mask_by_its_first_row(arrays: Arrays, statics: Statics) -> Any:
    """A mask that was prepared once is found again by its shape and by the keys of its first query."""
    mask = arrays.get("mask")
    if mask is not None and not isinstance(mask, jax.core.Tracer):
        found = np.asarray(mask)
        key = (found.shape, found[..., 0, :].tobytes())
        arrays = {**arrays, "mask": _MASKS.setdefault(key, found)}
    return correct(arrays, statics)


_ALL = ("out", "logsumexp", "dq", "dk", "dv")

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "plain-causal-path-of-16-bits-aligns-the-ends",
        _alone({"causal"}, _causal_to_the_end),
        kind="causal.alignment",
        reference="inferred from mlx#2835 and pytorch#103082, for a path of one fused call",
        shows=_ALL,
        trigger=both(has("causal", "unequal_lengths"), sixteen_bits),
    ),
    _bug(
        "plain-causal-backward-of-16-bits-hears-every-second-head",
        _alone_backward({"causal"}, _of_even_heads),
        kind="gqa.sum-missing",
        reference="inferred from levanter#449, for a path without extras",
        shows=("dk", "dv"),
        trigger=both(trains("causal"), sixteen_bits, grouped),
    ),
    _bug(
        "middle-of-an-odd-number-of-query-blocks-counts-twice",
        backward_by(_middle_twice),
        kind="blocks.odd",
        reference="inferred from schedules that pair the first block of queries with the last",
        shows=("dk", "dv"),
        trigger=trains("causal"),
    ),
    _bug(
        "backward-of-packed-causal-sequences-alone-has-no-segments",
        _alone_backward({"causal", "segment_ids"}, without("segment_ids")),
        kind="segments.fast-path",
        reference="inferred from transformers PR 46634 (packing not detected on one path)",
        shows=("dq", "dk", "dv"),
        trigger=both(trains("causal", "segment_ids"), sixteen_bits),
    ),
    _bug(
        "backward-of-a-window-with-sinks-alone-has-no-sinks",
        _alone_backward({"window", "sinks"}, without("sinks")),
        kind="sink.no-grad",
        reference="inferred from flash-attn#1973 and PR 2706, for the pair that one model has",
        shows=("dq", "dk", "dv", "dsinks"),
        trigger=both(trains("window", "sinks"), sixteen_bits),
    ),
    _bug(
        "backward-of-a-window-with-soft-cap-alone-has-no-cap",
        _alone_backward({"window", "soft_cap"}, without("soft_cap")),
        kind="cap.bwd-missing",
        reference="inferred from flash-attn PR 1033, for the pair that one model has",
        shows=("dq", "dk", "dv"),
        trigger=both(trains("window", "soft_cap"), sixteen_bits),
    ),
    _bug(
        "dbias-of-pairs-is-that-of-the-first-row",
        backward_by(_dbias_of_the_first_row),
        kind="grad.broadcast",
        reference="inferred from HKUSTDial PR 199 (dbias not summed over the axes that it shares)",
        shows=("dbias",),
        trigger=trains("bias"),
    ),
    _bug(
        "mask-of-as-many-rows-as-heads-is-taken-for-heads",
        _taken_for_heads("mask"),
        kind="gqa.mask-broadcast-collision",
        reference="inferred from mlx-lm PR 1903, where rows are as many as query heads",
        shows=_ALL,
        trigger=lambda case: case.batch == case.num_q_heads > 1,
    ),
    _bug(
        "bias-of-as-many-rows-as-heads-is-taken-for-heads",
        _taken_for_heads("bias"),
        kind="gqa.mask-broadcast-collision",
        reference="inferred from mlx-lm PR 1903, for a bias",
        shows=(*_ALL, "dbias"),
        trigger=lambda case: case.batch == case.num_q_heads > 1,
    ),
    _bug(
        "late-causal-queries-read-the-last-tile-twice",
        _last_tile_twice,
        kind="blocks.clamped",
        reference="inferred from loops over `jax.lax.dynamic_slice`, which moves a slice that reaches too far back",
        shows=_ALL,
        trigger=both(has("causal"), lambda case: case.q_length > case.kv_length),
    ),
    _bug(
        "a-lone-query-has-no-window",
        _lone_query_without_window,
        kind="window.decode-ignored",
        reference="inferred from mistral.rs#2094 (window not given to the decode kernel)",
        shows=_ALL,
        trigger=both(has("window"), one_query),
    ),
    _bug(
        "few-queries-under-a-window-alone-see-all-that-follows",
        _few_queries_see_on,
        kind="window.right",
        reference="inferred from paths for decoding, in which nothing follows",
        shows=_ALL,
        trigger=both(has("window"), lambda case: case.q_length <= 8),
    ),
    _bug(
        "one-query-with-a-mask-and-sinks-alone-has-no-sinks",
        _served_without_sinks,
        kind="sink.s1-vs-sN",
        reference="inferred from mlx#3452 (sinks in the path of one query)",
        shows=("out", "logsumexp"),
        trigger=both(has("sinks"), one_query),
    ),
    _bug(
        "one-pivot-for-the-heads-of-a-group",
        _pivot_of_the_group,
        kind="softmax.pivot",
        reference="inferred from tokamax 05f5a84 (one maximum in place of one for each row)",
        shows=("out", "dq", "dv"),
        trigger=both(grouped, lambda case: case.distribution == "levels"),
    ),
    _bug(
        "eager-mask-kept-by-its-first-row",
        _mask_by_its_first_row,
        kind="cache.key",
        reference="inferred from imp#538 (a table is kept where the first entries are the same)",
        shows=("out",),
    ),
)
