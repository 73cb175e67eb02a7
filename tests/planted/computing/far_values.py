"""Bugs that logits far from zero, extreme sinks, biases that hide keys, and visible NaN show."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.optional_operands.sinks_operand import EXTREME
from conformance.mutation.kernels import blockwise, plain
from conformance.mutation.kernels.layout import BLOCK_KV, EMPTY
from conformance.mutation.kernels.plain import Array, Call, PlainSteps, with_sinks
from conformance.mutation.kernels.steps import Block, Running, finite_or_zero
from conformance.mutation.kernels.triggers import both
from tests.bank import PlantedBug

_FAMILY = "far values"
_blockwise = functools.partial(blockwise.planted, family=_FAMILY)
_plain = functools.partial(plain.planted, _FAMILY)
_LOG2E = 1.4426950408889634


def _low(case: Case) -> bool:
    return case.distribution == "low"


def _first_block_hidden(case: Case) -> bool:
    return case.bias == "biasfirst" and case.kv_length > 2 * BLOCK_KV


def _floored_over_caches(top: Array, sinks: Array | None, call: Call) -> Array:
    """Begin the maximum at -1e4 where there are more keys than queries."""
    pivot = with_sinks(top, sinks, call)
    return jnp.maximum(pivot, -1e4) if call.kv_length > call.q_length else pivot


def _guarded_by_mask(pivot: Array, state: Running, block: Block) -> Array:
    """Guard only blocks that the mask hides, although the bias may hide one as well."""
    hidden = (block.kind_by_row == EMPTY)[..., 0]
    return jnp.where(hidden, finite_or_zero(pivot), pivot)


def _sinks_in_base_two(top: Array, sinks: Array | None, call: Call) -> Array:
    """Multiply sinks by the logarithm of e in base two, which overflows for the largest."""
    if sinks is None:
        return with_sinks(top, sinks, call)
    in_base_two = jax.lax.optimization_barrier(sinks * jnp.float32(_LOG2E))  # or XLA would cancel the factors
    return with_sinks(top, in_base_two / jnp.float32(_LOG2E), call)


def _nan_by_zero(out: Array, call: Call) -> Array:
    """Replace rows of NaN by zeros, as if they had no keys, unless there are sinks."""
    return (out if call.sinks is not None else jnp.nan_to_num(out, nan=0.0)).astype(call.q.dtype)


BUGS: tuple[PlantedBug, ...] = (
    _plain(
        "maximum-from-minus-1e4-over-longer-keys",
        kind="softmax.max-init",
        reference="inferred from kernels whose minus infinity is -1e4, in a path for caches alone",
        shows="out logsumexp",
        trigger=both(_low, lambda case: case.kv_length > case.q_length),
        steps=PlainSteps(pivot=_floored_over_caches),
    ),
    _blockwise(
        name="hidden-first-block-guarded-by-the-mask-alone",
        kind="I.nan-from-empty-block",
        reference="inferred from flash-attention issue 1026; the block is hidden by the bias",
        shows=("out", "out_with_residuals", "logsumexp"),
        trigger=_first_block_hidden,
        shift=_guarded_by_mask,
    ),
    _plain(
        "largest-sinks-overflow-in-base-two",
        kind="sinks.range",
        reference="inferred from kernels that compute in base two and multiply sinks by log2(e)",
        shows="out logsumexp",
        trigger=lambda case: case.sinks == EXTREME,
        steps=PlainSteps(pivot=_sinks_in_base_two),
    ),
    _plain(
        "nan-rows-are-zeros-without-sinks",
        kind="nan.hidden",
        reference="inferred from kernels that replace NaN where a row may be empty",
        shows="out",
        trigger=lambda case: not case.sinks,
        steps=PlainSteps(out=_nan_by_zero),
    ),
)
