"""Bugs of the gradients of sinks and bias."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance.mutation.kernels.block_triggers import train
from conformance.mutation.kernels.blockwise import planted
from conformance.mutation.kernels.steps import Block, broadcast_axes, dsinks
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, family="backward")


def _sinks(case: Case) -> bool:
    return train(case) and bool(case.sinks)


def _dsinks_rounded(sinks: jax.Array, lse: jax.Array, delta: jax.Array, dlse: jax.Array) -> jax.Array:
    terms = (jnp.exp(sinks - lse) * (dlse - delta)).astype(jnp.bfloat16)
    return terms.astype(jnp.float32).sum(axis=(0, 2))


def _dsinks_shared(sinks: jax.Array, lse: jax.Array, delta: jax.Array, dlse: jax.Array) -> jax.Array:
    total = dsinks(sinks, lse, delta, dlse)
    return jnp.broadcast_to(total.sum(), total.shape)


def _first_of_batch(dx: jax.Array, dz: jax.Array, block: Block) -> jax.Array:
    axes = broadcast_axes(block)
    return (dx[:1] if 0 in axes else dx).sum(axis=axes, keepdims=True)


def _scaled(dx: jax.Array, dz: jax.Array, block: Block) -> jax.Array:
    return dx.sum(axis=broadcast_axes(block), keepdims=True) * block.call.scale


def _no_gradient(dx: jax.Array, dz: jax.Array, block: Block) -> jax.Array:
    return jnp.zeros_like(dx).sum(axis=broadcast_axes(block), keepdims=True)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        name="bwd-dsinks-zero",
        says="A backward pass over key blocks returns zeros for dsinks.",
        kind="sink.no-grad",
        reference="flash-attn#1973",
        shows=("dsinks",),
        trigger=_sinks,
        dsinks=lambda sinks, lse, delta, dlse: jnp.zeros_like(sinks[:, 0]),
    ),
    _bug(
        name="bwd-dsinks-without-dlse",
        says="A backward pass over key blocks computes dsinks without the cotangent of logsumexp.",
        kind="sink.dlse-term",
        reference="flash-attn PR 2706",
        shows=("dsinks",),
        trigger=_sinks,
        dsinks=lambda sinks, lse, delta, dlse: dsinks(sinks, lse, delta, jnp.zeros_like(dlse)),
    ),
    _bug(
        name="bwd-dsinks-of-first-batch-row",
        says="A backward pass over key blocks sums dsinks over the first batch row only.",
        kind="sink.dsign",
        reference="inferred from flash-attn PR 2706",
        shows=("dsinks",),
        trigger=lambda case: _sinks(case) and case.batch > 1,
        dsinks=lambda sinks, lse, delta, dlse: dsinks(sinks, lse[:1], delta[:1], dlse[:1]),
    ),
    _bug(
        name="bwd-dsinks-summed-over-heads",
        says="A backward pass over key blocks gives every head the sum of dsinks over heads.",
        kind="sink.scalar",
        reference="inferred from sgl-kernel-xpu PR 254",
        shows=("dsinks",),
        trigger=_sinks,
        dsinks=_dsinks_shared,
    ),
    _bug(
        name="bwd-dsinks-terms-in-bf16",
        says="The terms of dsinks are rounded to bf16 before they are summed.",
        kind="I.dsink-lowp",
        reference="inferred from the backward of tokamax",
        shows=("dsinks",),
        trigger=lambda case: _sinks(case) and case.dtype == "f32",
        dsinks=_dsinks_rounded,
    ),
    _bug(
        name="bwd-dbias-of-first-batch-row",
        says="dbias of a bias shared by the batch comes from the first batch row only.",
        kind="bias.order-of-ops",
        reference="HKUSTDial PR 199",
        shows=("dbias",),
        trigger=lambda case: train(case) and case.bias == "biashead" and case.batch > 1,
        dbias=_first_of_batch,
    ),
    _bug(
        name="bwd-dbias-scaled",
        says="A backward pass over key blocks multiplies dbias by the softmax scale.",
        kind="bias.order-of-ops",
        reference="inferred from HKUSTDial PR 199",
        shows=("dbias",),
        trigger=lambda case: train(case) and case.bias is not None,
        dbias=_scaled,
    ),
    _bug(
        name="bwd-dbias-zero",
        says="A backward pass over key blocks returns zeros for dbias.",
        kind="dbias.none",
        reference="inferred from flash-attn#1973",
        shows=("dbias",),
        trigger=lambda case: train(case) and case.bias is not None,
        dbias=_no_gradient,
    ),
)
"""Bugs of the gradients of sinks and bias."""
