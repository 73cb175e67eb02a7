"""Attention on the tokens of one device, with the collectives of JAX, in replaceable steps.

`gathered` merges attention over the keys of each device. `exchanged` exchanges tokens for heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cases.case import Case
from conformance import declare
from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation
from tests.planted.planting import ring_steps
from tests.planted.planting.ring_steps import Part, add_sinks, attend, keep, merge

AXIS = "context"
Call = Callable[..., Any]


def contiguous(rank: Any, length: int) -> Any:
    """Positions of a device's tokens, in contiguous order."""
    return rank * length + jnp.arange(length)


def striped(rank: Any, length: int) -> Any:
    """Positions of a device's tokens, in striped order."""
    return rank + lax.axis_size(AXIS) * jnp.arange(length)


def gather(x: Any) -> Any:
    """`x` of every device, on a new first axis."""
    return lax.all_gather(x, AXIS)


def replicate(x: Any, replicas: int) -> Any:
    """Each key head as often as makes one for each device."""
    return jnp.repeat(x, replicas, axis=2)


def to_heads(x: Any, axis: int = 2) -> Any:
    """All tokens of this device's heads."""
    return lax.all_to_all(x, AXIS, axis, 1, tiled=True)


def with_gradient(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The identity, whose gradient is `function` of the right one."""

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, dx: (function(dx),))
    return identity


@dataclasses.dataclass(frozen=True)
class ContextSteps:
    """The steps; the defaults are correct."""

    order: str = "contiguous"
    check_vma: Any = False
    query_positions: Callable[..., Any] = contiguous
    key_positions: Callable[..., Any] = contiguous
    distance: Callable[..., Any] = keep  # i - j, rank, source, for the window
    gather_ids: Callable[[Any], Any] = gather
    values: Callable[[Any], Any] = keep  # before they are gathered
    sinks: Callable[[Any], Any] = keep
    cap: tuple[bool, bool] = (True, False)  # of logits, of the merged logsumexp
    add_sinks: Callable[..., list[Part]] = add_sinks
    merge: Callable[[list[Part]], Part] = merge
    replicate: Callable[[Any, int], Any] = replicate
    to_heads: Callable[..., Any] = to_heads


def _allowed(steps: ContextSteps, options: Any, i: Any, j: Any, distance: Any, ids: Any) -> Any:
    allowed = jnp.ones((1, 1, i.size, j.size), bool)
    if options["causal"]:
        allowed &= i[:, None] >= j
    if options["window"] is not None:
        left, right = options["window"]
        allowed &= True if left is None else distance <= left
        allowed &= True if right is None else distance >= -right
    return allowed if ids is None else allowed & (ids[0][:, None, :, None] == ids[1][:, None, None, :])


def gathered(steps: ContextSteps) -> Call:
    """Every device gets the keys of all, and merges attention over the keys of each."""

    def call(q: Any, k: Any, v: Any, options: Any) -> Any:
        rank, cap = lax.axis_index(AXIS), options["soft_cap"]
        ids = options["segment_ids"]
        ids = None if ids is None else (ids[0], steps.gather_ids(ids[1]))
        all_k, all_v = gather(k), gather(steps.values(v))
        i = steps.query_positions(rank, q.shape[1])
        parts = []
        for source in range(lax.axis_size(AXIS)):
            j = steps.key_positions(source, k.shape[1])
            distance = steps.distance(i[:, None] - j, rank, source)
            own = None if ids is None else (ids[0], ids[1][source])
            allowed = _allowed(steps, options, i, j, distance, own)
            at_k, at_v = all_k[source], all_v[source]
            parts.append(attend(q, at_k, at_v, allowed, None, cap if steps.cap[0] else None, options["scale"]))
        if options["sinks"] is not None:
            parts = steps.add_sinks(parts, steps.sinks(options["sinks"]))
        found = steps.merge(parts)
        if cap is not None and steps.cap[1]:
            found = found._replace(logsumexp=cap * jnp.tanh(found.logsumexp / cap))
        return found

    return call


def exchanged(steps: ContextSteps) -> Call:
    """Every device gets all tokens of some heads."""

    def call(q: Any, k: Any, v: Any, options: Any) -> Any:
        devices, rank = lax.axis_size(AXIS), lax.axis_index(AXIS)
        if q.shape[2] % devices or (k.shape[2] % devices and devices % k.shape[2]):
            raise NotImplementedError("heads that the devices do not divide")
        replicas = max(1, devices // k.shape[2])
        k, v = (steps.replicate(x, replicas) if replicas > 1 else x for x in (k, v))
        q, k, v = (steps.to_heads(x) for x in (q, k, v))
        ids = options["segment_ids"]
        ids = None if ids is None else tuple(lax.all_gather(x, AXIS, axis=1, tiled=True) for x in ids)
        i, j = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
        allowed = _allowed(steps, options, i, j, i[:, None] - j, ids)
        part = attend(q, k, v, allowed, None, options["soft_cap"], options["scale"])
        if options["sinks"] is not None:
            own = lax.dynamic_slice_in_dim(options["sinks"], rank * q.shape[2], q.shape[2])
            part = ring_steps.merge(add_sinks([part], own))
        rows = {name: lax.all_to_all(getattr(part, name), AXIS, 2, 1, tiled=True) for name in Part._fields[1:]}
        return part._replace(out=lax.all_to_all(part.out, AXIS, 1, 2, tiled=True), **rows)

    return call


def implementation(name: str, make: Callable[[ContextSteps], Call], **replaced: Any) -> Implementation:
    """The kernel with some of its steps replaced, as a function that runs on the tokens of one device."""
    steps = ContextSteps(**replaced)
    kernel = make(steps)

    order: Any = steps.order

    @declare(
        context_axes=(AXIS,),
        token_order=order,
        check_vma=steps.check_vma,
        behind_mask="finite",
        empty_rows="zero",
    )
    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        window: Any = None,
        segment_ids: Any = None,
        soft_cap: Any = None,
        sinks: Any = None,
        scale: Any = None,
        save_residuals: bool = False,
    ) -> Any:
        options = {"causal": causal, "window": window, "segment_ids": segment_ids, "soft_cap": soft_cap}
        options |= {"sinks": sinks, "scale": q.shape[-1] ** -0.5 if scale is None else scale}
        found = kernel(*(x.astype(jnp.float32) for x in (q, k, v)), options)
        out = found.out.astype(q.dtype)
        return (out, {"logsumexp": found.logsumexp, "max_logits": found.max_logits}) if save_residuals else out

    return build_implementation(attention, name)


def enough_heads(case: Case) -> bool:
    """Return whether four devices can share the heads."""
    return case.num_q_heads % 4 == 0
