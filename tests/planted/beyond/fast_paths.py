"""Bugs of paths that are taken where both lengths divide by a block."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from conformance.mutation.kernels.triggers import both, has, sixteen_bits
from tests.bank import PlantedBug
from tests.planted.planting import wrapped
from tests.planted.planting.tile_triggers import call_of, whole

_fast = functools.partial(wrapped.planted, family="whole blocks")


def _divides(arrays: wrapped.Arrays, size: int, least: int = 1) -> bool:
    lengths = (arrays["q"].shape[1], arrays["k"].shape[1])
    return not any(length % size for length in lengths) and min(lengths) >= least


def _fast_path(size: int, *dropped: str, least: int = 1, **fixed: Any) -> wrapped.Kernel:
    """The path for lengths that are multiples of `size` drops operands, and has fixed options."""

    def kernel(arrays: wrapped.Arrays, statics: wrapped.Statics) -> Any:
        if _divides(arrays, size, least):
            arrays = {name: x for name, x in arrays.items() if name not in dropped}
            statics = {**statics, **fixed}
        return wrapped.correct(arrays, statics)

    return kernel


def _mask_dropped_with_bias(arrays: wrapped.Arrays, statics: wrapped.Statics) -> Any:
    if "bias" in arrays and _divides(arrays, 64, 128):
        statics = {**statics, "causal": False}
    return wrapped.correct(arrays, statics)


def _lse_in_base_two(arrays: wrapped.Arrays, statics: wrapped.Statics) -> Any:
    found = wrapped.correct(arrays, statics)
    if not statics["save_residuals"] or not _divides(arrays, 128, 256):
        return found
    out, residuals = found
    return out, {**residuals, "logsumexp": residuals["logsumexp"] * np.float32(1.0 / np.log(2.0))}


def _q_scaled_in_its_dtype(arrays: wrapped.Arrays, statics: wrapped.Statics) -> Any:
    """16-bit queries of whole blocks are scaled before the product, and rounded once more by it."""
    q = arrays["q"]
    if q.dtype.itemsize == 2 and _divides(arrays, 128, 256):
        scale = q.shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
        arrays = {**arrays, "q": (q * jnp.asarray(scale * 1.4426950408889634, q.dtype)).astype(q.dtype)}
        statics = {**statics, "scale": 0.6931471805599453}
    return wrapped.correct(arrays, statics)


_ALL = ("out", "logsumexp", "dq", "dk", "dv")
_F32 = "train/f32/B1.T{}.S{}.N2.K2.H16.V16/{}/s0"


def _f32(q_length: int, kv_length: int, rest: str) -> str:
    return _F32.format(q_length, kv_length, rest)


_PLANTED: tuple[tuple[str, PlantedBug], ...] = (
    (
        _f32(128, 128, "causal/bias/normal"),
        _fast(
            "causal-mask-lost-with-bias-over-whole-tiles",
            _mask_dropped_with_bias,
            kind="mask.dropped-whole",
            reference="bledden/triton-msl PR 7",
            shows=_ALL,
            trigger=both(lambda case: call_of(case).causal, has("bias"), whole(64, 128)),
        ),
    ),
    (
        _f32(256, 256, "full/sinks/normal"),
        _fast(
            "fast-path-of-multiples-of-256-without-sinks",
            _fast_path(256, "sinks"),
            kind="sink.fast-path",
            reference="inferred from sglang-jax#905 (fused path ignores sinks)",
            shows=("out", "logsumexp", "dsinks"),
            trigger=both(has("sinks"), whole(256)),
        ),
    ),
    (
        _f32(128, 256, "full/softcap2/normal"),
        _fast(
            "fast-path-of-multiples-of-128-without-soft-cap",
            _fast_path(128, least=128, soft_cap=None),
            kind="cap.dropped-by-backend",
            reference="inferred from sgl-project/sglang#33915 (soft cap lost on one path)",
            shows=_ALL,
            trigger=both(has("soft_cap"), whole(128)),
        ),
    ),
    (
        _f32(256, 256, "full/seg/normal"),
        _fast(
            "fast-path-of-multiples-of-256-without-segments",
            _fast_path(256, "segment_ids"),
            kind="segments.fast-path",
            reference="inferred from transformers PR 46634 (packing not detected on one path)",
            shows=_ALL,
            trigger=both(has("segment_ids"), whole(256)),
        ),
    ),
    (
        _f32(256, 256, "full/scale0.5/normal"),
        _fast(
            "fast-path-of-multiples-of-256-with-the-usual-scale",
            _fast_path(256, scale=None),
            kind="scale.default-vs-custom",
            reference="inferred from Megatron-LM PR 848 (scale fixed at 1/sqrt(d))",
            shows=_ALL,
            trigger=both(whole(256), lambda case: case.scale is not None),
        ),
    ),
    (
        _f32(256, 256, "full/normal"),
        _fast(
            "fast-path-of-multiples-of-128-gives-the-logsumexp-in-base-two",
            _lse_in_base_two,
            kind="lse.log2-returned",
            reference="inferred from pytorch#181645 (base of the logsumexp by backend)",
            shows=("logsumexp", "dq", "dk"),
            trigger=whole(128, 256),
        ),
    ),
    (
        _f32(384, 384, "causal_and_window-l40-r0/normal"),
        _fast(
            "fast-path-of-384-and-more-is-causal-without-window",
            _fast_path(128, least=384, window=None),
            kind="window.never-applied",
            reference="inferred from keras-hub#2186 (fast path before the window)",
            shows=_ALL,
            trigger=both(has("window"), lambda case: call_of(case).window is not None, whole(128, 384)),
        ),
    ),
    (
        "train/bf16/B1.T256.S256.N2.K2.H80.V80/full/normal/s0",
        _fast(
            "sixteen-bit-queries-of-whole-blocks-are-scaled-before-the-product",
            _q_scaled_in_its_dtype,
            kind="dtype.scaled-q",
            reference="inferred from jax d5e5b42de8 (dtype of what is multiplied)",
            shows=_ALL,
            trigger=both(sixteen_bits, whole(128, 256)),
        ),
    ),
)

BUGS = tuple(bug for _, bug in _PLANTED)
WITNESSES = {bug.name: case for case, bug in _PLANTED}
CORRECT = wrapped.implementation("naive", wrapped.correct)
