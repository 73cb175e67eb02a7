"""A batch-invariant kernel in replaceable steps: each query by itself, over blocks of keys that begin with key 0.

No shape inside depends on how many sequences, queries or keys a call has, so the bits of a result do not either. Blocks
behind the last visible key leave the running maximum and sums as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cases.case import Case
from conformance import declare
from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug

Array = Any
Step = Callable[..., Any]
_NEVER = -1e30


class Call(NamedTuple):
    """The sizes of one call, which are known before tracing."""

    sequences: int
    queries: int  # of all sequences, padding included
    keys: int  # of the longest sequence, padding included
    prefix: int  # keys before the first query


class Parts(NamedTuple):
    """Running maximum and sum `[K, G]`, and the weighted values `[K, G, V]`."""

    top: Array
    total: Array
    acc: Array


def _top(z: Array, allowed: Array) -> Array:
    return jnp.where(allowed, z, _NEVER).max(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvariantSteps:
    """The steps that a bug may replace; the defaults are correct."""

    splits: Step = lambda call: 1  # call -> into how many parts the blocks of keys are split
    block: Step = lambda call: 16  # call -> keys of a block
    cut: Step = lambda call: 0  # call -> the key at which the keys are cut in two, 0 for nowhere
    top: Step = _top  # (z, allowed) -> the maximum of a block
    order: Step = lambda pages, there: jnp.arange(len(pages))  # the order in which the pages of a sequence are added


def _add_block(steps: InvariantSteps, q: Array, parts: Parts, block: tuple[Array, Array, Array]) -> tuple[Parts, None]:
    k, v, allowed = block  # [L, K, H], [L, K, V], [L]
    z = jnp.einsum("kgh,lkh->kgl", q, k, precision="highest")
    top = jnp.maximum(parts.top, steps.top(z, allowed))
    weights = jnp.where(allowed, jnp.exp(z - top[..., None]), 0)
    kept = jnp.exp(parts.top - top)
    acc = parts.acc * kept[..., None] + jnp.einsum("kgl,lkv->kgv", weights, v, precision="highest")
    return Parts(top, parts.total * kept + weights.sum(axis=-1), acc), None


def _merge(one: Parts, other: Parts) -> Parts:
    top = jnp.maximum(one.top, other.top)
    a, b = jnp.exp(one.top - top), jnp.exp(other.top - top)
    acc = one.acc * a[..., None] + other.acc * b[..., None]
    return Parts(top, one.total * a + other.total * b, acc)


def _attend_range(steps: InvariantSteps, call: Call, q: Array, k: Array, v: Array, allowed: Array) -> Parts:
    """Attend to keys `[S, K, H]` in blocks, the blocks in splits."""
    length = steps.block(call)
    splits = steps.splits(call)
    pad = -len(k) % (length * splits)

    def in_blocks(x: Array) -> Array:
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(splits, -1, length, *x.shape[1:])

    rows = q.shape[:2]
    empty = Parts(jnp.full(rows, _NEVER), jnp.zeros(rows), jnp.zeros((*rows, v.shape[-1])))
    blocks = tuple(map(in_blocks, (k, v, allowed)))
    parts = [
        jax.lax.scan(functools.partial(_add_block, steps, q), empty, tuple(x[n] for x in blocks))[0]
        for n in range(splits)
    ]
    return functools.reduce(_merge, parts)


def attend(steps: InvariantSteps, call: Call, q: Array, k: Array, v: Array, allowed: Array) -> tuple[Array, Array]:
    """Return `out [N, V]` and `logsumexp [N]` of one scaled query `[N, H]`."""
    heads = k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q.reshape(heads, -1, q.shape[-1]), k, v))
    cut = steps.cut(call)
    ranges = [slice(0, cut), slice(cut, None)] if cut else [slice(None)]
    parts = functools.reduce(_merge, [_attend_range(steps, call, q, k[one], v[one], allowed[one]) for one in ranges])
    total = jnp.where(parts.total == 0, 1, parts.total)
    lse = jnp.where(parts.total == 0, -jnp.inf, parts.top + jnp.log(total))
    return (parts.acc / total[..., None]).reshape(-1, v.shape[-1]), lse.reshape(-1)


def dense(name: str, steps: InvariantSteps = InvariantSteps()) -> Implementation:
    """The kernel of dense operands, as the gate takes it."""

    @declare(batch_invariant=True, causal="end", behind_mask="finite", empty_rows="zero", gradients=())
    def attention(
        q: Array, k: Array, v: Array, *, causal: bool = False, kv_lengths: Array = None, save_residuals: bool = False
    ) -> Any:
        batch, q_length, _, depth = q.shape
        kv_length = k.shape[1]
        call = Call(batch, batch * q_length, kv_length, kv_length - q_length)
        lengths = jnp.full(batch, kv_length) if kv_lengths is None else kv_lengths
        j = jnp.arange(kv_length)

        def attend_row(row: Any) -> Any:
            q, k, v, length = row

            def attend_query(query: Any) -> Any:
                q, i = query
                allowed = (j < length) & ((j <= i + call.prefix) | (not causal))
                return attend(steps, call, q, k, v, allowed)

            return jax.lax.map(attend_query, (q.astype(jnp.float32) * depth**-0.5, jnp.arange(q_length)))

        out, lse = jax.lax.map(attend_row, (q, k, v, lengths))
        out = out.astype(q.dtype)
        return (out, {"logsumexp": lse.transpose(0, 2, 1)}) if save_residuals else out

    return build_implementation(attention, name)


def paged(name: str, steps: InvariantSteps = InvariantSteps()) -> Implementation:
    """The kernel of pages, as the gate takes it."""

    @declare(batch_invariant=True, behind_mask="finite", empty_rows="zero")
    def attention(
        q: Array, k_pages: Array, v_pages: Array, *, kv_lens: Array, page_indices: Array, cu_q_lens: Array,
        num_seqs: Array, save_residuals: bool = False,
    ) -> Any:  # fmt: skip
        size, rows = k_pages.shape[1], len(kv_lens)
        call = Call(rows, len(q), page_indices.shape[1] * size, 0)
        ends = jnp.where(jnp.arange(rows) < num_seqs[0], cu_q_lens[1:], len(q) + 1)
        j = jnp.arange(call.keys)

        def attend_query(query: Any) -> Any:
            q, token = query
            row = jnp.minimum((token >= ends).sum(), rows - 1)
            length = jnp.where(token < cu_q_lens[num_seqs[0]], kv_lens[row], 0)
            allowed = j <= length - cu_q_lens[row + 1] + token
            pages = jnp.clip(page_indices[row], 0, len(k_pages) - 1)
            order = steps.order(pages, jnp.arange(len(pages)) * size < length)
            k, v = (x[pages[order]].reshape(-1, *x.shape[2:]) for x in (k_pages, v_pages))
            allowed = (allowed & (j < length)).reshape(-1, size)[order].ravel()
            return attend(steps, call, q, k, v, allowed)

        out, lse = jax.lax.map(attend_query, (q.astype(jnp.float32) * q.shape[-1] ** -0.5, jnp.arange(len(q))))
        out = out.astype(q.dtype)
        return (out, {"logsumexp": lse}) if save_residuals else out

    return build_implementation(attention, name)


def planted(
    name: str,
    steps: InvariantSteps,
    *,
    kind: str,
    reference: str,
    says: str,
    build: Callable[[str, InvariantSteps], Implementation] = dense,
    trigger: Callable[[Case], bool] = lambda case: case.batch > 1,
) -> PlantedBug:
    """The bug that replacing these steps plants."""
    return PlantedBug(
        name=name,
        family="batch invariance",
        kind=kind,
        reference=reference,
        shows=("out", "logsumexp"),
        build=functools.partial(build, name, steps),
        trigger=trigger,
        says=says,
    )
