"""Kernels with masks and operands over stored sequences: correct ones in two styles, with steps for bugs.

`build_paged` gathers the keys of each query from its pages. `build_packed` computes one matrix of all queries and all
keys, and JAX differentiates it.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """The places of each pair of a query and a key; arrays broadcast to `[total_q, N, S]`."""

    row: Array  # the index of the query in the packed array
    sequence: Array
    own: Array  # the place of the query among those of its sequence
    position: Array  # its position in the sequence
    head: Array  # the query head
    key: Array  # the place of the key in its sequence
    ends: Array  # the number of keys of the sequence
    queries: Array  # the number of queries of the sequence
    group: int = 1  # query heads for each key/value head


Move = Callable[[Places], Places]


def _stay(at: Places) -> Places:
    return at


def _see(seen: Array, at: Places) -> Array:
    return seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskSteps:
    """Steps of a call; the defaults are correct. A `Move` changes the places that one part of the call uses."""

    causal: Move = _stay
    mask_mod: Move = _stay
    mask: Move = _stay
    tree: Move = _stay
    score: Move = _stay
    alibi: Move = _stay
    logit_scale: Move = _stay
    segments: Move = _stay
    ids: Callable[[Array], Array] = lambda ids: ids
    is_causal: Callable[[bool], bool] = lambda causal: causal
    sides: Callable[[Any], Any] = lambda sides: sides
    distance: Callable[[Array], Array] = jnp.abs
    seen: Callable[[Array, Places], Array] = _see
    in_tree: Callable[[Array, Array, Places], Array] = lambda found, column, at: found
    ancestors: Callable[[Array, Array], Array] | None = None  # (parents of a row's ancestor, ...)
    # (x, scaled, slopes' term, score, cap) -> logits, from functions that change logits
    compose: Callable[..., Array] = lambda x, scaled, sloped, scored, capped: capped(scored(sloped(scaled(x))))


def _attend(
    steps: MaskSteps,
    at: Places,
    x: Array,  # [total_q, N, S], scaled products
    v: Array,  # [total_q, S, N, V]
    seen: Array,  # [total_q, 1, S], keys that exist
    options: dict[str, Any],
) -> tuple[Array, Array, Array]:
    """Compute `out`, `logsumexp` and `max_logits` of all queries."""
    if options.get("mask_mod") is not None:
        to = steps.mask_mod(at)
        seen = seen & options["mask_mod"](to.sequence, to.head, to.position, to.key)
    if (mask := options.get("mask")) is not None:
        to = steps.mask(at)
        seen = seen & mask[to.row, jnp.clip(to.key, 0, mask.shape[1] - 1)]
    if (tree := options.get("tree_mask")) is not None:
        to = steps.tree(at)
        column = to.key - (to.ends - to.queries)
        found = (column < 0) | tree[to.row, jnp.clip(column, 0, tree.shape[1] - 1)]
        seen = seen & steps.in_tree(found, column, to)
    if (parents := options.get("parents")) is not None:
        seen = seen & _find_ancestors(steps, parents, steps.tree(at))
    seen = steps.seen(seen, at)

    def scaled(x: Array) -> Array:
        scale = options.get("logit_scale")
        return x if scale is None else x * scale[steps.logit_scale(at).head]

    def sloped(x: Array) -> Array:
        slopes, to = options.get("alibi_slopes"), steps.alibi(at)
        return x if slopes is None else x - slopes[to.head] * steps.distance(to.position - to.key).astype(jnp.float32)

    def scored(x: Array) -> Array:
        score, to = options.get("score_mod"), steps.score(at)
        return x if score is None else score(x, to.sequence, to.head, to.position, to.key)

    def capped(x: Array) -> Array:
        cap = options.get("soft_cap")
        return x if cap is None else cap * jnp.tanh(x / cap)

    x = steps.compose(jnp.where(seen, x, 0), scaled, sloped, scored, capped)
    sinks = options.get("sinks")
    x = jnp.where(seen, x, -jnp.inf)
    top = x.max(axis=-1)
    shift = top if sinks is None else jnp.maximum(top, sinks)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isfinite(shift), shift, 0))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, x, 0) - shift[..., None]), 0)
    total = weights.sum(axis=-1) + (0 if sinks is None else jnp.exp(sinks - shift))
    some = jnp.where(total > 0, total, 1)
    out = jnp.einsum("tns,tsnv->tnv", weights / some[..., None], v, precision="highest")
    return out, jnp.where(total > 0, shift + jnp.log(some), -jnp.inf), top


def _find_ancestors(steps: MaskSteps, parents: Array, at: Places) -> Array:
    """Find which keys come before a sequence's queries, or are the query or one of the queries that it follows."""
    column, start = at.key - (at.ends - at.queries), at.row - at.own
    found, now = (column < 0) | (column == at.own), at.own

    def climb(carried: tuple[Array, Array]) -> tuple[Array, Array]:
        found, now = carried
        above = jnp.where(now < 0, -1, parents[jnp.clip(start + now, 0, len(parents) - 1)])
        return found | ((above >= 0) & (column == above)), above

    if steps.ancestors is not None:
        return steps.ancestors(climb((found, now))[0], column)
    return jax.lax.fori_loop(0, len(parents), lambda _, carried: climb(carried), (found, now))[0]


def _find_sequences(starts: Array, count: Array, length: int) -> tuple[Array, Array, Array]:
    """Find the sequence of each of `length` tokens, and whether it has one, and its place there."""
    token = jnp.arange(length)
    ends = jnp.where(jnp.arange(len(starts) - 1) < count, starts[1:], starts[count])
    sequence = jnp.minimum((token[:, None] >= ends).sum(axis=1), len(starts) - 2)
    return sequence, token < starts[count], token - starts[sequence]


def _narrow(steps: MaskSteps, at: Places, options: dict[str, Any], *, causal: bool) -> Array:
    """Return which keys causality and the window leave."""
    to = steps.causal(at)
    seen = to.key <= to.position if steps.is_causal(causal) else jnp.bool_(True)
    left, right = (None, None) if options.get("window") is None else steps.sides(options["window"])
    seen = seen if left is None else seen & (to.key >= to.position - left)
    return seen if right is None else seen & (to.key <= to.position + right)


def build_paged(steps: MaskSteps, name: str) -> Implementation:
    """Build a kernel that reads pages, of which `steps` are the steps."""

    @declare(empty_rows="zero", soft_cap="after_bias")
    def attention(
        q: Any,
        k_pages: Any,
        v_pages: Any,
        *,
        kv_lens: Any,
        page_indices: Any,
        cu_q_lens: Any,
        num_seqs: Any,
        causal: bool = True,
        window: Any = None,
        mask_mod: Any = None,
        mask: Any = None,
        tree_mask: Any = None,
        soft_cap: Any = None,
        sinks: Any = None,
        scale: Any = None,
        alibi_slopes: Any = None,
        score_mod: Any = None,
        logit_scale: Any = None,
        save_residuals: bool = False,
    ) -> Any:
        """Attention over pages with all of a query's keys at once."""
        options = dict(locals())
        sequence, is_real, own = _find_sequences(cu_q_lens, num_seqs[0], len(q))
        queries, ends = jnp.diff(cu_q_lens)[sequence], kv_lens[sequence]
        size, (_, heads, depth) = k_pages.shape[1], q.shape
        j = jnp.arange(page_indices.shape[1] * size)
        pages = jnp.clip(page_indices[sequence][:, j // size], 0, len(k_pages) - 1)
        column = (slice(None), None, None)
        at = Places(
            row=jnp.arange(len(q))[column],
            sequence=sequence[column],
            own=own[column],
            position=(ends - queries + own)[column],
            head=jnp.arange(heads)[:, None],
            key=j,
            ends=ends[column],
            queries=queries[column],
            group=heads // k_pages.shape[2],
        )
        seen = is_real[column] & (j < at.ends)
        seen = seen & _narrow(steps, at, options, causal=causal)
        k, v = (x[pages, j % size].astype(jnp.float32) for x in (k_pages, v_pages))  # [total_q, S, K, .]
        k, v = (jnp.where((is_real[:, None] & (j < ends[:, None]))[..., None, None], x, 0) for x in (k, v))
        k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
        x = jnp.einsum("tnh,tsnh->tns", q.astype(jnp.float32), k, precision="highest")
        x = x * (depth**-0.5 if scale is None else scale)
        dead = ~jnp.any(jnp.isfinite(v), axis=-1, keepdims=True)  # a key that no query may see may be NaN
        out, logsumexp, top = _attend(steps, at, x, jnp.where(dead | ~jnp.isfinite(v), 0, v), seen, options)
        out = out.astype(q.dtype)
        return (out, {"logsumexp": logsumexp, "max_logits": top}) if save_residuals else out

    return build_implementation(attention, name)


def build_packed(steps: MaskSteps, name: str) -> Implementation:
    """Build a kernel over packed sequences, of which `steps` are the steps."""

    @declare(empty_rows="zero", behind_mask="finite", soft_cap="after_bias")
    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        cu_q_lens: Any,
        cu_kv_lens: Any,
        num_seqs: Any,
        causal: bool = False,
        window: Any = None,
        mask_mod: Any = None,
        mask: Any = None,
        parents: Any = None,
        segment_ids: Any = None,
        soft_cap: Any = None,
        sinks: Any = None,
        scale: Any = None,
        alibi_slopes: Any = None,
        score_mod: Any = None,
        logit_scale: Any = None,
        save_residuals: bool = False,
    ) -> Any:
        """Attention over packed sequences with all logits at once."""
        options = dict(locals())
        sequence, is_real, own = _find_sequences(cu_q_lens, num_seqs[0], len(q))
        of_key, is_key, place = _find_sequences(cu_kv_lens, num_seqs[0], len(k))
        queries, ends = jnp.diff(cu_q_lens)[sequence], jnp.diff(cu_kv_lens)[sequence]
        _, heads, depth = q.shape
        column = (slice(None), None, None)
        at = Places(
            row=jnp.arange(len(q))[column],
            sequence=sequence[column],
            own=own[column],
            position=(ends - queries + own)[column],
            head=jnp.arange(heads)[:, None],
            key=place,
            ends=ends[column],
            queries=queries[column],
            group=heads // k.shape[1],
        )
        seen = is_real[column] & is_key & (of_key == at.sequence)
        seen = seen & _narrow(steps, at, options, causal=causal)
        if segment_ids is not None:
            to = steps.segments(at)
            start = cu_kv_lens[sequence][column]
            of_keys = segment_ids[1][jnp.clip(start + to.key, 0, len(k) - 1)]
            seen = seen & (steps.ids(segment_ids[0][to.row]) == steps.ids(of_keys))
        k, v = (jnp.repeat(x.astype(jnp.float32), heads // x.shape[1], axis=1) for x in (k, v))
        x = jnp.einsum("tnh,snh->tns", q.astype(jnp.float32), k, precision="highest")
        x = x * (depth**-0.5 if scale is None else scale)
        out, logsumexp, top = _attend(steps, at, x, jnp.broadcast_to(v, (len(q), *v.shape)), seen, options)
        out = out.astype(q.dtype)
        return (out, {"logsumexp": logsumexp, "max_logits": top}) if save_residuals else out

    return build_implementation(attention, name)
