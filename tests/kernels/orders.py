"""Correct attention functions with unusual orders of summation, all of which the limits must accept.

All products and the sums of the softmax, forward and backward, add their terms in f32: one by one from the first, one
by one from the last, or as a tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare

_F32 = jnp.float32
# A function that sums over the first axis.
Order = Callable[[Any], Any]


def _sum_sequentially(terms: Any, *, reverse: bool = False) -> Any:
    """Sum over the first axis one by one."""
    total, _ = jax.lax.scan(lambda total, term: (total + term, None), jnp.zeros_like(terms[0]), terms, reverse=reverse)
    return total


def _sum_as_tree(terms: Any) -> Any:
    """Sum over the first axis as a binary tree."""
    while terms.shape[0] > 1:
        if terms.shape[0] % 2:
            terms = jnp.concatenate([terms, jnp.zeros_like(terms[:1])])
        terms = terms[0::2] + terms[1::2]
    return terms[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(order: Order, a: Any, b: Any) -> Any:
    """Multiply matrices `[., M, D]` and `[., D, N]`."""
    return order(jnp.moveaxis(a, -1, 0)[..., None] * jnp.moveaxis(b, -2, 0)[..., None, :])


def _pull_back(order: Order, saved: Any, g: Any) -> Any:
    a, b = saved
    return _multiply(order, g, b.swapaxes(-1, -2)), _multiply(order, a.swapaxes(-1, -2), g)


_multiply.defvjp(lambda order, a, b: (_multiply(order, a, b), (a, b)), _pull_back)


def _attend(order: Order, q: Any, k: Any, v: Any, mask: Any, bias: Any, soft_cap: Any, scale: Any, save: bool) -> Any:
    """Attend with all sums in the given order."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = (x.astype(_F32).swapaxes(1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    z = _multiply(order, q, k.swapaxes(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        z = z + bias
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    if mask is not None:
        z = jnp.where(mask, z, -1e30)
    top = jax.lax.stop_gradient(z.max(axis=-1))
    weights = jnp.exp(z - top[..., None])
    total = order(jnp.moveaxis(weights, -1, 0))
    out = (_multiply(order, weights, v) / total[..., None]).swapaxes(1, 2).astype(dtype)
    return (out, {"logsumexp": top + jnp.log(total), "max_logits": top}) if save else out


@declare(behind_mask="finite")
def from_the_first(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    soft_cap: Any = None,
    scale: Any = None,
    save_residuals: bool = False,
) -> Any:
    """Compute attention, adding terms one by one from the first."""
    return _attend(_sum_sequentially, q, k, v, mask, bias, soft_cap, scale, save_residuals)


@declare(behind_mask="finite")
def from_the_last(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, scale: Any = None, save_residuals: bool = False
) -> Any:
    """Compute attention, adding terms one by one from the last."""
    return _attend(functools.partial(_sum_sequentially, reverse=True), q, k, v, mask, bias, None, scale, save_residuals)


@declare(behind_mask="finite")
def as_tree(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, scale: Any = None, save_residuals: bool = False
) -> Any:
    """Compute attention, adding terms as a binary tree."""
    return _attend(_sum_as_tree, q, k, v, mask, bias, None, scale, save_residuals)


ORDERS = (from_the_first, from_the_last, as_tree)
"""All functions of this module."""
