"""A correct kernel with a tangent written by hand, as one step after another, each of which a planted bug replaces.

Its gradients are right in any case: the transpose of the tangent is a backward pass of its own. So a bug of the tangent
shows in forward mode only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call

from tests.kernels import naive
from tests.planted.planting.wrapped import Arrays, Kernel, Statics, correct

_CONSTANT = ("mask", "segment_ids")


@dataclasses.dataclass(frozen=True)
class TangentSteps:
    """The steps of a tangent; by default the correct ones.

    Attributes:
      move: which tangents of operands enter.
      repeat: keys or values, or their tangents, for each query head of a group of so many.
      slope: the derivative of the capped logits, from `tanh(x / soft_cap)`.
      see: the pairs whose probabilities are recomputed, from those that may attend.
      center: the tangent of probabilities `p` from that of logits `dz` and its mean over the row.
      log: the tangent of `logsumexp`, from that mean and the sum of weights.
      average: the product of weights and values.
      keep: what the tangent keeps of the probabilities.
    """

    move: Callable[[Arrays, Statics], Arrays] = lambda tangents, statics: tangents
    repeat: Callable[[jax.Array, int], jax.Array] = lambda x, group: jnp.repeat(x, group, axis=2)
    slope: Callable[[jax.Array], jax.Array] = lambda tanh: 1 - tanh**2
    see: Callable[[jax.Array], jax.Array] = lambda seen: seen
    center: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = lambda p, dz, mean: p * (dz - mean)
    log: Callable[[jax.Array, jax.Array], jax.Array] = lambda mean, total: mean
    average: Callable[[jax.Array, jax.Array], jax.Array] = lambda p, v: _multiply("bnts,bsnv->btnv", p, v)
    keep: Callable[[jax.Array], jax.Array] = lambda p: p


def build_kernel(steps: TangentSteps, *, transposes_itself: bool = False) -> Kernel:
    """Build the kernel with these steps. With `transposes_itself`, JAX derives the backward pass from the tangent."""

    def kernel(arrays: Arrays, statics: Statics) -> Any:
        fixed = {name: x for name, x in arrays.items() if name in _CONSTANT}

        @jax.custom_jvp
        def call(moving: Arrays) -> Any:
            return correct({**moving, **fixed}, statics)

        def push(operands: tuple[Arrays, Arrays], tangents: Arrays) -> Any:
            return push_tangents({**operands[0], **operands[1]}, tangents, statics, steps)

        def pull(operands: tuple[Arrays, Arrays], cotangent: Any) -> Arrays:
            moving, fixed = operands
            gradients: Arrays = jax.vjp(lambda m: correct({**m, **fixed}, statics), moving)[1](cotangent)[0]
            return gradients

        @call.defjvp
        def differentiate(primals: tuple[Arrays], tangents: tuple[Arrays]) -> Any:
            operands = primals[0], fixed
            if transposes_itself:
                return call(*primals), push(operands, *tangents)
            return call(*primals), linear_call(push, pull, operands, *tangents)

        return call({name: x for name, x in arrays.items() if name not in _CONSTANT})

    return kernel


def push_tangents(arrays: Arrays, tangents: Arrays, statics: Statics, steps: TangentSteps) -> Any:
    """Compute the tangent of `out`, or of `(out, residuals)`, by these steps."""
    q, k, v = (arrays[name].astype(jnp.float32) for name in ("q", "k", "v"))
    moved = {name: x.astype(jnp.float32) for name, x in steps.move(tangents, statics).items()}
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    dk, dv = (steps.repeat(moved[name], group) for name in ("k", "v"))
    scale = q.shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
    x = scale * _multiply("btnh,bsnh->bnts", q, k)
    dz = scale * (_multiply("btnh,bsnh->bnts", moved["q"], k) + _multiply("btnh,bsnh->bnts", q, dk))
    if "bias" in arrays:
        x, dz = x + arrays["bias"], dz + moved["bias"]
    z = x
    if (cap := statics["soft_cap"]) is not None:
        tanh = jnp.tanh(x / cap)
        z, dz = cap * tanh, dz * steps.slope(tanh)
    seen = naive.build_mask(q, k, statics["causal"], statics["window"], arrays.get("mask"), arrays.get("segment_ids"))
    top = jnp.where(seen, z, -1e30).max(axis=-1, keepdims=True)
    sinks = arrays["sinks"][:, None, None] if "sinks" in arrays else None
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    total = jnp.where(seen, jnp.exp(z - top), 0).sum(axis=-1, keepdims=True)
    total = total + (0 if sinks is None else jnp.exp(sinks - top))
    total = jnp.where(total == 0, 1, total)
    p = steps.keep(jnp.where(steps.see(seen), jnp.exp(z - top), 0) / total)
    mean = (p * dz).sum(axis=-1, keepdims=True)
    if sinks is not None:
        mean = mean + jnp.exp(sinks - top) / total * moved["sinks"][:, None, None]
    dtype = arrays["q"].dtype
    dp = steps.center(p, dz, mean)
    out = steps.average(dp.astype(dtype), v) + steps.average(p.astype(dtype), dv)
    if not statics["save_residuals"]:
        return out.astype(dtype)
    dlse = steps.log(mean, total)[..., 0]
    return out.astype(dtype), {"logsumexp": dlse, "max_logits": jnp.zeros_like(dlse)}


def _multiply(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=jnp.float32)
