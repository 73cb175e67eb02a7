"""Bugs of precision: something is rounded that the implementation does not declare to round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    cap_gradient,
    capped,
    denominator,
    implementation,
    nonzero,
    planted,
    product,
)
from conformance.mutation.kernels.rounding import rounded
from conformance.mutation.kernels.triggers import both, grouped, has, sixteen_bits, trains
from conformance.mutation.planted_bug import PlantedBug
from impls.contract.declarations import Arithmetic
from impls.contract.implementation import Implementation

_bug = functools.partial(planted, "precision")
_FORWARD = "out logsumexp max_logits"
_CHUNK = 64


def _single(case: Case) -> bool:
    return case.dtype == "f32"


def _several_chunks(case: Case) -> bool:
    return case.kv_length > 2 * _CHUNK


def _bf16(x: Array) -> Array:
    return rounded(x, jnp.bfloat16)


def _tf32(x: Array) -> Array:
    return jax.lax.reduce_precision(x, 8, 10) if x.dtype == jnp.float32 else x


def cut_to_tf32(x: Array) -> Array:
    """As hardware reads an operand that nobody has rounded: the bits that tf32 lacks are cut off."""
    if x.dtype != jnp.float32:
        return x
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) >> 13 << 13, jnp.float32)


def _to_operands(x: Array, call: Call) -> Array:
    return rounded(x, call.q.dtype)


def _total_of_rounded(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    return denominator(rounded(weights, call.q.dtype), sinks, pivot, call)


def _rounded_total(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    return rounded(denominator(weights, sinks, pivot, call), call.q.dtype)


def _values_by_chunks(p: Array, v: Array, call: Call) -> Array:
    """Partial outputs are rounded to the operands' dtype from chunk to chunk."""
    out = jnp.zeros((*call.q.shape[:3], v.shape[-1]))
    for start in range(0, call.kv_length, _CHUNK):
        part = slice(start, start + _CHUNK)
        out = _to_operands(out + product("bnts,bsnv->btnv", p[..., part], v[:, part]), call)
    return out


def _dq_by_chunks(dx: Array, saved: Saved) -> Array:
    total = jnp.zeros(saved.call.q.shape)
    for start in range(0, saved.call.kv_length, _CHUNK):
        part = slice(start, start + _CHUNK)
        total = _to_operands(total + product("bnts,bsnh->btnh", dx[..., part], saved.forward.k[:, part]), saved.call)
    return saved.scale * total


def _group_in_operands_dtype(dx: Array, saved: Saved) -> Array:
    batch, length, _, depth = dx.shape
    heads = dx.reshape(batch, length, -1, saved.call.group, depth)
    total = jnp.zeros_like(heads[:, :, :, 0])
    for head in range(saved.call.group):
        total = _to_operands(total + _to_operands(heads[:, :, :, head], saved.call), saved.call)
    return total


def _d_in_bf16(p: Array, dp: Array, do: Array, saved: Saved) -> Array:
    return _bf16((p * dp).sum(axis=-1, keepdims=True))


def _small_probabilities_skipped(saved: Saved) -> Array:
    p = saved.probabilities
    return jnp.where(p < 1e-4, 0, p)


def _p_from_rounded_logsumexp(saved: Saved) -> Array:
    lse = rounded(jnp.where(saved.call.empty, 0, saved.forward.logsumexp), saved.call.q.dtype)
    return jnp.exp(saved.forward.z - lse[..., None])


def _tf32_products(subscripts: str) -> Callable[[Array, Array], Array]:
    return lambda x, y: product(subscripts, _tf32(x), _tf32(y))


def in_tf32(name: str, *, read: Callable[[Array], Array] = _tf32, out: float = 1.0, dq: float = 1.0) -> Implementation:
    """A kernel whose products of f32 operands are all in tf32 and which declares them; correct with the defaults.

    `read` is how an operand becomes tf32, `out` and `dq` are factors of the results.
    """

    def multiplied(subscripts: str, x: Array, y: Array) -> Array:
        return product(subscripts, read(x), read(y))

    steps = PlainSteps(
        products=lambda q, k, call: multiplied("btnh,bsnh->bnts", q, k),
        values=lambda p, v, call: out * multiplied("bnts,bsnv->btnv", p, v),
    )
    back = BackwardSteps(
        dp=lambda do, saved: multiplied("btnv,bsnv->bnts", do, saved.forward.v),
        dq=lambda dx, saved: dq * saved.scale * multiplied("bnts,bsnh->btnh", dx, saved.forward.k),
        dk=lambda dx, saved: saved.scale * multiplied("bnts,btnh->bsnh", dx, saved.call.q),
        dv=lambda p, do, saved: multiplied("bnts,btnv->bsnv", p, do),
    )
    kernel = implementation(name, steps, back)
    return dataclasses.replace(kernel, arithmetic=Arithmetic(products="tf32"))


def _declared_tf32(name: str, shows: str, *, says: str, out: float = 1.0, dq: float = 1.0) -> PlantedBug:
    """A result of a kernel in tf32 that is off by more than tf32 explains."""
    return PlantedBug(
        name=name,
        family="precision",
        kind="tf32.dot",
        reference="inferred from triton_docs_tutorials issue 6",
        shows=tuple(shows.split()),
        build=lambda: in_tf32(name, out=out, dq=dq),
        trigger=_single,
        says=says,
    )


BUGS: tuple[PlantedBug, ...] = (
    _declared_tf32(
        "output-two-percent-too-large-in-tf32",
        "out",
        says="A kernel that declares tf32 products returns an output two percent too large.",
        out=1.02,
    ),
    _declared_tf32(
        "dq-five-percent-too-large-in-tf32",
        "dq",
        says="A kernel that declares tf32 products returns a dq five percent too large.",
        dq=1.05,
    ),
    _bug(
        "second-product-in-tf32",
        says="Probabilities and values of f32 are multiplied in tf32, which is not declared.",
        kind="tf32.dot",
        reference="inferred from triton_docs_tutorials issue 6",
        shows="out",
        trigger=_single,
        steps=PlainSteps(values=lambda p, v, call: _tf32_products("bnts,bsnv->btnv")(p, v)),
    ),
    _bug(
        "backward-products-in-tf32",
        says="The backward pass computes dq and dk of f32 inputs with tf32 products, which is not declared.",
        kind="tf32.dot",
        reference="triton_docs_tutorials issue 6",
        shows="dq dk dv",
        trigger=both(_single, trains()),
        back=BackwardSteps(
            dq=lambda dx, saved: saved.scale * _tf32_products("bnts,bsnh->btnh")(dx, saved.forward.k),
            dk=lambda dx, saved: saved.scale * _tf32_products("bnts,btnh->bsnh")(dx, saved.call.q),
        ),
    ),
    _bug(
        "logits-rounded-to-operands",
        says="Scaled products of queries and keys are rounded to the input dtype.",
        kind="precision.lowp-stats",
        reference="MaxText commit fbef426f5",
        shows=_FORWARD,
        trigger=sixteen_bits,
        steps=PlainSteps(scaled=lambda products, scale, call: _to_operands(scale * products, call)),
    ),
    _bug(
        "soft-cap-in-operands-dtype",
        says="Logits after the soft cap are rounded to the input dtype.",
        kind="precision.lowp-stats",
        reference="inferred from MaxText commit fbef426f5",
        shows=_FORWARD,
        trigger=both(sixteen_bits, has("soft_cap")),
        steps=PlainSteps(cap=lambda x, call: x if call.soft_cap is None else _to_operands(capped(x, call), call)),
    ),
    _bug(
        "weights-rounded-to-operands",
        says="Logits minus their maximum are rounded to the input dtype before the exponential.",
        kind="precision.lowp-stats",
        reference="inferred from MaxText commit fbef426f5",
        shows="out logsumexp",
        trigger=sixteen_bits,
        steps=PlainSteps(weights=lambda z, pivot, call: jnp.exp(_to_operands(z - pivot, call))),
    ),
    _bug(
        "denominator-rounded-to-operands",
        says="The denominator is rounded to the input dtype.",
        kind="precision.lowp-stats",
        reference="MaxText commit fbef426f5",
        shows="out logsumexp",
        trigger=sixteen_bits,
        steps=PlainSteps(total=_rounded_total),
    ),
    _bug(
        "denominator-sums-rounded-weights",
        says="The denominator is a sum of weights that were rounded to the input dtype.",
        kind="p.lowp-before-sum",
        reference="inferred from flash-attention issue 2322",
        shows="out logsumexp",
        trigger=sixteen_bits,
        steps=PlainSteps(total=_total_of_rounded),
    ),
    _bug(
        "probabilities-rounded-to-bf16",
        says="Probabilities are rounded to bf16 before they multiply values of another dtype.",
        kind="p.lowp-before-sum",
        reference="inferred from jax commit 2cdd9b7dd9",
        shows="out",
        trigger=lambda case: case.dtype != "bf16",
        steps=PlainSteps(probabilities=lambda p, call: _bf16(p).astype(call.v.dtype)),
    ),
    _bug(
        "unnormalised-weights-in-f16-denominator-in-f32",
        says="Weights are rounded to f16 before the division, but the denominator sums them in f32.",
        kind="softmax.fp16-weights",
        reference="inferred from triton issue 5971",
        shows="out dv",
        trigger=lambda case: case.dtype == "bf16",
        steps=PlainSteps(
            normalised=lambda weights, total, call: rounded(weights, jnp.float16) / nonzero(total),
        ),
    ),
    _bug(
        "output-accumulated-in-operands-dtype",
        says="The output accumulator is rounded to the input dtype after every 64 keys.",
        kind="splitkv.partial-dtype",
        reference="flash-attention PR 2336",
        shows="out",
        trigger=both(sixteen_bits, _several_chunks),
        steps=PlainSteps(values=_values_by_chunks),
    ),
    _bug(
        "output-in-f32",
        says="The output is returned in f32 for 16-bit inputs.",
        kind="splitk.dtype",
        reference="tokamax commit 8a7432c",
        shows="out",
        trigger=sixteen_bits,
        steps=PlainSteps(out=lambda out, call: out),
    ),
    _bug(
        "dx-rounded-to-bf16",
        says="dq and dk of f32 inputs are computed from a gradient of the logits rounded to bf16.",
        kind="dtype.bwd-inconsistent",
        reference="jax commit d5e5b42de8, issue 24047",
        shows="dq dk",
        trigger=both(_single, trains()),
        back=BackwardSteps(dx_in_product=lambda dx, saved: _bf16(dx).astype(saved.call.q.dtype)),
    ),
    _bug(
        "dz-rounded-to-operands",
        says="The gradient of capped logits is rounded to the input dtype before the cap derivative.",
        kind="ds.cast",
        reference="inferred from tokamax commit 021710e",
        shows="dq dk dbias",
        trigger=both(sixteen_bits, trains("soft_cap")),
        back=BackwardSteps(dx=lambda dz, saved: cap_gradient(_to_operands(dz, saved.call), saved)),
    ),
    _bug(
        "group-summed-in-operands-dtype",
        says="dk and dv are summed over the query heads of a group in the input dtype.",
        kind="dtype.gqa-repeat-bwd",
        reference="tokamax commit e98c877",
        shows="dk dv",
        trigger=both(sixteen_bits, grouped, trains()),
        back=BackwardSteps(sum_dk=_group_in_operands_dtype, sum_dv=_group_in_operands_dtype),
    ),
    _bug(
        "dq-accumulated-in-operands-dtype",
        says="dq is rounded to the input dtype after every 64 keys.",
        kind="ds.cast",
        reference="inferred from flash-attention PR 2336",
        shows="dq",
        trigger=both(sixteen_bits, trains(), _several_chunks),
        back=BackwardSteps(dq=_dq_by_chunks),
    ),
    _bug(
        "d-rounded-to-bf16",
        says="Delta, the row sum of p * dp, is rounded to bf16.",
        kind="delta.lowp",
        reference="inferred from arXiv 2510.04212",
        shows="dq dk",
        trigger=both(_single, trains()),
        back=BackwardSteps(d=_d_in_bf16),
    ),
    _bug(
        "logsumexp-rounded-for-backward",
        says="The backward pass reads logsumexp rounded to the input dtype.",
        kind="precision.lowp-stats",
        reference="inferred from jax commit 178e622ef1",
        shows="dq dk dv",
        trigger=both(sixteen_bits, trains()),
        back=BackwardSteps(p=_p_from_rounded_logsumexp),
    ),
    _bug(
        "small-probabilities-skipped-in-backward",
        says="The backward pass takes probabilities below 0.0001 for zero.",
        kind="bwd.real-activations",
        reference="inferred from TransformerEngine issue 3216, a backward pass that depends on values",
        shows="dq dk dv",
        trigger=trains(),
        back=BackwardSteps(p=_small_probabilities_skipped),
    ),
)
