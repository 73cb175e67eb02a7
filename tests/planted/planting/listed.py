"""Attention to listed keys, made of steps that a bug may replace; the defaults are correct.

There are three kernels. One gathers the keys of each list, and has a backward pass written by hand. One scatters the
lists to booleans, and JAX differentiates it. One gathers from pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance.execution.plain_functions import build_implementation
from impls.contract.declarations import declare
from impls.contract.implementation import Implementation

Array = jax.Array
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The operands of a call that steps may read. Lists are int32 `[B, T, e]`; in pages, `[total_q, e]`."""

    kv_length: int
    positions: Array  # of each query, `[T, 1]`, or `[total_q, 1]` in pages
    causal: bool
    left: int | None = None  # how many keys before its own a query sees
    sequence: Array | None = None  # in pages, the sequence of each query, `[total_q, 1]`
    page_size: int = 1
    cu_q_lens: Array | None = None


def _is_allowed(place: Array, call: Call) -> Array:
    ok = jnp.full(place.shape, True)
    if call.causal:
        ok = ok & (place <= call.positions)
    return ok if call.left is None else ok & (place >= call.positions - call.left)


def _hide(x: Array, seen: Array) -> Array:
    return jnp.where(seen, x, -jnp.inf)


def _add_up(weights: Array, sink: Array | None, shift: Array) -> Array:
    return weights.sum(axis=-1) + (0.0 if sink is None else jnp.exp(sink - shift))


def _divide(weights: Array, total: Array) -> Array:
    return weights / jnp.where(total == 0, 1.0, total)[..., None]


def _locate(place: Array, pages: Array, call: Call) -> tuple[Array, Array]:
    slot = place // call.page_size
    return pages[call.sequence, slot], place % call.page_size


def _clean(x: Array, seen: Array) -> Array:
    return jnp.where(seen[..., None, None], x, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListSteps:
    """The steps, in their order."""

    read: Step = lambda lists, call: lists
    is_named: Step = lambda lists, call: lists >= 0
    is_named_backward: Step | None = None
    find_place: Step = lambda lists, call: jnp.maximum(lists, 0)
    is_allowed: Step = _is_allowed
    is_allowed_backward: Step | None = None
    locate: Step = _locate  # in pages: page and row of places
    clean: Step = _clean
    repeat: Step = lambda x, group: jnp.repeat(x, group, axis=-2)  # heads of k and v for the heads of q
    hide: Step = _hide
    add_up: Step = _add_up
    divide: Step = _divide
    weigh: Step = lambda p, seen: p
    add_keys: Step = lambda total, at, found: total.at[at].add(found)  # sums of dk
    add_values: Step = lambda total, at, found: total.at[at].add(found)  # sums of dv


@dataclasses.dataclass(frozen=True)
class Found:
    """The keys of each query: their places, whether it sees them, and its logits `[*rows, N, e]`."""

    place: Array
    seen: Array
    k: Array
    v: Array
    x: Array


def _softmax(steps: ListSteps, found: Found, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Return the weights, `logsumexp` and `max_logits`, `[*rows, N, e]` and `[*rows, N]`."""
    top = found.x.max(axis=-1)
    shift = top if sinks is None else jnp.maximum(top, sinks)
    shift = jnp.where(jnp.isfinite(shift), shift, 0.0)
    weights = jnp.exp(found.x - shift[..., None])
    total = steps.add_up(weights, sinks, shift)
    lse = jnp.where(total > 0, shift + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    return steps.weigh(steps.divide(weights, total), found.seen[..., None, :]), lse, top


def _find(
    steps: ListSteps, q: Array, lists: Array, call: Call, scale: float, gather: Step, *, backward: bool = False
) -> Found:
    lists = steps.read(lists, call)
    place = steps.find_place(lists, call)
    is_allowed = steps.is_allowed_backward if backward and steps.is_allowed_backward else steps.is_allowed
    is_named = steps.is_named_backward if backward and steps.is_named_backward else steps.is_named
    seen = is_named(lists, call) & is_allowed(place, call)
    k, v = (steps.clean(x, seen) for x in gather(place, call))
    group = q.shape[-2] // k.shape[-2]
    k, v = (steps.repeat(x, group) for x in (k, v))
    x = jnp.einsum("...nh,...enh->...ne", q, k, precision="highest", preferred_element_type=jnp.float32) * scale
    return Found(place, seen, k, v, steps.hide(x, seen[..., None, :]))


def _multiply(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=jnp.float32)


def gathering(steps: ListSteps = ListSteps()) -> Callable[..., Any]:
    """The kernel that gathers dense keys."""

    @declare(behind_mask="any", empty_rows="zero")
    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        indices: Array,
        causal: bool = False,
        sinks: Array | None = None,
        scale: float | None = None,
        save_residuals: bool = False,
    ) -> Any:
        """Attention to the keys of each list."""
        factor = q.shape[-1] ** -0.5 if scale is None else scale

        def find(q: Array, k: Array, v: Array, lists: Array, *, backward: bool = False) -> Found:
            call = Call(kv_length=k.shape[1], positions=jnp.arange(q.shape[1])[:, None], causal=causal)
            rows = jnp.arange(q.shape[0])[:, None, None]

            def gather(place: Array, call: Call) -> tuple[Array, Array]:
                return k[rows, place], v[rows, place]

            return _find(steps, q, lists, call, factor, gather, backward=backward)

        @jax.custom_vjp
        def run(q: Array, k: Array, v: Array, sinks: Any, lists: Array) -> tuple[Array, Array, Array]:
            found = find(q, k, v, lists)
            p, lse, top = _softmax(steps, found, sinks)
            return _multiply("btne,btenv->btnv", p.astype(v.dtype), found.v).astype(q.dtype), lse, top

        def save(*given: Any) -> Any:
            results = run(*given)
            return results, (*given, *results[:2])

        def pull_back(saved: tuple[Any, ...], cotangents: tuple[Array, Array, Array]) -> tuple[Any, ...]:
            q, k, v, sinks, lists, out, lse = saved
            do, dlse, _ = cotangents
            found = find(q, k, v, lists, backward=True)
            finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
            p = jnp.exp(found.x - finite[..., None])
            sums = _multiply("btnv,btnv->btn", do, out) - dlse
            dx = p * (_multiply("btnv,btenv->btne", do, found.v) - sums[..., None]) * factor
            dx, p = dx.astype(q.dtype), p.astype(q.dtype)

            def share(x: Array, like: Array) -> Array:
                """Sum over the query heads of each key head."""
                return x.reshape(*x.shape[:3], like.shape[2], -1, x.shape[-1]).sum(axis=4)

            dk, dv = _multiply("btne,btnh->btenh", dx, q), _multiply("btne,btnv->btenv", p, do)
            at = jnp.arange(q.shape[0])[:, None, None], found.place
            dk = steps.add_keys(jnp.zeros(k.shape, jnp.float32), at, share(dk, k))
            dv = steps.add_values(jnp.zeros(v.shape, jnp.float32), at, share(dv, v))
            dq = _multiply("btne,btenh->btnh", dx, found.k)
            ds = None if sinks is None else -(jnp.exp(sinks - finite) * sums).sum(axis=(0, 1)).astype(sinks.dtype)
            return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), ds, None

        run.defvjp(save, pull_back)
        out, lse, top = run(q, k, v, sinks, indices)
        residuals = {"logsumexp": jnp.swapaxes(lse, 1, 2), "max_logits": jnp.swapaxes(top, 1, 2)}
        return (out, residuals) if save_residuals else out

    return attention


def mark(lists: Array, kv_length: int) -> Array:
    """Booleans `[B, T, S]` of the listed keys; entries of -1 mark a place past the last, which is cut off."""
    b, t = jnp.ogrid[: lists.shape[0], : lists.shape[1]]
    at = jnp.where(lists < 0, kv_length, lists)
    none = jnp.zeros((*lists.shape[:2], kv_length + 1), bool)
    return none.at[b[..., None], t[..., None], at].set(True)[..., :kv_length]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkSteps:
    """The steps of the kernel that scatters lists to booleans."""

    read: Step = lambda lists: lists
    mark: Step = mark
    join: Step = lambda marked, causal: marked & causal
    weigh: Step = lambda weights, lists: weights
    keep_sinks: bool = True


def scattering(steps: MarkSteps = MarkSteps()) -> Callable[..., Any]:
    """The kernel that scatters lists to booleans."""

    @declare(behind_mask="finite", empty_rows="zero")
    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        indices: Array,
        causal: bool = False,
        sinks: Array | None = None,
        scale: float | None = None,
    ) -> Any:
        """Attention under the booleans of the lists."""
        k, v = (jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        x = _multiply("btnh,bsnh->bnts", q.astype(jnp.float32), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        lists = steps.read(indices)
        ok = steps.mark(lists, k.shape[1])
        if causal:
            ok = steps.join(ok, jnp.tri(q.shape[1], k.shape[1], dtype=bool))
        ok = ok[:, None]
        x = jnp.where(ok, x, -1e30)
        sinks = sinks if steps.keep_sinks else None
        sink = None if sinks is None else sinks.astype(jnp.float32)[:, None, None]
        top = x.max(axis=-1, keepdims=True)
        top = jax.lax.stop_gradient(top if sink is None else jnp.maximum(top, sink))
        weights = steps.weigh(jnp.where(ok, jnp.exp(x - top), 0), lists)
        total = weights.sum(axis=-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - top))
        p = (weights / jnp.where(total == 0, 1, total)).astype(q.dtype)
        return _multiply("bnts,bsnv->btnv", p.astype(jnp.float32), v).astype(q.dtype)

    return attention


def paging(steps: ListSteps = ListSteps()) -> Callable[..., Any]:
    """The kernel that gathers keys from pages."""

    @declare(behind_mask="any", empty_rows="zero")
    def attention(
        q: Array,
        k_pages: Array,
        v_pages: Array,
        *,
        indices: Array,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        window: tuple[int | None, int] | None = None,
        sinks: Array | None = None,
        scale: float | None = None,
    ) -> Any:
        """Attention to the keys of each list, in pages."""
        token, count = jnp.arange(len(q)), num_seqs[0]
        ends = jnp.where(jnp.arange(len(kv_lens)) < count, cu_q_lens[1:], cu_q_lens[count])
        sequence = jnp.minimum((token[:, None] >= ends).sum(axis=1), len(kv_lens) - 1)
        real = (token < cu_q_lens[count])[:, None]
        call = Call(
            kv_length=0,
            positions=(kv_lens[sequence] - (ends[sequence] - token))[:, None],
            causal=True,
            left=None if window is None else window[0],
            sequence=sequence[:, None],
            page_size=k_pages.shape[1],
            cu_q_lens=cu_q_lens,
        )

        def gather(place: Array, call: Call) -> tuple[Array, Array]:
            at = steps.locate(place, page_indices, call)
            return k_pages[at], v_pages[at]

        lists = jnp.where(real, indices, -1)
        found = _find(steps, q, lists, call, q.shape[-1] ** -0.5 if scale is None else scale, gather)
        p, _, _ = _softmax(steps, found, sinks)
        out = _multiply("tne,tenv->tnv", p.astype(v_pages.dtype), found.v)
        return jnp.where(real[..., None], out, 0).astype(q.dtype)

    return attention


def gathered(name: str, steps: ListSteps = ListSteps()) -> Implementation:
    """The kernel that gathers dense keys, as an implementation."""
    return build_implementation(gathering(steps), name)


def scattered(name: str, steps: MarkSteps = MarkSteps()) -> Implementation:
    """The kernel that scatters lists to booleans, as an implementation."""
    return build_implementation(scattering(steps), name)


def paged(name: str, steps: ListSteps = ListSteps()) -> Implementation:
    """The kernel that gathers keys from pages, as an implementation."""
    return build_implementation(paging(steps), name)
