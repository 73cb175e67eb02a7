"""Bugs of precision in the backward pass that only one part of the cases shows."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from cases.case import Case
from cases.masks import Causal, Window
from conformance.mutation.kernels.plain import Array, BackwardSteps, Saved, planted, product
from conformance.mutation.kernels.rounding import rounded
from conformance.mutation.kernels.triggers import both, grouped, sixteen_bits, trains
from tests.bank import PlantedBug
from tests.planted.beyond.precision import (
    BLOCK,
    accumulated,
    default_product,
    masked_by,
    over,
    to_operands,
    towards_zero,
)

_bug = functools.partial(planted, "precision")


def _single(case: Case) -> bool:
    return case.dtype == "f32"


def _half(case: Case) -> bool:
    return case.dtype == "f16"


def _bf16(x: Array) -> Array:
    return rounded(x, jnp.bfloat16)


def _dq_over_blocks(dx: Array, saved: Saved) -> Array:
    if not masked_by(Causal, saved.call):
        return saved.scale * product("bnts,bsnh->btnh", dx, saved.forward.k)
    return saved.scale * accumulated("bnts,bsnh->btnh", 3, dx, saved.forward.k, saved.call)


def _dk_over_blocks(dx: Array, saved: Saved) -> Array:
    return saved.scale * accumulated("bnts,btnh->bsnh", 2, dx, saved.call.q, saved.call)


def _dv_over_blocks_of_groups(p: Array, do: Array, saved: Saved) -> Array:
    if saved.call.group == 1:
        return product("bnts,btnv->bsnv", p.astype(do.dtype), do)
    return accumulated("bnts,btnv->bsnv", 2, p.astype(do.dtype), do, saved.call)


def _d_of_rounded_terms(p: Array, dp: Array, do: Array, saved: Saved) -> Array:
    if not masked_by(Causal, saved.call):
        return product("btnv,btnv->bnt", saved.forward.out, do)[..., None]
    terms = saved.forward.out.astype(jnp.float32) * do
    return _bf16(terms).sum(axis=-1).transpose(0, 2, 1)[..., None]


def _d_of_halves_in_f16(p: Array, dp: Array, do: Array, saved: Saved) -> Array:
    """Two vectors hold the terms of half of the depth each, and their sums are in the operands' dtype."""
    out, narrow = saved.forward.out, saved.call.q.dtype == jnp.float16
    half = out.shape[-1] // 2
    both = [product("btnv,btnv->bnt", out[..., x], do[..., x]) for x in (slice(half), slice(half, None))]
    first, second = (rounded(d, jnp.float16) if narrow else d for d in both)
    return (first + second)[..., None]


def _d_of_products_in_f16(p: Array, dp: Array, do: Array, saved: Saved) -> Array:
    """Terms are multiplied in the operands' dtype, and summed in f32."""
    terms = saved.forward.out * do
    return (
        (rounded(terms, jnp.float16) if saved.call.q.dtype == jnp.float16 else terms)
        .sum(axis=-1)
        .swapaxes(1, 2)[..., None]
    )


def _dp_rounded(do: Array, saved: Saved) -> Array:
    return to_operands(product("btnv,bsnv->bnts", do, saved.forward.v), saved.call)


def _p_of_rounded_logits(saved: Saved) -> Array:
    """Logits are made again by a product that leaves its unit in the operands' dtype."""
    return saved.probabilities_of(to_operands(saved.forward.z, saved.call))


def _p_of_rounded_logsumexp(saved: Saved) -> Array:
    if not masked_by(Window, saved.call):
        return saved.probabilities
    lse = to_operands(saved.forward.logsumexp, saved.call)[..., None]
    return jnp.exp(saved.forward.z - jnp.where(jnp.isfinite(lse), lse, 0))


def _p_of_rounded_bias(saved: Saved) -> Array:
    """The backward reads the bias in the operands' dtype."""
    if saved.call.bias is None or saved.call.soft_cap is not None:
        return saved.probabilities
    bias = saved.call.bias.astype(jnp.float32)
    return saved.probabilities_of(saved.forward.z + (to_operands(bias, saved.call) - bias))


def _sinks_rounded_again(d: Array, dlse: Array, saved: Saved) -> Array:
    assert saved.call.sinks is not None
    sinks = to_operands(saved.call.sinks, saved.call)
    return jnp.exp(sinks[:, None] - saved.forward.logsumexp) * (dlse - d)[..., 0]


def _dk_of_scaled_queries(dx: Array, saved: Saved) -> Array:
    q = to_operands(saved.call.q.astype(jnp.float32) * saved.scale, saved.call)
    return product("bnts,btnh->bsnh", dx, q)


def _dz_through_f16(dx: Array, saved: Saved) -> Array:
    """dx is brought near one by 2**12 for the product, whatever it is."""
    return (dx * 2.0**12).astype(saved.call.q.dtype)


def _dq_cut(dx: Array, saved: Saved) -> Array:
    return towards_zero(saved.scale * product("bnts,bsnh->btnh", dx, saved.forward.k), saved.call.q.dtype)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "dq-product-at-default-precision",
        kind="precision.default",
        reference="jax issue 24047: products of the backward in another precision",
        shows="precision products",
        trigger=both(_single, trains()),
        back=BackwardSteps(dq=lambda dx, saved: saved.scale * default_product("bnts,bsnh->btnh", dx, saved.forward.k)),
    ),
    _bug(
        "dq-accumulated-in-operands-dtype-if-causal",
        kind="accumulate.lowp",
        reference="inferred from xformers PR 467, which made the sums of the backward f32",
        shows="dq",
        trigger=both(sixteen_bits, trains("causal"), over(BLOCK, "kv_length")),
        back=BackwardSteps(dq=_dq_over_blocks),
    ),
    _bug(
        "dk-accumulated-in-operands-dtype-over-query-blocks",
        kind="accumulate.lowp",
        reference="xformers PR 467",
        shows="dk",
        trigger=both(sixteen_bits, trains(), over(BLOCK, "q_length")),
        back=BackwardSteps(dk=_dk_over_blocks),
    ),
    _bug(
        "dv-of-groups-accumulated-in-operands-dtype",
        kind="accumulate.lowp",
        reference="inferred from xformers PR 467",
        shows="dv",
        trigger=both(sixteen_bits, trains(), grouped, over(BLOCK, "q_length")),
        back=BackwardSteps(dv=_dv_over_blocks_of_groups),
    ),
    _bug(
        "delta-of-terms-in-bf16-if-causal",
        kind="delta.dtype",
        reference="inferred from jax issue 24047",
        shows="dq dk",
        trigger=trains("causal"),
        back=BackwardSteps(d=_d_of_rounded_terms),
    ),
    _bug(
        "dp-rounded-to-operands",
        kind="dtype.bwd-inconsistent",
        reference="inferred from jax PR 19301: a product of the backward cast to the operands' dtype",
        shows="dq dk",
        trigger=both(sixteen_bits, trains()),
        back=BackwardSteps(dp=_dp_rounded),
    ),
    _bug(
        "logits-rounded-where-made-again",
        kind="dtype.bwd-inconsistent",
        reference="jax PR 19301",
        shows="dq dk dv",
        trigger=both(sixteen_bits, trains()),
        back=BackwardSteps(p=_p_of_rounded_logits),
    ),
    _bug(
        "logsumexp-rounded-for-the-backward-under-a-window",
        kind="residual.dtype",
        reference="inferred from jax commit 178e622ef1",
        shows="dq dk dv",
        trigger=both(sixteen_bits, trains("window")),
        back=BackwardSteps(p=_p_of_rounded_logsumexp),
    ),
    _bug(
        "bias-read-in-operands-dtype-by-the-backward",
        kind="bias.dtype",
        reference="jax issue 32242",
        shows="dq dk dv dbias",
        trigger=both(sixteen_bits, trains("bias"), lambda case: case.bias != "biaskey" and case.soft_cap is None),
        back=BackwardSteps(p=_p_of_rounded_bias),
    ),
    _bug(
        "sinks-rounded-to-operands-by-the-backward",
        kind="sink.dtype",
        reference="inferred from jax splash attention, whose sink gradient is made in the output's dtype",
        shows="dsinks",
        trigger=both(sixteen_bits, trains("sinks")),
        back=BackwardSteps(dsinks=_sinks_rounded_again),
    ),
    _bug(
        "dx-overflows-f16",
        kind="overflow.f16",
        reference="inferred from loss scaling put into a kernel",
        shows="dq dk",
        trigger=both(_half, trains()),
        back=BackwardSteps(
            dx_in_product=_dz_through_f16,
            dq=lambda dx, saved: saved.scale * 2.0**-12 * product("bnts,bsnh->btnh", dx, saved.forward.k),
            dk=lambda dx, saved: saved.scale * 2.0**-12 * product("bnts,btnh->bsnh", dx, saved.call.q),
        ),
    ),
    _bug(
        "delta-of-halves-overflows-f16",
        kind="overflow.f16",
        reference="inferred from backward passes that sum out * do in the dtype of both",
        shows="dq dk",
        trigger=both(_half, trains()),
        back=BackwardSteps(d=_d_of_halves_in_f16),
    ),
    _bug(
        "delta-of-products-overflows-f16",
        kind="overflow.f16",
        reference="jax.experimental.pallas.ops.gpu.attention, which multiplies out and do as they are stored",
        shows="dq dk",
        trigger=both(_half, trains()),
        back=BackwardSteps(d=_d_of_products_in_f16),
    ),
    _bug(
        "dk-of-queries-scaled-in-operands-dtype",
        kind="scale.dtype",
        reference="inferred from jax commit 916e53a8a2, which scales q before the product",
        shows="dk",
        trigger=both(sixteen_bits, trains()),
        back=BackwardSteps(dk=_dk_of_scaled_queries),
    ),
    _bug(
        "dq-truncated",
        kind="rounding.truncation",
        reference="inferred from kernels that store the upper half of an f32",
        shows="dq",
        trigger=both(sixteen_bits, trains()),
        back=BackwardSteps(dq=_dq_cut),
    ),
)
