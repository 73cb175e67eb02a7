"""Kernels over pages and over packed sequences, made of steps that a planted bug replaces one of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.storage_forms.paged_form import SCALED_FEATURES, WHOLE_FEATURES
from impls.contract.implementation import Implementation

Array = jax.Array
Step = Callable[..., Any]
_NEVER = -jnp.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a step may ask of the call it is in; with pages, of the tables as `PagedSteps.tables` leaves them."""

    q: Array  # [total_q, N, H]
    cu_q_lens: Array  # [max_seqs + 1]
    count: Array  # how many sequences there are
    kv_lens: Array  # [max_seqs], 0 past the last sequence
    page_indices: Array | None = None  # [max_seqs, pages_per_seq]
    pages: int = 0
    page_size: int = 1
    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None
    scale: float = 1.0
    k_scale: float = 1.0  # of all keys
    kv_heads: int = 1

    @property
    def rows(self) -> int:
        """How many sequences the tables have room for."""
        return len(self.cu_q_lens) - 1

    @property
    def q_lens(self) -> Array:
        """How many queries each sequence has, 0 past the last."""
        return jnp.where(jnp.arange(self.rows) < self.count, jnp.diff(self.cu_q_lens), 0)


def sequences(starts: Array, call: Call, length: int) -> tuple[Array, Array]:
    """The sequence of each of `length` tokens, `rows` for padding, and its place in there."""
    ends = jnp.where(jnp.arange(1, call.rows + 1) <= call.count, starts[1:], length + 1)
    token = jnp.arange(length)
    found = jnp.where(token < starts[call.count], (token[:, None] >= ends).sum(axis=1), call.rows)
    return found, token - starts[jnp.minimum(found, call.rows)]


def _sequence(call: Call) -> tuple[Array, Array]:
    return sequences(call.cu_q_lens, call, len(call.q))


def _pages_of(slot: Array, call: Call) -> Array:
    assert call.page_indices is not None
    return call.page_indices[:, slot]


def _gathered(x: Array, pages: Array, row: Array) -> Array:
    return x[jnp.clip(pages, 0, len(x) - 1), row]


def _window(j: Array, position: Array, call: Call, place: Array) -> Array:
    del place
    return jnp.asarray(True) if call.left is None else j >= position[:, None] - call.left


def cap_logits(x: Array, allowed: Array, call: Call) -> Array:
    """Multiply logits by the scale of all keys, then apply the soft cap."""
    del allowed
    x = x * call.k_scale
    return x if call.soft_cap is None else call.soft_cap * jnp.tanh(x / call.soft_cap)


def softmax(x: Array, allowed: Array, v: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """`out [total_q, N, V]`, `logsumexp` and `max_logits [total_q, N]` of logits `[total_q, N, S]`."""
    x = jnp.where(allowed, x, _NEVER)
    top = x.max(axis=-1)
    shift = top if sinks is None else jnp.maximum(top, sinks)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isfinite(shift), shift, 0))
    weights = jnp.where(allowed, jnp.exp(x - shift[..., None]), 0)
    total = weights.sum(axis=-1) + (0 if sinks is None else jnp.exp(sinks - shift))
    some = jnp.where(total > 0, total, 1)
    out = jnp.einsum("tns,tsnv->tnv", weights / some[..., None], v.astype(jnp.float32))
    return out, jnp.where(total > 0, shift + jnp.log(some), _NEVER), top


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSteps:
    """Steps of attention over pages, in order; the defaults are correct."""

    tables: Step = lambda call: call
    sequence: Step = _sequence  # call -> the sequence of each query, and its place
    locate: Step = lambda j, call: (j // call.page_size, j % call.page_size)  # the slot of the table and the row
    pages: Step = _pages_of  # (slot, call) -> [max_seqs, S]
    values: Step = _gathered  # (v_pages, pages, row) -> [max_seqs, S, K, H]
    ends: Step = lambda call: call.kv_lens  # keys that there are
    row_of_table: Step = lambda sequence: sequence
    position: Step = lambda place, q_lens, kv_lens, call: kv_lens - q_lens + place
    window: Step = _window  # (j, position, call, place)
    allowed: Step = lambda allowed, call: allowed
    clean_values: Step = lambda x, seen: jnp.where(seen[..., None, None], x, 0)
    # Of pages with scales: those of k and v [pages, page_size, K], where a key's lies, and what stored numbers mean.
    scales: Step = lambda k_scales, v_scales: (k_scales, v_scales)
    of_scales: Step = lambda pages, row, slot, call: (pages, row)
    scale: Step = _gathered  # (scales, pages, row) -> [max_seqs, S, K]
    meant: Step = lambda x, scales: x.astype(jnp.float32) * scales[..., None]  # of keys
    meant_values: Step = lambda x, scales: x.astype(jnp.float32) * scales[..., None]
    # The same with a scale of all keys and one of all values, Python numbers.
    numbers: Step = lambda k_scale, v_scale: (k_scale, v_scale)
    times: Step = lambda out, v_scale, call: out * v_scale
    heads: Step = lambda x, count: jnp.repeat(x, count // x.shape[2], axis=2)
    cap: Step = cap_logits  # (x, allowed, call)
    sinks: Step = lambda sinks, call: sinks
    attend: Step = softmax
    output: Step = lambda out, call: out
    logsumexp: Step = lambda lse, allowed: lse


def paged_by(steps: PagedSteps) -> Callable[..., Any]:
    """The paged call made of `steps`."""

    def attention(
        q: Array,
        k_pages: Array,
        v_pages: Array,
        *,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        k_scales: Array | None = None,
        v_scales: Array | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        save_residuals: bool = False,
    ) -> Any:
        of_keys, of_values = (1.0, 1.0) if k_scale is None else steps.numbers(k_scale, v_scale)
        there = jnp.arange(len(kv_lens)) < num_seqs[0]
        call = steps.tables(
            Call(
                q=q,
                cu_q_lens=cu_q_lens,
                count=num_seqs[0],
                kv_lens=jnp.where(there, kv_lens, 0),
                page_indices=page_indices,
                pages=len(k_pages),
                page_size=k_pages.shape[1],
                left=None if window is None else window[0],
                soft_cap=soft_cap,
                scale=q.shape[-1] ** -0.5 if scale is None else scale,
                k_scale=of_keys,
                kv_heads=k_pages.shape[2],
            )
        )
        sequence, place = steps.sequence(call)
        j = jnp.arange(page_indices.shape[1] * k_pages.shape[1])
        slot, row = steps.locate(j, call)
        pages = steps.pages(slot, call)
        at = steps.row_of_table(jnp.minimum(sequence, call.rows - 1))
        ends = steps.ends(call)
        position = steps.position(place, call.q_lens[at], ends[at], call)
        allowed = (j <= position[:, None]) & steps.window(j, position, call, place) & (j < ends[at][:, None])
        allowed = steps.allowed(allowed & (sequence < call.count)[:, None], call)
        seen = jnp.zeros(pages.shape, bool).at[at].max(allowed)
        k = jnp.where(seen[..., None, None], _gathered(k_pages, pages, row), 0)
        v = steps.clean_values(steps.values(v_pages, pages, row), seen)
        if k_scales is not None:
            where = steps.of_scales(pages, row, slot, call)
            own = steps.scales(k_scales, v_scales)
            of_k, of_v = (jnp.where(seen[..., None], steps.scale(x, *where), 0) for x in own)
            k, v = steps.meant(k, of_k), steps.meant_values(v, of_v)
        if k_scale is not None:
            k, v = k.astype(jnp.float32), v.astype(jnp.float32)
        out, lse, top = _attended(steps, q, k[at], v[at], allowed, call, sinks, of_values)
        return (out, {"logsumexp": lse, "max_logits": top}) if save_residuals else out

    return attention


def _attended(
    steps: PagedSteps,
    q: Array,
    k: Array,
    v: Array,
    allowed: Array,
    call: Call,
    sinks: Array | None,
    v_scale: float,
) -> tuple[Array, Array, Array]:
    k, v = (steps.heads(x, q.shape[1]) for x in (k, v))
    x = jnp.einsum("tnh,tsnh->tns", q, k, preferred_element_type=jnp.float32) * call.scale
    allowed = allowed[:, None, :]
    x = steps.cap(x, allowed, call)
    out, lse, top = steps.attend(x, allowed, v, steps.sinks(sinks, call))
    out = steps.output(steps.times(out, v_scale, call), call)
    return out.astype(q.dtype), steps.logsumexp(lse, allowed), top


def paged(name: str, steps: PagedSteps = PagedSteps()) -> Implementation:
    """The paged kernel made of `steps` as the gate takes it."""
    return Implementation(
        name=name,
        call=paged_by(steps),
        storage="paged",
        gradients=frozenset(),
        differentiable_residuals=frozenset(),
        empty_rows="zero",
        unsupported={"train": "a cache is read, not differentiated"},
        refuses_by_signature=True,
    )


def scaled(name: str, steps: PagedSteps = PagedSteps()) -> Implementation:
    """The same over pages with scales, and no others."""
    return dataclasses.replace(paged(name, steps), offers=SCALED_FEATURES, supports_case=_only_scaled)


def whole(name: str, steps: PagedSteps = PagedSteps()) -> Implementation:
    """The same over pages with one scale of all keys and one of all values, and no others."""
    return dataclasses.replace(paged(name, steps), offers=WHOLE_FEATURES, supports_case=_only_scaled)


def _only_scaled(case: Case) -> str | None:
    return None if case.kv_cache else "k_scales: pages without scales"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedSteps:
    """Steps of packed attention with gradients, in order; the defaults are correct."""

    starts: Step = lambda cu_q_lens, cu_kv_lens, count: (cu_q_lens, cu_kv_lens)
    sequence: Step = _sequence  # call -> the sequence of each query, and its place
    same: Step = lambda sequence, of_key: sequence[:, None] == of_key
    position: Step = lambda place, q_lens, kv_lens, token: kv_lens - q_lens + place
    sides: Step = lambda left, right: (left, right)
    clean: Step = lambda q, sequence, call: jnp.where((sequence < call.count)[:, None, None], q, 0)
    heads: Step = lambda x, count: jnp.repeat(x, count // x.shape[1], axis=1)
    sinks: Step = lambda sinks, call: sinks
    attend: Step = softmax
    gradients: Step = lambda q, k, v, call: (q, k, v)  # identities whose derivative may be another
    pairs_back: Step | None = None  # (sequence, of_key, at, call) -> which pairs the way back takes, if not all


def packed_by(steps: PackedSteps) -> Callable[..., Any]:
    """The packed call made of `steps`."""

    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        cu_q_lens: Array,
        cu_kv_lens: Array,
        num_seqs: Array,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
        save_residuals: bool = False,
    ) -> Any:
        count = num_seqs[0]
        cu_q_lens, cu_kv_lens = steps.starts(cu_q_lens, cu_kv_lens, count)
        there = jnp.arange(len(cu_q_lens) - 1) < count
        left, right = steps.sides(*((None, 0) if causal else (None, None) if window is None else window))
        call = Call(
            q=q,
            cu_q_lens=cu_q_lens,
            count=count,
            kv_lens=jnp.where(there, jnp.diff(cu_kv_lens), 0),
            soft_cap=soft_cap,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            kv_heads=k.shape[1],
        )
        q, k, v = steps.gradients(q, k, v, call)
        sequence, place = steps.sequence(call)
        of_key, at = sequences(cu_kv_lens, call, len(k))
        row = jnp.minimum(sequence, call.rows - 1)
        position = steps.position(place, call.q_lens[row], call.kv_lens[row], jnp.arange(len(q)))
        allowed = steps.same(sequence, of_key) & (sequence < count)[:, None]
        if right is not None:
            allowed &= at <= position[:, None] + right
        if left is not None:
            allowed &= at >= position[:, None] - left
        seen = allowed.any(axis=0)
        q = steps.clean(q, sequence, call)
        k, v = (steps.heads(jnp.where(seen[:, None, None], x, 0), q.shape[1]) for x in (k, v))
        x = jnp.einsum("tnh,snh->tns", q, k, preferred_element_type=jnp.float32) * call.scale
        x = cap_logits(x, allowed, call)
        wide = jnp.broadcast_to(v, (len(q), *v.shape))
        if steps.pairs_back is not None:
            x, wide = _taken_back(x, wide, steps.pairs_back(sequence, of_key, at, call))
        out, lse, top = steps.attend(x, allowed[:, None, :], wide, steps.sinks(sinks, call))
        out = out.astype(q.dtype)
        return (out, {"logsumexp": lse, "max_logits": top}) if save_residuals else out

    return attention


@jax.custom_vjp
def _taken_back(x: Array, v: Array, kept: Array) -> tuple[Array, Array]:
    """Logits `[total_q, N, S]` and values `[total_q, S, N, V]`, of which pairs not `kept [total_q, S]` pass nothing."""
    return x, v


_taken_back.defvjp(
    lambda x, v, kept: ((x, v), kept),
    lambda kept, pulled: (
        jnp.where(kept[:, None, :], pulled[0], 0),
        jnp.where(kept[:, :, None, None], pulled[1], 0),
        None,
    ),
)


def packed(name: str, steps: PackedSteps = PackedSteps()) -> Implementation:
    """The packed kernel made of `steps` as the gate takes it."""
    return Implementation(
        name=name, call=packed_by(steps), storage="packed", empty_rows="zero", refuses_by_signature=True
    )
