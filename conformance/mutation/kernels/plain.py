"""A correct plain attention kernel in replaceable steps: all logits at once.

`PlainSteps` are the steps of the forward pass, which JAX differentiates; `BackwardSteps` those of a backward pass
written by hand (docs/contract.md, section 2), used where one is given. The defaults of both are correct; a bug replaces
one. Steps get what they change first and the call, or what the forward pass saved, last. Keys and values are repeated
for the `N` query heads before the first product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import conformance.execution.executor  # noqa: F401  it makes masks pytrees
from cases.case import Case
from cases.masks import Mask, OwnWindow, iter_leaves
from conformance.mutation.kernels.promotion import promote_by_default
from conformance.mutation.planted_bug import PlantedBug
from impls.contract.implementation import Implementation

Array = jax.Array
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call, and the pairs that its mask and segment ids allow."""

    q: Array  # [B, T, N, H]
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, V]
    mask: Mask
    segment_ids: tuple[Array, Array] | None  # [B, T], [B, S]
    soft_cap: float | None
    sinks: Array | None  # [N]
    bias: Array | None  # broadcastable to [B, N, T, S]
    scale: float | None
    allowed: Any = None  # broadcastable to [B, N, T, S]

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def q_length(self) -> int:
        """`T`."""
        return self.q.shape[1]

    @property
    def kv_length(self) -> int:
        """`S`."""
        return self.k.shape[1]

    @property
    def empty(self) -> Array:
        """Rows that may attend to nothing, broadcastable to `[B, N, T]`."""
        return ~self.allowed.any(axis=-1)


def keep(*values: Any) -> Any:
    """The step that does nothing: all but the call, which comes last."""
    return values[:-1] if len(values) > 2 else values[0]


def stop(x: Array) -> Array:
    """`x` without its gradient."""
    return jax.lax.stop_gradient(x)


def product(subscripts: str, x: Array, y: Array) -> Array:
    """A product that multiplies exactly and adds in f32."""
    return jnp.einsum(subscripts, x, y, precision="highest", preferred_element_type=jnp.float32)


def same_segment(q_ids: Array, kv_ids: Array, call: Call) -> Array:
    """`[B, 1, T, S]`."""
    return q_ids[:, None, :, None] == kv_ids[:, None, None, :]


def zero_hidden(x: Array, call: Call) -> Array:
    """Keys or values with zeros in those that no query may attend to: there may be anything in them."""
    return jnp.where(seen_keys(call)[..., None], x, 0)


def seen_keys(call: Call) -> Array:
    """Keys that some query may attend to, `[B, S, K]`."""
    batch, kv_length, num_kv_heads, _ = call.k.shape
    seen = jnp.broadcast_to(call.allowed.any(axis=2), (batch, call.q.shape[2], kv_length))
    return seen.reshape(batch, num_kv_heads, call.group, kv_length).any(axis=2).transpose(0, 2, 1)


def repeat_heads(x: Array, call: Call) -> Array:
    """Keys or values for each query head, `[B, S, N, .]`; their gradient is summed over the group in f32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.repeat(x.astype(wide), call.group, axis=2).astype(x.dtype)


def default_scale(scale: float | None, call: Call) -> float:
    """`1 / sqrt(H)` if the call gives none."""
    return call.q.shape[-1] ** -0.5 if scale is None else scale


def capped(x: Array, call: Call) -> Array:
    """The soft cap, if there is one."""
    return x if call.soft_cap is None else call.soft_cap * jnp.tanh(x / call.soft_cap)


def hidden(z: Array, call: Call) -> Array:
    """-inf behind the mask."""
    return jnp.where(call.allowed, z, -jnp.inf)


def with_sinks(top: Array, sinks: Array | None, call: Call) -> Array:
    """The finite number that logits are shifted by, `[B, N, T, 1]`; it cancels, so it has no gradient."""
    pivot = top if sinks is None else jnp.maximum(top, sinks[:, None])
    return stop(jnp.where(jnp.isfinite(pivot), pivot, 0))[..., None]


def denominator(weights: Array, sinks: Array | None, pivot: Array, call: Call) -> Array:
    """The sum over keys and sink, `[B, N, T, 1]`."""
    total = weights.sum(axis=-1, keepdims=True)
    return total if sinks is None else total + jnp.exp(sinks[:, None, None] - pivot)


def nonzero(total: Array) -> Array:
    """1 where there is nothing to divide by."""
    return jnp.where(total == 0, 1, total)


def log_of_sum(pivot: Array, total: Array, call: Call) -> Array:
    """`[B, N, T]`, -inf where nothing was summed."""
    return jnp.where(total == 0, -jnp.inf, pivot + jnp.log(nonzero(total)))[..., 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainSteps:
    """Steps of the forward pass, in order."""

    operands: Step = keep  # (q, k, v)
    mask: Step = lambda mask, call: mask.dense(call.q_length, call.kv_length)  # [b, n, T, S]
    segments: Step = same_segment  # (q ids, kv ids) -> [B, 1, T, S]
    both: Step = lambda mask, segments, call: mask & segments
    hide_v: Step = zero_hidden
    expand_k: Step = repeat_heads
    expand_v: Step = repeat_heads
    scale: Step = default_scale
    products: Step = lambda q, k, call: product("btnh,bsnh->bnts", q, k)
    scaled: Step = lambda products, scale, call: scale * products
    bias: Step = keep
    biased: Step = lambda x, bias, call: x + bias
    cap: Step = capped
    hide: Step = hidden
    top: Step = lambda z, call: z.max(axis=-1)  # [B, N, T], without the sink
    sinks: Step = keep
    pivot: Step = with_sinks
    weights: Step = lambda z, pivot, call: jnp.exp(z - pivot)
    total: Step = denominator
    normalised: Step = lambda weights, total, call: weights / nonzero(total)
    probabilities: Step = lambda p, call: p.astype(call.v.dtype)  # as they enter the second product
    values: Step = lambda p, v, call: product("bnts,bsnv->btnv", p, v)
    out: Step = lambda out, call: out.astype(call.q.dtype)
    logsumexp: Step = log_of_sum
    max_logits: Step = lambda top, x, call: top
    residuals: Step = keep  # (logsumexp, max_logits)


class Forward(NamedTuple):
    """What the forward pass computed."""

    k: Array  # [B, S, N, H]
    v: Array  # [B, S, N, V]
    x: Array  # logits before the soft cap, [B, N, T, S]
    z: Array  # logits after soft cap and mask
    out: Array  # [B, T, N, V]
    logsumexp: Array  # [B, N, T]
    max_logits: Array  # [B, N, T]


def allowed_pairs(call: Call, steps: PlainSteps) -> Array:
    """Mask and segment ids together."""
    # The barrier keeps XLA from folding what follows from a constant mask, which takes it seconds.
    mask = jnp.asarray(steps.mask(call.mask, call))
    allowed: Array = jax.lax.optimization_barrier(mask)
    if call.segment_ids is None:
        return allowed
    return steps.both(allowed, steps.segments(*call.segment_ids, call), call)


def forward(call: Call, steps: PlainSteps) -> Forward:
    """The forward pass made of `steps`."""
    q, k, v = steps.operands(call.q, call.k, call.v, call)
    call = dataclasses.replace(call, allowed=allowed_pairs(call, steps))
    k = steps.expand_k(zero_hidden(k, call), call)
    v = steps.expand_v(steps.hide_v(v, call), call)
    x = steps.scaled(steps.products(q, k, call), steps.scale(call.scale, call), call)
    if call.bias is not None:
        x = steps.biased(x, steps.bias(call.bias, call), call)
    z = steps.hide(steps.cap(x, call), call)
    top = steps.top(z, call)
    sinks = None if call.sinks is None else steps.sinks(call.sinks, call)
    pivot = steps.pivot(top, sinks, call)
    weights = steps.weights(z, pivot, call)
    total = steps.total(weights, sinks, pivot, call)
    p = steps.probabilities(steps.normalised(weights, total, call), call)
    out = steps.out(steps.values(p, v, call), call)
    logsumexp, max_logits = steps.logsumexp(pivot, total, call), steps.max_logits(top, x, call)
    return Forward(k, v, x, z, out, *steps.residuals(logsumexp, max_logits, call))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """What the backward pass starts from: the call, what its forward pass computed, and the cotangent of `out`."""

    call: Call
    forward: Forward
    scale: float
    do: Array  # cotangent of out, [B, T, N, V]

    @property
    def probabilities(self) -> Array:
        """`exp(z - logsumexp)`, `[B, N, T, S]`."""
        return self.probabilities_of(self.forward.z)

    def probabilities_of(self, z: Array) -> Array:
        """Probabilities of other logits under the saved logsumexp."""
        lse = self.forward.logsumexp[..., None]
        return jnp.exp(z - jnp.where(jnp.isfinite(lse), lse, 0))


def cap_gradient(dz: Array, saved: Saved) -> Array:
    """`dx`."""
    cap = saved.call.soft_cap
    return dz if cap is None else dz * (1 - jnp.tanh(saved.forward.x / cap) ** 2)


def sum_of_group(dx: Array, saved: Saved) -> Array:
    """`[B, S, N, .]` to `[B, S, K, .]`."""
    batch, length, _, depth = dx.shape
    return dx.reshape(batch, length, -1, saved.call.group, depth).sum(axis=3)


def sink_gradients(d: Array, dlse: Array, saved: Saved) -> Array:
    """`dsinks` of every row, `[B, N, T]`."""
    assert saved.call.sinks is not None
    lse = saved.forward.logsumexp
    # A row without keys and without a sink has a logsumexp of -inf.
    return jnp.exp(saved.call.sinks[:, None] - jnp.where(jnp.isfinite(lse), lse, 0)) * (dlse - d)[..., 0]


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which `shape` is broadcast."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return x.sum(axis=axes, keepdims=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSteps:
    """Steps of the backward pass, in order. `d` is `D` of the contract, `[B, N, T, 1]` as is `dlse`."""

    cotangents: Step = keep  # (do, dlse)
    p: Step = lambda saved: saved.probabilities  # [B, N, T, S]
    dv: Step = lambda p, do, saved: product("bnts,btnv->bsnv", p.astype(do.dtype), do)
    dp: Step = lambda do, saved: product("btnv,bsnv->bnts", do, saved.forward.v)
    d: Step = lambda p, dp, do, saved: product("btnv,btnv->bnt", saved.forward.out, do)[..., None]
    dx: Step = cap_gradient
    dx_in_product: Step = lambda dx, saved: dx.astype(saved.call.q.dtype)
    dq: Step = lambda dx, saved: saved.scale * product("bnts,bsnh->btnh", dx, saved.forward.k)
    dk: Step = lambda dx, saved: saved.scale * product("bnts,btnh->bsnh", dx, saved.call.q)
    sum_dk: Step = sum_of_group
    sum_dv: Step = sum_of_group
    dsinks: Step = sink_gradients
    sum_dsinks: Step = lambda dsinks, saved: dsinks.sum(axis=(0, 2))
    dbias: Step = lambda dx, dz, saved: sum_to_shape(dx, saved.call.bias.shape)


Gradients = tuple[Array, Array, Array, Array | None, Array | None]


def backward(saved: Saved, dlse: Array, steps: BackwardSteps) -> Gradients:
    """`dq, dk, dv, dsinks, dbias` in f32."""
    call = saved.call
    do, dlse = steps.cotangents(saved.do, dlse[..., None], saved)
    p = steps.p(saved)
    dp = steps.dp(do, saved)
    d = steps.d(p, dp, do, saved)
    dz = p * (dp - d + dlse)
    dx = steps.dx(dz, saved)
    entering = steps.dx_in_product(dx, saved)
    dq = steps.dq(entering, saved)
    dk = steps.sum_dk(steps.dk(entering, saved), saved)
    dv = steps.sum_dv(steps.dv(p, do, saved), saved)
    dsinks = None if call.sinks is None else steps.sum_dsinks(steps.dsinks(d, dlse, saved), saved)
    dbias = None if call.bias is None else steps.dbias(dx, dz, saved)
    return dq, dk, dv, dsinks, dbias


def kernel(
    steps: PlainSteps = PlainSteps(),
    back: BackwardSteps | None = None,
    *,
    alone: PlainSteps | None = None,
) -> Callable[..., Any]:
    """The attention function made of `steps`.

    Args:
      steps: of the forward pass.
      back: of a backward pass written by hand; JAX differentiates the forward pass without one.
      alone: of the forward pass that runs where nobody differentiates, if `back` is given; `steps` by default.
    """

    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        mask: Mask,
        segment_ids: tuple[Array, Array] | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        bias: Array | None = None,
        scale: float | None = None,
        save_residuals: bool = False,
    ) -> Any:
        if any(isinstance(leaf, OwnWindow) for leaf in iter_leaves(mask)):
            raise NotImplementedError("own_window: the mask has one place for all batch rows")

        # What is known at run time only is an operand: a function with a backward pass of its own must not capture it.
        pairs = mask if any(leaf.at_run_time for leaf in iter_leaves(mask)) else None

        def call_of(
            q: Array,
            k: Array,
            v: Array,
            sinks: Array | None,
            bias: Array | None,
            ids: tuple[Array, Array] | None,
            pairs: Mask | None,
        ) -> Call:
            of = mask if pairs is None else pairs
            return Call(q=q, k=k, v=v, mask=of, segment_ids=ids, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale)

        def returned(result: Forward) -> Any:
            residuals = {"logsumexp": result.logsumexp, "max_logits": result.max_logits}
            return (result.out, residuals) if save_residuals else result.out

        operands = (q, k, v, sinks, bias, segment_ids, pairs)
        if back is None:
            return returned(forward(call_of(*operands), steps))

        @jax.custom_vjp
        def run(*operands: Any) -> Any:
            return returned(forward(call_of(*operands), alone or steps))

        def save(*operands: Any) -> Any:
            result = forward(call_of(*operands), steps)
            return returned(result), (operands, result)

        def pull_back(saved: Any, cotangent: Any) -> Any:
            operands, result = saved
            call = call_of(*operands)
            call = dataclasses.replace(call, allowed=allowed_pairs(call, steps))
            do, residuals = cotangent if save_residuals else (cotangent, {})
            dlse = residuals.get("logsumexp", jnp.zeros_like(result.logsumexp))
            start = Saved(call=call, forward=result, scale=steps.scale(scale, call), do=do)
            found = backward(start, dlse, back)
            given = zip(operands, found, strict=False)
            return (*(None if dx is None else dx.astype(x.dtype) for x, dx in given), None, None)

        run.defvjp(save, promote_by_default(pull_back))
        return run(*operands)

    return attention


def implementation(
    name: str, steps: PlainSteps = PlainSteps(), back: BackwardSteps | None = None, *, alone: PlainSteps | None = None
) -> Implementation:
    """The kernel made of `steps` as the gate takes it; arguments as of `kernel`."""
    return Implementation(name=name, call=kernel(steps, back, alone=alone), empty_rows="zero", behind_mask="any")


def planted(
    family: str,
    name: str,
    *,
    kind: str,
    reference: str,
    shows: str,
    says: str = "",
    trigger: Callable[[Case], bool] = lambda case: True,
    steps: PlainSteps = PlainSteps(),
    back: BackwardSteps | None = None,
    alone: PlainSteps | None = None,
) -> PlantedBug:
    """The bug that `steps`, `back` or `alone` plant in the kernel; `shows` lists observables, separated by blanks."""
    return PlantedBug(
        name=name,
        family=family,
        kind=kind,
        reference=reference,
        shows=tuple(shows.split()),
        build=lambda: implementation(name, steps, back, alone=alone),
        trigger=trigger,
        says=says,
    )
