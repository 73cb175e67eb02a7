"""Bugs of the logits' scale."""

from __future__ import annotations

import functools
import math

from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    default_scale,
    planted,
    product,
)
from conformance.mutation.kernels.triggers import both, has, sixteen_bits, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "scale")
_FORWARD = "out logsumexp max_logits"


def _usual(call: Call) -> float:
    return call.q.shape[-1] ** -0.5


def _scaled_operands(q: Array, k: Array, v: Array, call: Call) -> tuple[Array, Array, Array]:
    return (q * default_scale(call.scale, call)).astype(q.dtype), k, v


def _usual_scale_in_backward(dx: Array, saved: Saved) -> Array:
    return (dx * (_usual(saved.call) / saved.scale)).astype(saved.call.q.dtype)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "scale-dropped",
        says="The products of queries and keys are not scaled.",
        kind="scale.dropped",
        reference="jax commit 916e53a8a2",
        shows=_FORWARD,
        steps=PlainSteps(scaled=lambda products, scale, call: products),
    ),
    _bug(
        "scale-applied-twice",
        says="The scale is applied to the logits twice.",
        kind="scale.twice",
        reference="MaxText commits 9c2cc66ce, 1f86bc030",
        shows=_FORWARD,
        steps=PlainSteps(scaled=lambda products, scale, call: scale**2 * products),
    ),
    _bug(
        "custom-scale-ignored",
        says="A scale given by the caller is ignored in favour of 1 / sqrt(depth).",
        kind="scale.default-vs-custom",
        reference="gemma-triton-flash-attn issue 6; Megatron-LM PR 848",
        shows=_FORWARD,
        trigger=has("scale"),
        steps=PlainSteps(scale=lambda scale, call: _usual(call)),
    ),
    _bug(
        "custom-scale-ignored-in-backward",
        says="dq and dk use 1 / sqrt(depth), not the scale of the call.",
        kind="scale.none-in-bwd",
        reference="flash-attention PR 2657",
        shows="dq dk",
        trigger=trains("scale"),
        back=BackwardSteps(dx_in_product=_usual_scale_in_backward),
    ),
    _bug(
        "custom-scale-on-top-of-usual-scale",
        says="A scale given by the caller is applied on top of 1 / sqrt(depth).",
        kind="scale.twice",
        reference="jax commit 916e53a8a2",
        shows=_FORWARD,
        trigger=has("scale"),
        steps=PlainSteps(scale=lambda scale, call: _usual(call) * (1 if scale is None else scale)),
    ),
    _bug(
        "scale-divides",
        says="The logits are divided by the scale, not multiplied.",
        kind="scale.reversed",
        reference="MaxText issue 1370, commit f1498e186",
        shows=_FORWARD,
        trigger=has("scale"),
        steps=PlainSteps(scaled=lambda products, scale, call: products / scale),
    ),
    _bug(
        "scale-after-softmax",
        says="The scale multiplies the output, not the logits.",
        kind="scale.softmax-after",
        reference="FSZ ViT issue 2",
        shows=_FORWARD,
        steps=PlainSteps(
            scaled=lambda products, scale, call: products,
            values=lambda p, v, call: default_scale(call.scale, call) * product("bnts,bsnv->btnv", p, v),
        ),
    ),
    _bug(
        "ln2-for-log2e",
        says="The softmax in base 2 multiplies the logits by ln(2), not by log2(e).",
        kind="scale.const-branch",
        reference="ejkernel commit aaa9cbe",
        shows=_FORWARD,
        steps=PlainSteps(scaled=lambda products, scale, call: math.log(2) ** 2 * scale * products),
    ),
    _bug(
        "scale-from-padded-depth",
        says="The default scale is computed from the depth rounded up to a multiple of 32.",
        kind="scale.default-vs-custom",
        reference="inferred from flash-attention PR 2896, where a depth is padded",
        shows=_FORWARD,
        trigger=lambda case: case.scale is None and case.head_dim % 32 != 0,
        steps=PlainSteps(
            scale=lambda scale, call: (-(-call.q.shape[-1] // 32) * 32) ** -0.5 if scale is None else scale
        ),
    ),
    _bug(
        "scaled-queries-rounded",
        says="Queries are scaled before the product and rounded to the input dtype again.",
        kind="scale.dropped",
        reference="inferred from jax commit 916e53a8a2, which scales q before the product",
        shows=_FORWARD,
        trigger=both(sixteen_bits, has("scale")),
        steps=PlainSteps(operands=_scaled_operands, scaled=lambda products, scale, call: products),
    ),
    _bug(
        "dk-scaled-twice",
        says="The scale is applied to dk twice.",
        kind="scale.dk",
        reference="inferred from flash-attention PR 2657",
        shows="dk",
        trigger=trains(),
        back=BackwardSteps(dk=lambda dx, saved: saved.scale**2 * product("bnts,btnh->bsnh", dx, saved.call.q)),
    ),
    _bug(
        "dq-scaled-twice",
        says="The scale is applied to dq twice.",
        kind="scale.dq-twice",
        reference="inferred from MaxText commit 9c2cc66ce",
        shows="dq",
        trigger=trains(),
        back=BackwardSteps(dq=lambda dx, saved: saved.scale**2 * product("bnts,bsnh->btnh", dx, saved.forward.k)),
    ),
)
