"""Bugs of paths for exactly these operands: sets of two and three that no case of the grids has without another."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.triggers import Trigger, both, trains
from tests.bank import PlantedBug
from tests.planted.beyond.combined import backward_by
from tests.planted.beyond.few_operands import without
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct, planted

_bug = functools.partial(planted, family="exact sets")

_OPERANDS = ("segment_ids", "soft_cap", "sinks", "bias", "scale")


def _exactly(names: set[str], wrong: Kernel, *, sixteen_bits: bool = False, grouped: bool | None = None) -> Kernel:
    """`wrong` where a call has these operands and no others, and as many queries as keys; masks do not count."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        q, k = arrays["q"], arrays["k"]
        given = {name for name in _OPERANDS if name in arrays or statics.get(name) is not None}
        taken = given == names and q.shape[1] == k.shape[1]
        taken = taken and (not sixteen_bits or q.dtype.itemsize == 2)
        taken = taken and (grouped is None or grouped == (q.shape[2] > k.shape[2]))
        return (wrong if taken else correct)(arrays, statics)

    return kernel


def _default_scale(arrays: Arrays, statics: Statics) -> Any:
    return correct(arrays, {**statics, "scale": None})


def _cap_before_scale(arrays: Arrays, statics: Statics) -> Any:
    """`scale * cap * tanh(q @ k / cap)`, which is a cap of `scale * cap`."""
    return correct(arrays, {**statics, "soft_cap": statics["soft_cap"] * statics["scale"]})


def _without_cap(arrays: Arrays, statics: Statics) -> Any:
    return correct(arrays, {**statics, "soft_cap": None})


def _without_sinks(arrays: Arrays, statics: Statics) -> Any:
    return correct({name: x for name, x in arrays.items() if name != "sinks"}, statics)


def _capped_sinks(arrays: Arrays, statics: Statics) -> Any:
    cap = statics["soft_cap"]
    return correct({**arrays, "sinks": cap * jnp.tanh(arrays["sinks"] / cap)}, statics)


def _scaled(name: str) -> Kernel:
    return lambda arrays, statics: correct({**arrays, name: arrays[name] * statics["scale"]}, statics)


def _narrow_bias(arrays: Arrays, statics: Statics) -> Any:
    return correct({**arrays, "bias": arrays["bias"].astype(arrays["q"].dtype)}, statics)


def _interleaved_bias(arrays: Arrays, statics: Statics) -> Any:
    """A bias for each head, for heads of a group that lie apart."""
    bias, kv_heads = arrays["bias"], arrays["k"].shape[2]
    if bias.shape[1] > 1:
        rows = bias.shape[0], -1, kv_heads, *bias.shape[2:]
        bias = bias.reshape(rows).swapaxes(1, 2).reshape(bias.shape)
    return correct({**arrays, "bias": bias}, statics)


def _of(*names: str) -> Trigger:
    """The case trains with these operands and no others."""

    def exact(case: Case) -> bool:
        return {name for name in _OPERANDS if name in case.features} == set(names)

    return both(trains(), exact)


_ALL = ("out", "logsumexp", "dq", "dk", "dv")

BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "scale-alone-in-16-bits-is-the-default",
        _exactly({"scale"}, _default_scale, sixteen_bits=True),
        kind="scale.ignored",
        reference="inferred from transformers PR 46634 (an option that one path does not pass on)",
        shows=_ALL,
        trigger=_of("scale"),
    ),
    _bug(
        "backward-of-a-scale-alone-has-the-default",
        _exactly({"scale"}, backward_by(without("scale"))),
        kind="scale.bwd",
        reference="inferred from flash-attn PR 1033, for a scale",
        shows=("dq", "dk", "dv"),
        trigger=_of("scale"),
    ),
    _bug(
        "scale-with-packed-sequences-alone-is-the-default-in-groups",
        _exactly({"scale", "segment_ids"}, _default_scale, grouped=True),
        kind="scale.ignored",
        reference="inferred from transformers PR 46634, for packed sequences",
        shows=_ALL,
        trigger=_of("scale", "segment_ids"),
    ),
    _bug(
        "cap-before-scale-with-packed-sequences-alone",
        _exactly({"scale", "soft_cap", "segment_ids"}, _cap_before_scale),
        kind="cap.order",
        reference="inferred from the order of cap and scale, which libraries do not share, for the set of one model",
        shows=_ALL,
        trigger=_of("scale", "soft_cap", "segment_ids"),
    ),
    _bug(
        "cap-and-sinks-alone-cap-the-sinks",
        _exactly({"soft_cap", "sinks"}, _capped_sinks),
        kind="sink.capped",
        reference="inferred from paths that append the sink to the logits before the cap",
        shows=(*_ALL, "dsinks"),
        trigger=_of("soft_cap", "sinks"),
    ),
    _bug(
        "cap-and-sinks-with-packed-sequences-alone-have-no-sinks",
        _exactly({"soft_cap", "sinks", "segment_ids"}, _without_sinks),
        kind="sink.fast-path",
        reference="inferred from flash-attn#1973 (sinks in the path of variable lengths)",
        shows=(*_ALL, "dsinks"),
        trigger=_of("soft_cap", "sinks", "segment_ids"),
    ),
    _bug(
        "cap-and-bias-alone-have-no-cap",
        _exactly({"soft_cap", "bias"}, _without_cap),
        kind="cap.fast-path",
        reference="inferred from paths in which a bias takes the place of a change of the logits",
        shows=(*_ALL, "dbias"),
        trigger=_of("soft_cap", "bias"),
    ),
    _bug(
        "backward-of-cap-and-bias-alone-has-no-cap",
        _exactly({"soft_cap", "bias"}, backward_by(without("soft_cap"))),
        kind="cap.bwd-missing",
        reference="inferred from flash-attn PR 1033, for a bias beside it",
        shows=("dq", "dk", "dv", "dbias"),
        trigger=_of("soft_cap", "bias"),
    ),
    _bug(
        "scale-and-bias-alone-scale-the-bias",
        _exactly({"scale", "bias"}, _scaled("bias")),
        kind="bias.order",
        reference="inferred from T5, whose logits have a bias and no scale",
        shows=(*_ALL, "dbias"),
        trigger=_of("scale", "bias"),
    ),
    _bug(
        "scale-and-bias-of-packed-sequences-alone-scale-the-bias",
        _exactly({"scale", "bias", "segment_ids"}, _scaled("bias")),
        kind="bias.order",
        reference="inferred from T5, for packed sequences",
        shows=(*_ALL, "dbias"),
        trigger=_of("scale", "bias", "segment_ids"),
    ),
    _bug(
        "scale-and-sinks-alone-scale-the-sinks",
        _exactly({"scale", "sinks"}, _scaled("sinks"), sixteen_bits=True),
        kind="sink.scaled",
        reference="inferred from paths that append the sink to the logits before the scale",
        shows=(*_ALL, "dsinks"),
        trigger=_of("scale", "sinks"),
    ),
    _bug(
        "scale-and-sinks-of-packed-sequences-alone-scale-the-sinks",
        _exactly({"scale", "sinks", "segment_ids"}, _scaled("sinks")),
        kind="sink.scaled",
        reference="inferred from paths that append the sink to the logits before the scale, for packed sequences",
        shows=(*_ALL, "dsinks"),
        trigger=_of("scale", "sinks", "segment_ids"),
    ),
    _bug(
        "bias-of-heads-alone-is-interleaved-in-groups",
        _exactly({"bias"}, _interleaved_bias, grouped=True),
        kind="gqa.head-map",
        reference="inferred from head maps that are interleaved (levanter#449), for a bias of each head",
        shows=(*_ALL, "dbias"),
        trigger=_of("bias"),
    ),
    _bug(
        "bias-alone-in-bf16-is-rounded-where-heads-are-equal",
        _exactly({"bias"}, _narrow_bias, sixteen_bits=True, grouped=False),
        kind="bias.dtype",
        reference="inferred from kernels that take a bias in the operands' dtype",
        shows=("out", "logsumexp"),
        trigger=_of("bias"),
    ),
)
