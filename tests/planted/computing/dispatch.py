"""Bugs in the choice of a kernel: operands that one route loses, changes or adds a second time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import both, has, trains
from tests.bank import PlantedBug
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="dispatch")
_LONG = 128
Call = Callable[[Arrays, Statics], Any]


def _on(chosen: Callable[[Arrays, Statics], bool], route: Call) -> Kernel:
    """The correct kernel, but `route` where a call is `chosen` for it."""
    return lambda arrays, statics: (route if chosen(arrays, statics) else correct)(arrays, statics)


def _long(arrays: Arrays, statics: Statics) -> bool:
    return arrays["k"].shape[1] >= _LONG


def _one_query(arrays: Arrays, statics: Statics) -> bool:
    return arrays["q"].shape[1] == 1


def _grouped(arrays: Arrays, statics: Statics) -> bool:
    return arrays["q"].shape[2] != arrays["k"].shape[2]


def _unequal(arrays: Arrays, statics: Statics) -> bool:
    return arrays["q"].shape[1] != arrays["k"].shape[1]


def _without_static(**changed: Any) -> Call:
    return lambda arrays, statics: correct(arrays, {**statics, **changed})


def _without(*operands: str) -> Call:
    return lambda arrays, statics: correct({name: x for name, x in arrays.items() if name not in operands}, statics)


def _scaled_twice(arrays: Arrays, statics: Statics) -> Any:
    scale = statics["scale"]
    q = arrays["q"] if scale is None else (arrays["q"] * scale).astype(arrays["q"].dtype)
    return correct({**arrays, "q": q}, statics)


def _base_two(arrays: Arrays, statics: Statics) -> Any:
    result = correct(arrays, statics)
    if not statics["save_residuals"]:
        return result
    return result[0], {**result[1], "logsumexp": result[1]["logsumexp"] / math.log(2)}


def _constant_residuals(arrays: Arrays, statics: Statics) -> Any:
    result = correct(arrays, statics)
    return (result[0], jax.lax.stop_gradient(result[1])) if statics["save_residuals"] else result


def _in_bf16(arrays: Arrays, statics: Statics) -> Any:
    rounded = {name: jax.lax.reduce_precision(arrays[name], 8, 7) for name in ("q", "k", "v")}
    return correct({**arrays, **rounded}, statics)


def _repeated_heads(arrays: Arrays, statics: Statics) -> Any:
    """A kernel without groups gets its keys tiled, so that query head `n` reads key/value head `n % K`."""
    group = arrays["q"].shape[2] // arrays["k"].shape[2]
    tiled = {name: jnp.tile(arrays[name], (1, 1, group, 1)) for name in ("k", "v")}
    return correct({**arrays, **tiled}, statics)


def _mean_of_bias(arrays: Arrays, statics: Statics) -> Any:
    """A kernel that takes one bias for all heads gets that of the first."""
    if "bias" not in arrays:
        return correct(arrays, statics)
    return correct({**arrays, "bias": arrays["bias"][:, :1]}, statics)


def _aligned_at_the_end(arrays: Arrays, statics: Statics) -> Any:
    """A kernel whose causal mask ends with the keys is asked for one that starts with them."""
    if not statics["causal"]:
        return correct(arrays, statics)
    t, s = arrays["q"].shape[1], arrays["k"].shape[1]
    mask = jnp.arange(s)[None] <= jnp.arange(t)[:, None] + s - t
    both = mask[None, None] & arrays["mask"] if "mask" in arrays else mask[None, None]
    return correct({**arrays, "mask": both}, {**statics, "causal": False})


def _is_long(case: Case) -> bool:
    return case.kv_length >= _LONG


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "dispatch-long-route-drops-soft-cap",
        _on(_long, _without_static(soft_cap=None)),
        kind="cap.dropped-by-backend",
        reference="sglang issue 33915, PR 34093; sgl-kernel-xpu PR 491",
        shows=("out", "logsumexp", "effect_of_soft_cap"),
        trigger=both(has("soft_cap"), _is_long),
    ),
    _bug(
        "dispatch-long-route-drops-window",
        _on(_long, _without_static(window=None)),
        kind="cap.dropped-by-backend",
        reference="sglang issue 33915: window_left lost the same way",
        shows=("out", "logsumexp", "effect_of_mask"),
        trigger=both(has("window"), _is_long),
    ),
    _bug(
        "dispatch-one-query-route-forgets-sinks",
        _on(_one_query, _without("sinks")),
        kind="sink.s1-vs-sN",
        reference="mlx issue 3452",
        shows=("out", "logsumexp"),
        trigger=both(has("sinks"), lambda case: case.q_length == 1),
    ),
    _bug(
        "dispatch-causal-route-drops-mask",
        _on(lambda arrays, statics: statics["causal"], _without("mask")),
        kind="mask.causal-and-bool",
        reference="tokamax 5de3e74",
        shows=("out", "logsumexp"),
        trigger=has("causal"),
    ),
    _bug(
        "dispatch-masked-route-drops-segment-ids",
        _on(lambda arrays, statics: "mask" in arrays, _without("segment_ids")),
        kind="packing.ignored-when-mask",
        reference="transformers PR 46634",
        shows=("out", "logsumexp"),
        trigger=both(has("segment_ids"), lambda case: case.mask not in ("full", "causal")),
    ),
    _bug(
        "dispatch-unequal-route-drops-segment-ids",
        _on(_unequal, _without("segment_ids")),
        kind="seg.packing-off-padmask",
        reference="maxtext PR 4929",
        shows=("out", "logsumexp"),
        trigger=has("segment_ids", "unequal_lengths"),
    ),
    _bug(
        "dispatch-long-route-drops-bias",
        _on(_long, _without("bias")),
        kind="sink.dead-code",
        reference="inferred from vllm-metal PR 550: an operand that one of three paths ignores",
        shows=("out", "logsumexp"),
        trigger=both(has("bias"), _is_long),
    ),
    _bug(
        "dispatch-grouped-route-takes-bias-of-first-head",
        _on(_grouped, _mean_of_bias),
        kind="gqa.bias-head",
        reference="inferred from jax PR 36702",
        shows=("out", "logsumexp"),
        trigger=lambda case: case.num_q_heads != case.num_kv_heads and case.bias in ("bias", "biashead"),
    ),
    _bug(
        "dispatch-route-without-groups-tiles-heads",
        _on(_grouped, _repeated_heads),
        kind="gqa.interleave-div",
        reference="native-sparse-attention-triton issue 27",
        shows=("out", "logsumexp"),
        trigger=lambda case: case.num_q_heads > case.num_kv_heads > 1,
    ),
    _bug(
        "dispatch-long-route-scales-twice",
        _on(_long, _scaled_twice),
        kind="scale.dropped",
        reference="jax 916e53a8a2",
        shows=("out", "logsumexp"),
        trigger=both(has("scale"), _is_long),
    ),
    _bug(
        "dispatch-unequal-route-aligns-causal-at-the-end",
        _on(_unequal, _aligned_at_the_end),
        kind="causal.alignment",
        reference="inferred from maxtext 8f82f2d02",
        shows=("out", "logsumexp"),
        trigger=has("causal", "unequal_lengths"),
    ),
    _bug(
        "dispatch-long-route-returns-logsumexp-in-base-two",
        _on(_long, _base_two),
        kind="lse.log2-returned",
        reference="pytorch issue 181645",
        shows=("logsumexp",),
        trigger=_is_long,
    ),
    _bug(
        "dispatch-long-route-stops-gradient-of-logsumexp",
        _on(_long, _constant_residuals),
        kind="cotangent.dstats-drop",
        reference="jax 178e622ef1",
        shows=("dq", "dk"),
        trigger=both(trains(), _is_long),
    ),
    _bug(
        "dispatch-long-route-is-for-bf16",
        _on(_long, _in_bf16),
        kind="dispatch.requested-vs-actual",
        reference="RL-Kernel issue 235: the backend asked for is not the one that ran",
        shows=("out", "logsumexp"),
        trigger=both(lambda case: case.dtype == "f32", _is_long),
    ),
)
