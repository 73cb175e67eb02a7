"""Attention that takes mask and score as functions, made of steps that a bug may replace; the defaults are correct.

It is computed in blocks of queries, `z` of a block in f32 `[B, N, t, S]`, and has a backward pass written by hand. If
functions capture arrays, these are operands: `Leaves`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from conformance.execution.plain_functions import build_implementation
from impls.captured_arrays import join_function, keep_gradients, make_zeros, split_function
from impls.contract.declarations import declare
from impls.contract.implementation import Implementation

Array = jax.Array
Step = Callable[..., Any]
BLOCK = 64
_PAIRS = "bkgth,bskh->bkgts"


class Places(NamedTuple):
    """Batch row, query head, and places of queries and keys, integers that broadcast to `[B, N, t, S]`."""

    b: Array
    n: Array
    i: Array
    j: Array


class Leaves(NamedTuple):
    """The arrays that the functions capture."""

    mask: Any = ()
    score: Any = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What is the same for all blocks of a call."""

    num_kv_heads: int
    group: int
    q_length: int
    kv_length: int
    scale: float
    mask_mod: Callable[..., Any] | None
    score_mod: Callable[..., Any] | None

    def join(self, leaves: Leaves) -> Call:
        """The call whose functions capture `leaves`, from one with their fixed parts."""
        mask_mod, score_mod = join_function(self.mask_mod, leaves.mask), join_function(self.score_mod, leaves.score)
        return dataclasses.replace(self, mask_mod=mask_mod, score_mod=score_mod)


def places(start: Array, batch: int, call: Call) -> Places:
    """Those of the block of queries that begins at `start`."""
    b = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    n = jnp.arange(call.num_kv_heads * call.group, dtype=jnp.int32)[:, None, None]
    i = start + jnp.arange(BLOCK, dtype=jnp.int32)[:, None]
    return Places(b, n, i, jnp.arange(call.kv_length, dtype=jnp.int32))


def scored(products: Array, at: Places, call: Call) -> Array:
    """Scaled logits as the score has them."""
    x = call.scale * products
    return x if call.score_mod is None else call.score_mod(x, *at)


def allowed(at: Places, call: Call) -> Array | None:
    """Which pairs may attend, none if all may."""
    return None if call.mask_mod is None else call.mask_mod(*at)


def masked(score: Callable[[Array], Array], products: Array, ok: Array | None) -> Array:
    """The logits of a block, -inf where a pair may not attend."""
    z = score(products)
    return z if ok is None else jnp.where(ok, z, -jnp.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexSteps:
    """The steps; `score_places` and `mask_places` change the places that the functions get.

    `slope_places` changes those that the derivative of the score goes by, `read_leaves` the arrays that functions
    capture, in the forward pass or in both. `pull_leaves` computes their gradients in a block of queries from those of
    the score's result and of its argument, and `add_leaves` adds them to the sums.
    """

    score_places: Step = lambda at, start, call: at
    mask_places: Step = lambda at, start, call: at
    slope_places: Step = lambda at, start, call: at
    scored: Step = scored
    masked: Step = masked
    read_leaves: Step = lambda leaves, in_backward: leaves
    pull_leaves: Step = lambda pull_back, dz, dx, start: pull_back(dz)
    add_leaves: Step = lambda total, found, start: total + found


def logits(q: Array, k: Array, start: Array, call: Call, steps: FlexSteps) -> tuple[Array, Array, Array]:
    """Logits of a block of queries `[B, t, N, H]` and their derivative by the products, without those that are hidden.

    Both are `[B, N, t, S]`, and so are the products, which come last.
    """
    products = _heads(_product(_PAIRS, _grouped(q, call), k))
    at = places(start, q.shape[0], call)
    ok = allowed(steps.mask_places(at, start, call), call)

    scored_at = steps.score_places(at, start, call)

    def score(x: Array, at: Places = scored_at) -> Array:
        found: Array = steps.scored(x, at, call)
        return found

    z = steps.masked(score, products, ok)
    _, pullback = jax.vjp(lambda x: score(x, steps.slope_places(scored_at, start, call)), products)
    (slope,) = pullback(jnp.ones_like(products))
    return z, slope if ok is None else jnp.where(ok, slope, 0.0), products


def forward(q: Array, k: Array, v: Array, call: Call, steps: FlexSteps) -> tuple[Array, Array, Array]:
    """`out [B, T, N, V]`, `logsumexp` and `max_logits` `[B, N, T]`."""

    def block(start: Array, q: Array) -> tuple[Array, Array, Array]:
        z, _, _ = logits(q, k, start, call, steps)
        top = z.max(axis=-1)
        pivot = jnp.where(jnp.isfinite(top), top, 0.0)
        weights = jnp.exp(z - pivot[..., None])
        total = weights.sum(axis=-1)
        some = total > 0
        p = weights / jnp.where(some, total, 1.0)[..., None]
        out = _product("bkgts,bskv->btkgv", _split(p, call).astype(v.dtype), v)
        lse = jnp.where(some, pivot + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
        return out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(q.dtype), lse, top

    out, lse, top = jax.lax.map(lambda each: block(*each), (_starts(call), _cut(q, 1)))
    return _join(out, 1, call), _join(lse, 2, call), _join(top, 2, call)


def backward(saved: tuple[Any, ...], do: Array, dlse: Array, fixed: Call, steps: FlexSteps) -> tuple[Any, ...]:
    """`dq, dk, dv` and the gradients of what the score captures, from q, k, v, the leaves, `out` and `logsumexp`."""
    q, k, v, leaves, out, lse = saved
    leaves = steps.read_leaves(leaves, True)
    call = fixed.join(leaves)
    delta = jnp.einsum("btnv,btnv->bnt", out, do, precision="highest", preferred_element_type=jnp.float32) - dlse

    def block(sums: Any, each: Any) -> tuple[Any, Array]:
        start, q, do, lse, delta = each
        z, slope, products = logits(q, k, start, call, steps)
        p = jnp.exp(z - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
        dp = _heads(_product("bkgtv,bskv->bkgts", _grouped(do, call), v))
        dz = p * (dp - delta[..., None])
        captured = sums[2]
        if leaves.score:
            at = places(start, q.shape[0], call)

            def score(score: tuple[Array, ...]) -> Any:
                return steps.scored(products, at, fixed.join(Leaves(leaves.mask, score)))

            _, pullback = jax.vjp(score, leaves.score)
            found = steps.pull_leaves(lambda d: keep_gradients(pullback(d)[0]), dz, dz * slope, start)
            captured = jax.tree.map(lambda total, one: steps.add_leaves(total, one, start), captured, found)
        dx = _split(dz * slope, call).astype(q.dtype)
        dv = _product("bkgts,bkgtv->bskv", _split(p, call).astype(do.dtype), _grouped(do, call))
        dk = _product("bkgts,bkgth->bskh", dx, _grouped(q, call))
        dq = _product("bkgts,bskh->btkgh", dx, k)
        return (sums[0] + dk, sums[1] + dv, captured), dq.reshape(q.shape)

    # Rows that are not there have no cotangent, and a logsumexp at which nothing overflows.
    parts = (_starts(call), _cut(q, 1), _cut(do, 1), _cut(lse, 2, jnp.inf), _cut(delta, 2))
    none = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32), make_zeros(leaves.score)
    (dk, dv, captured), dq = jax.lax.scan(block, none, parts)
    return _join(dq, 1, call).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), captured


def kernel(steps: FlexSteps = FlexSteps(), *, captures: bool = False) -> Callable[..., Any]:
    """The attention function made of `steps`."""

    @declare(behind_mask="finite", empty_rows="zero", captures=captures)
    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        mask_mod: Callable[..., Any] | None = None,
        score_mod: Callable[..., Any] | None = None,
        scale: float | None = None,
        save_residuals: bool = False,
    ) -> Any:
        """Attention with its mask and its score as functions."""
        (mask_mod, mask_leaves), (score_mod, score_leaves) = split_function(mask_mod), split_function(score_mod)
        call = Call(
            num_kv_heads=k.shape[2],
            group=q.shape[2] // k.shape[2],
            q_length=q.shape[1],
            kv_length=k.shape[1],
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            mask_mod=mask_mod,
            score_mod=score_mod,
        )

        @jax.custom_vjp
        def run(q: Array, k: Array, v: Array, leaves: Leaves) -> tuple[Array, Array, Array]:
            return forward(q, k, v, call.join(steps.read_leaves(leaves, False)), steps)

        def save(q: Array, k: Array, v: Array, leaves: Leaves) -> Any:
            out, lse, top = run(q, k, v, leaves)
            return (out, lse, top), (q, k, v, leaves, out, lse)

        def pull_back(saved: tuple[Any, ...], cotangents: tuple[Array, Array, Array]) -> tuple[Any, ...]:
            *gradients, captured = backward(saved, *cotangents[:2], call, steps)
            return (*gradients, Leaves(tuple(None for _ in saved[3].mask), captured))

        run.defvjp(save, pull_back)
        out, lse, top = run(*(jnp.asarray(x) for x in (q, k, v)), Leaves(mask_leaves, score_leaves))
        return (out, {"logsumexp": lse, "max_logits": top}) if save_residuals else out

    return attention


def implementation(name: str, steps: FlexSteps = FlexSteps(), *, captures: bool = False) -> Implementation:
    """The kernel made of `steps`, as an implementation."""
    return build_implementation(kernel(steps, captures=captures), name)


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=jnp.float32)


def _grouped(x: Array, call: Call) -> Array:
    """`[B, t, N, D]` to `[B, K, G, t, D]`."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], call.num_kv_heads, call.group, x.shape[-1]), 1, 3)


def _heads(x: Array) -> Array:
    """`[B, K, G, ...]` to `[B, N, ...]`."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _split(x: Array, call: Call) -> Array:
    """`[B, N, ...]` to `[B, K, G, ...]`."""
    return x.reshape(x.shape[0], call.num_kv_heads, call.group, *x.shape[2:])


def _starts(call: Call) -> Array:
    return jnp.asarray(np.arange(0, call.q_length, BLOCK, dtype=np.int32))


def _cut(x: Array, axis: int, padding: float = 0.0) -> Array:
    """Axis `axis` cut in blocks of queries, their number in front."""
    missing = -x.shape[axis] % BLOCK
    x = jnp.pad(x, [(0, missing * (a == axis)) for a in range(x.ndim)], constant_values=padding)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :]), axis, 0)


def _join(x: Array, axis: int, call: Call) -> Array:
    """Inverse of `_cut`."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return x[(slice(None),) * axis + (slice(call.q_length),)]
