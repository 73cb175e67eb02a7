"""Bugs of the attention sinks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp

from conformance.mutation.kernels.plain import (
    Array,
    BackwardSteps,
    Call,
    PlainSteps,
    Saved,
    capped,
    denominator,
    log_of_sum,
    planted,
    sink_gradients,
    stop,
    with_sinks,
)
from conformance.mutation.kernels.triggers import both, empty_rows, grouped, has, one_query, sixteen_bits, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "sinks")
_sinks = has("sinks")
_trained = trains("sinks")
_FORWARD = "out logsumexp"


def _without(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    return weights.sum(axis=-1, keepdims=True)


def _without_in_decode(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    return denominator(weights, None if call.q_length == 1 else sinks, pivot, call)


def _lost_in_empty_rows(pivot: Array, total: Array, call: Call) -> Array:
    return jnp.where(call.empty, -jnp.inf, log_of_sum(pivot, total, call))


def _excluded(pivot: Array, total: Array, call: Call) -> Array:
    sinks = 0 if call.sinks is None else jnp.exp(call.sinks[:, None, None] - pivot)
    # Never below zero by rounding, where the sink takes all the weight.
    return log_of_sum(pivot, jnp.maximum(total - sinks, 1e-30), call)


def _probabilities_of_keys_alone(saved: Saved) -> Array:
    p = saved.probabilities
    total = p.sum(axis=-1, keepdims=True)
    return p / jnp.where(total == 0, 1, total)


def _from(index: Callable[[Array, Call], Array]) -> PlainSteps:
    """The kernel in which every query head takes its sink from elsewhere."""
    return PlainSteps(sinks=lambda sinks, call: sinks[index(jnp.arange(sinks.shape[0]), call)])


def _transposed(heads: Array, call: Call) -> Array:
    return heads.reshape(-1, call.group).T.reshape(-1)


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "sinks-ignored",
        says="The sinks enter neither the denominator nor the maximum.",
        kind="sink.dead-code",
        reference="vllm-metal issue 212, PR 550",
        shows=_FORWARD,
        trigger=_sinks,
        steps=PlainSteps(total=_without, pivot=lambda top, sinks, call: with_sinks(top, None, call)),
    ),
    _bug(
        "sinks-ignored-in-decode",
        says="The sinks are ignored if there is a single query.",
        kind="sink.s1-vs-sN",
        reference="mlx issue 3452",
        shows=_FORWARD,
        trigger=both(_sinks, one_query),
        steps=PlainSteps(total=_without_in_decode),
    ),
    _bug(
        "sinks-in-maximum-only",
        says="The sinks enter the maximum but not the denominator.",
        kind="sink.max-only",
        reference="inferred from vllm-metal PR 550",
        shows=_FORWARD,
        trigger=_sinks,
        steps=PlainSteps(total=_without),
    ),
    _bug(
        "sinks-not-in-pivot",
        says="The maximum leaves out the sinks, so that a large sink overflows.",
        kind="sink.pivot-overflow",
        reference="fla PR 831, review",
        shows=_FORWARD,
        trigger=_sinks,
        steps=PlainSteps(pivot=lambda top, sinks, call: with_sinks(top, None, call)),
    ),
    _bug(
        "sinks-in-base-e-logits-in-base-two",
        says="Sinks enter the base-2 softmax without the factor log2(e).",
        kind="sinks.base2-scale",
        reference="tokamax commit aac610a",
        shows=_FORWARD,
        trigger=_sinks,
        steps=PlainSteps(sinks=lambda sinks, call: sinks * math.log(2)),
    ),
    _bug(
        "sinks-capped",
        says="The soft cap is applied to the sinks too.",
        kind="sink.seed-scale-cap",
        reference="rocm-libraries PR 12229",
        shows=_FORWARD,
        trigger=has("sinks", "soft_cap"),
        steps=PlainSteps(sinks=capped),
    ),
    _bug(
        "sinks-by-kv-head",
        says="Each query head takes the sink at the index of its key/value head.",
        kind="sink.packgqa-row",
        reference="sgl-kernel-xpu PR 254",
        shows=_FORWARD,
        trigger=both(_sinks, grouped),
        steps=_from(lambda heads, call: heads // call.group),
    ),
    _bug(
        "sinks-of-transposed-group",
        says="Sinks are read with the axes of groups and key/value heads swapped.",
        kind="sink.packgqa-row",
        reference="inferred from sgl-kernel-xpu PR 254",
        shows=_FORWARD,
        trigger=both(has("sinks", "gqa"), grouped),
        steps=_from(_transposed),
    ),
    _bug(
        "first-sink-for-all-heads",
        says="All heads use the sink of the first head.",
        kind="sink.scalar",
        reference="inferred from sgl-kernel-xpu PR 254",
        shows=_FORWARD,
        trigger=_sinks,
        steps=_from(lambda heads, call: 0 * heads),
    ),
    _bug(
        "sinks-rounded-to-operands",
        says="The sinks are rounded to the input dtype.",
        kind="sink.lowp",
        reference="inferred from jax splash attention, whose sink gradient is rounded to the output's dtype",
        shows=_FORWARD,
        trigger=both(_sinks, sixteen_bits),
        steps=PlainSteps(sinks=lambda sinks, call: sinks.astype(call.q.dtype).astype(jnp.float32)),
    ),
    _bug(
        "logsumexp-without-sinks",
        says="The returned logsumexp leaves out the sinks.",
        kind="sink.lse-excluded",
        reference="inferred from flash-attention PR 2706",
        shows="logsumexp",
        trigger=_sinks,
        steps=PlainSteps(logsumexp=_excluded),
    ),
    _bug(
        "sinks-lost-from-logsumexp-of-empty-rows",
        says="logsumexp of rows without keys is -inf, though they have a sink.",
        kind="sink.empty-kv-lse",
        reference="flash-attention PR 2706",
        shows="logsumexp",
        trigger=both(_sinks, empty_rows),
        steps=PlainSteps(logsumexp=_lost_in_empty_rows),
    ),
    _bug(
        "sinks-without-gradient",
        says="The sinks are a constant for the backward pass, so that dsinks is zero.",
        kind="sink.no-grad",
        reference="flash-attention issues 1895, 1973, 2102, PR 2706",
        shows="dsinks",
        trigger=_trained,
        steps=PlainSteps(sinks=lambda sinks, call: stop(sinks)),
    ),
    _bug(
        "dsinks-without-dlse",
        says="dsinks leaves out what the cotangent of logsumexp adds.",
        kind="sink.dlse-term",
        reference="flash-attention PR 2706, review",
        shows="dsinks",
        trigger=_trained,
        back=BackwardSteps(dsinks=lambda d, dlse, saved: sink_gradients(d, jnp.zeros_like(dlse), saved)),
    ),
    _bug(
        "dsinks-without-dlse-of-empty-rows",
        says="Rows without keys add nothing to dsinks, though logsumexp may have a cotangent there.",
        kind="sink.dlse-term",
        reference="inferred from flash-attention PR 2706",
        shows="dsinks",
        trigger=both(_trained, empty_rows),
        back=BackwardSteps(
            dsinks=lambda d, dlse, saved: jnp.where(saved.call.empty, 0, sink_gradients(d, dlse, saved))
        ),
    ),
    _bug(
        "dsinks-of-first-batch-row",
        says="dsinks is the sum over the first batch row only.",
        kind="sink.dsign",
        reference="inferred from flash-attention PR 2706",
        shows="dsinks",
        trigger=both(_trained, lambda case: case.batch > 1),
        back=BackwardSteps(sum_dsinks=lambda dsinks, saved: dsinks[0].sum(axis=1)),
    ),
    _bug(
        "dsinks-summed-over-heads",
        says="Every head gets the sum of dsinks over all heads.",
        kind="sink.scalar",
        reference="inferred from sgl-kernel-xpu PR 254",
        shows="dsinks",
        trigger=_trained,
        back=BackwardSteps(
            sum_dsinks=lambda dsinks, saved: jnp.broadcast_to(dsinks.sum(), saved.call.sinks.shape),
        ),
    ),
    _bug(
        "probabilities-recomputed-without-sinks",
        says="The backward pass normalises the probabilities over keys only, without the sinks.",
        kind="sink.lse-excluded",
        reference="inferred from flash-attention PR 2706",
        shows="dq dk dv",
        trigger=_trained,
        back=BackwardSteps(p=_probabilities_of_keys_alone),
    ),
)
