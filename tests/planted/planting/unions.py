"""Attention to listed keys and a window beside them, made of steps that a bug may replace; the defaults are correct.

There are three kernels. One adds the window to each list and gathers the keys. One computes two parts, one of listed
keys and one of the window, and merges them by their `logsumexp`. One adds the window to lists over pages. The first two
also take booleans that may differ by head.
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
from tests.planted.planting import listed

Array = jax.Array
Step = Callable[..., Any]
Window = tuple[int, int]


def _is_within(lists: Array, position: Array, window: Window) -> Array:
    return (lists >= position - window[0]) & (lists <= position + window[1])


def _list_near(position: Array, window: Window) -> Array:
    """List the places of the window, `[..., w]`; negative before the first key."""
    return position + jnp.arange(-window[0], window[1] + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinSteps:
    """The steps of the kernels that add the window to the lists, in their order."""

    find_position: Step = lambda t, q_length, kv_length: t + kv_length - q_length
    is_within: Step = _is_within  # which listed keys the window has too, which are left out of the list
    list_near: Step = _list_near
    join: Step = lambda lists, near: jnp.concatenate([lists, near], axis=-1)
    is_named: Step = lambda places: places >= 0
    select_head: Step = lambda mask, n: mask[:, n % mask.shape[1]]
    pull: Step = lambda x, count: x  # gathered keys and values, of which the first `count` are listed


def _add_window(steps: JoinSteps, lists: Array, position: Array, window: Window | None) -> Array:
    if window is None:
        return lists
    near = steps.list_near(position, window)
    near = jnp.broadcast_to(near, (*lists.shape[:-1], near.shape[-1]))
    return steps.join(jnp.where(steps.is_within(lists, position, window), -1, lists), near)


def _attend(x: Array, ok: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Return weights and `logsumexp` of logits `[..., N, e]`, of which `ok` count."""
    x = jnp.where(ok, x, -1e30)
    top = x.max(axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(top if sinks is None else jnp.maximum(top, sinks[:, None]))
    weights = jnp.where(ok, jnp.exp(x - top), 0)
    total = weights.sum(axis=-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks[:, None] - top))
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    return weights / total, jnp.where(is_empty, -1e30, top + jnp.log(total))[..., 0]


def _multiply(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=jnp.float32)


def joining(steps: JoinSteps = JoinSteps()) -> Callable[..., Any]:
    """The kernel that adds the window to the lists, and gathers."""

    @declare(behind_mask="finite", empty_rows="zero", causal="end")
    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        indices: Array,
        local_window: Window | None = None,
        causal: bool = False,
        mask: Array | None = None,
        sinks: Array | None = None,
        scale: float | None = None,
    ) -> Any:
        """Attention to the keys of each list and of a window."""
        q_length, kv_length, heads = q.shape[1], k.shape[1], q.shape[2]
        b, t = jnp.arange(q.shape[0])[:, None, None], jnp.arange(q_length)[:, None]
        position = steps.find_position(t, q_length, kv_length)
        places = _add_window(steps, indices, position, local_window)
        seen = steps.is_named(places)
        at = jnp.clip(places, 0, kv_length - 1)
        if causal:
            seen &= at <= t + kv_length - q_length
        seen = jnp.repeat(seen[:, :, None], heads, axis=2)
        if mask is not None:
            mask = jnp.broadcast_to(mask, (q.shape[0], *mask.shape[1:]))
            seen &= jnp.stack([steps.select_head(mask, n)[b, t, at] for n in range(heads)], axis=2)
        k, v = (jnp.repeat(steps.pull(x[b, at], indices.shape[-1]), heads // x.shape[2], axis=3) for x in (k, v))
        x = _multiply("btnh,btenh->btne", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        p, _ = _attend(x, seen, sinks)
        return _multiply("btne,btenv->btnv", p.astype(v.dtype), v).astype(q.dtype)

    return attention


def _merge(parts: list[tuple[Array, Array]], sinks: Array | None) -> Array:
    """Merge parts `(out, logsumexp)`, `[..., N, V]` and `[..., N]`; a sink counts once."""
    top = jnp.stack([lse for _, lse in parts]).max(axis=0)
    top = jax.lax.stop_gradient(top if sinks is None else jnp.maximum(top, sinks))
    weights = [jnp.exp(lse - top) for _, lse in parts]
    total = sum(weights) + (0 if sinks is None else jnp.exp(sinks - top))
    shares = [out * (w / total)[..., None] for (out, _), w in zip(parts, weights, strict=True)]
    return jnp.stack(shares).sum(axis=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeSteps:
    """The steps of the kernel that merges two parts."""

    mark: Step = listed.mark
    leave_out: Step = lambda marked, near: marked & ~near
    is_near: Step = lambda i, j, window: (j >= i - window[0]) & (j <= i + window[1])
    mask_near: Step = lambda near, mask: near & mask
    sink_of_part: Step = lambda sinks: None
    merge: Step = _merge


def merging(steps: MergeSteps = MergeSteps()) -> Callable[..., Any]:
    """The kernel that merges a part of listed keys and a part of the window."""

    @declare(behind_mask="finite", empty_rows="zero", causal="end")
    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        indices: Array,
        local_window: Window | None = None,
        causal: bool = False,
        mask: Array | None = None,
        sinks: Array | None = None,
        scale: float | None = None,
    ) -> Any:
        """Attention to the keys of each list, merged with attention to a window."""
        q_length, kv_length = q.shape[1], k.shape[1]
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        x = _multiply("btnh,bsnh->btns", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        i, j = jnp.arange(q_length)[:, None] + kv_length - q_length, jnp.arange(kv_length)
        rest = jnp.ones((1, 1, q_length, kv_length), bool) if mask is None else mask
        if causal:
            rest = rest & (j <= i)

        def compute_part(ok: Array) -> tuple[Array, Array]:
            p, lse = _attend(x, jnp.swapaxes(ok, 1, 2), steps.sink_of_part(sinks))
            return _multiply("btns,bsnv->btnv", p.astype(v.dtype), v), lse

        marked = steps.mark(indices, kv_length)
        if local_window is None:
            return steps.merge([compute_part(marked[:, None] & rest)], sinks).astype(q.dtype)
        near = steps.is_near(i, j, local_window)
        listed_part = compute_part(steps.leave_out(marked, near)[:, None] & rest)
        return steps.merge([listed_part, compute_part(steps.mask_near(near, rest))], sinks).astype(q.dtype)

    return attention


def paging(steps: JoinSteps = JoinSteps()) -> Callable[..., Any]:
    """The kernel that adds the window to lists over pages."""
    attend = listed.paging()

    @declare(behind_mask="any", empty_rows="zero")
    def attention(
        q: Array,
        k_pages: Array,
        v_pages: Array,
        *,
        indices: Array,
        local_window: Window | None = None,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        window: tuple[int | None, int] | None = None,
        sinks: Array | None = None,
        scale: float | None = None,
    ) -> Any:
        """Attention to the keys of each list and of a window, in pages."""
        token, count = jnp.arange(len(q)), num_seqs[0]
        ends = jnp.where(jnp.arange(len(kv_lens)) < count, cu_q_lens[1:], cu_q_lens[count])
        sequence = jnp.minimum((token[:, None] >= ends).sum(axis=1), len(kv_lens) - 1)
        position = steps.find_position(token - ends[sequence], 0, kv_lens[sequence])[:, None]
        places = _add_window(steps, indices, position, local_window)
        places = jnp.where(places < kv_lens[sequence][:, None], jnp.maximum(places, -1), -1)
        tables = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
        return attend(q, k_pages, v_pages, indices=places, window=window, sinks=sinks, scale=scale, **tables)

    return attention


def joined(name: str, steps: JoinSteps = JoinSteps()) -> Implementation:
    """The kernel that adds the window to the lists, as an implementation."""
    return build_implementation(joining(steps), name)


def merged(name: str, steps: MergeSteps = MergeSteps()) -> Implementation:
    """The kernel that merges two parts, as an implementation."""
    return build_implementation(merging(steps), name)


def paged(name: str, steps: JoinSteps = JoinSteps()) -> Implementation:
    """The kernel that adds the window to lists over pages, as an implementation."""
    return build_implementation(paging(steps), name)
