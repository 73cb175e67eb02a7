"""Bugs of the returned residuals, and of the cotangent that comes back through logsumexp."""

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
    capped,
    hidden,
    log_of_sum,
    nonzero,
    planted,
)
from conformance.mutation.kernels.triggers import empty_rows, has, masked, sixteen_bits, trains
from conformance.mutation.planted_bug import PlantedBug

_bug = functools.partial(planted, "residuals")
_Change = Callable[[Array, Call], Array]


def _logsumexp(change: _Change) -> PlainSteps:
    """The kernel that returns something else for logsumexp."""
    return PlainSteps(logsumexp=lambda pivot, total, call: change(log_of_sum(pivot, total, call), call))


def _largest(logits: _Change) -> PlainSteps:
    """The kernel that returns the largest of other logits; `logits` gets those before the soft cap."""
    return PlainSteps(max_logits=lambda top, x, call: logits(x, call).max(axis=-1))


def _max_logits(change: _Change) -> PlainSteps:
    """The kernel that returns something else for max_logits."""
    return PlainSteps(max_logits=lambda top, x, call: change(top, call))


def _dlse(change: Callable[[Array], Array]) -> BackwardSteps:
    """The backward pass that gets another cotangent of logsumexp."""
    return BackwardSteps(cotangents=lambda do, dlse, saved: (do, change(dlse)))


def _log_of_sum_alone(pivot: Array, total: Array, call: Call) -> Array:
    return jnp.where(total == 0, -jnp.inf, jnp.log(nonzero(total)))[..., 0]


def _packed_rows(lse: Array, call: Call) -> Array:
    """Rows of heads `[K, G]` written as `[G, K]`."""
    batch, heads, length = lse.shape
    packed = lse.reshape(batch, heads // call.group, call.group, length)
    return packed.swapaxes(1, 2).reshape(lse.shape)


def _rows_first(lse: Array, call: Call) -> Array:
    """`[B, T, N]` data read as `[B, N, T]`."""
    return lse.transpose(0, 2, 1).reshape(lse.shape)


def _in_operands_dtype(x: Array, call: Call) -> Array:
    return x.astype(call.q.dtype).astype(jnp.float32)


def _without_bias(x: Array, call: Call) -> Array:
    return hidden(capped(x if call.bias is None else x - call.bias, call), call)


def _with_sink(top: Array, call: Call) -> Array:
    return top if call.sinks is None else jnp.maximum(top, call.sinks[:, None])


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "residuals-swapped",
        says="logsumexp and max_logits are returned in swapped order.",
        kind="residual.unpack",
        reference="jax commit 4931774548",
        shows="logsumexp max_logits",
        steps=PlainSteps(residuals=lambda logsumexp, max_logits, call: (max_logits, logsumexp)),
    ),
    _bug(
        "logsumexp-in-base-two",
        says="logsumexp is returned in base 2, not in base e.",
        kind="lse.log2-returned",
        reference="pytorch issue 181645",
        shows="logsumexp",
        steps=_logsumexp(lambda lse, call: lse / math.log(2)),
    ),
    _bug(
        "logsumexp-converted-twice",
        says="logsumexp is multiplied by ln(2), as if it were in base 2.",
        kind="lse.base2-into-merge",
        reference="attention-gym PRs 205, 207",
        shows="logsumexp",
        steps=_logsumexp(lambda lse, call: lse * math.log(2)),
    ),
    _bug(
        "logsumexp-relative-to-maximum",
        says="logsumexp is relative to the row maximum, which is not added.",
        kind="lse.local-max",
        reference="flash-attention issue 404",
        shows="logsumexp",
        steps=PlainSteps(logsumexp=_log_of_sum_alone),
    ),
    _bug(
        "logsumexp-zero-unless-differentiated",
        says="logsumexp is zero unless the call is differentiated.",
        kind="lse.zeros",
        reference="attention-gym issue 37",
        shows="logsumexp",
        back=BackwardSteps(),
        alone=_logsumexp(lambda lse, call: 0 * lse),
    ),
    _bug(
        "logsumexp-in-operands-dtype",
        says="logsumexp is rounded to the input dtype before it is returned.",
        kind="residual.dtype",
        reference="jax commit 178e622ef1",
        shows="logsumexp",
        trigger=sixteen_bits,
        steps=_logsumexp(_in_operands_dtype),
    ),
    _bug(
        "logsumexp-of-packed-rows",
        says="logsumexp is written with the axes of groups and key/value heads swapped.",
        kind="splitkv.lse-layout",
        reference="inferred from vllm-project/flash-attention PR 87",
        shows="logsumexp",
        trigger=has("gqa"),
        steps=_logsumexp(_packed_rows),
    ),
    _bug(
        "logsumexp-rows-first",
        says="logsumexp is written with queries before heads and read with heads before queries.",
        kind="splitkv.lse-layout",
        reference="inferred from vllm-project/flash-attention PR 87",
        shows="logsumexp",
        trigger=lambda case: case.q_length > 1,
        steps=_logsumexp(_rows_first),
    ),
    _bug(
        "logsumexp-of-first-batch-row",
        says="All batch rows return the logsumexp of the first.",
        kind="splitkv.batch-stride0",
        reference="vllm-project/flash-attention PR 176",
        shows="logsumexp",
        trigger=lambda case: case.batch > 1,
        steps=_logsumexp(lambda lse, call: jnp.broadcast_to(lse[:1], lse.shape)),
    ),
    _bug(
        "logsumexp-of-empty-rows-finite",
        says="logsumexp of rows without keys is -2e38, not -inf.",
        kind="lse.masked-row",
        reference="inferred from tokamax commit 5f2912e",
        shows="logsumexp",
        trigger=empty_rows,
        steps=_logsumexp(lambda lse, call: jnp.maximum(lse, -2e38)),
    ),
    _bug(
        "cotangent-of-logsumexp-dropped",
        says="The backward pass ignores the cotangent of the returned logsumexp.",
        kind="cotangent.dstats-drop",
        reference="tokamax commit 62aeeb2",
        shows="dq dk",
        trigger=trains(),
        back=_dlse(lambda dlse: 0 * dlse),
    ),
    _bug(
        "cotangent-of-logsumexp-sign",
        says="The cotangent of logsumexp enters with the wrong sign.",
        kind="cotangent.dstats-sign",
        reference="inferred from tokamax commit 62aeeb2",
        shows="dq dk",
        trigger=trains(),
        back=_dlse(lambda dlse: -dlse),
    ),
    _bug(
        "cotangent-of-logsumexp-in-base-two",
        says="The cotangent of logsumexp is multiplied by ln(2).",
        kind="cotangent.dstats-base2",
        reference="inferred from pytorch issue 181645",
        shows="dq dk",
        trigger=trains(),
        back=_dlse(lambda dlse: dlse * math.log(2)),
    ),
    _bug(
        "max-logits-before-cap",
        says="max_logits is taken before the soft cap.",
        kind="max.pre-cap",
        reference="inferred from MaxText, which states that the maximum is taken after soft cap and mask",
        shows="max_logits",
        trigger=has("soft_cap"),
        steps=_largest(hidden),
    ),
    _bug(
        "max-logits-before-mask",
        says="max_logits is taken before the mask, over masked keys too.",
        kind="max.pre-mask",
        reference="inferred from MaxText, which states that the maximum is taken after soft cap and mask",
        shows="max_logits",
        trigger=masked,
        steps=_largest(capped),
    ),
    _bug(
        "max-logits-without-bias",
        says="max_logits is taken from logits without the bias.",
        kind="max.pre-bias",
        reference="inferred from MaxText, which states at what step the maximum is taken",
        shows="max_logits",
        trigger=has("bias"),
        steps=_largest(_without_bias),
    ),
    _bug(
        "max-logits-in-base-two",
        says="max_logits is returned in base 2: it is divided by ln(2).",
        kind="max.scaled",
        reference="inferred from tokamax commit aac610a",
        shows="max_logits",
        steps=_max_logits(lambda top, call: top / math.log(2)),
    ),
    _bug(
        "max-logits-with-sink",
        says="max_logits is the sink if that is larger than the logits.",
        kind="max.sink",
        reference="inferred from kernels that keep the sink in the running maximum",
        shows="max_logits",
        trigger=has("sinks"),
        steps=_max_logits(_with_sink),
    ),
    _bug(
        "max-logits-in-operands-dtype",
        says="max_logits is rounded to the input dtype.",
        kind="residual.dtype",
        reference="inferred from jax commit 178e622ef1",
        shows="max_logits",
        trigger=sixteen_bits,
        steps=_max_logits(_in_operands_dtype),
    ),
)
