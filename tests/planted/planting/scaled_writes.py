"""Calls that write pages with scales, in two styles, made of steps that a planted bug replaces one of.

`by_scatter` quantises all new tokens at once, scatters them and applies scales to logits and results. `by_token` writes
token after token, multiplies by reciprocals and reads pages that it dequantises first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.storage_forms.paged_form import WRITTEN_FEATURES
from impls.contract.implementation import Implementation
from tests.kernels import serving_attention
from tests.planted.planting.page_writes import WriteSteps, writing_by
from tests.planted.planting.served import paged

Array = jax.Array
Step = Callable[..., Any]
Pair = tuple[Any, Any]


def round_and_clip(x: Array, dtype: Any) -> Array:
    """Clip to the range of a stored dtype and round to its nearest number."""
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x), -127, 127).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def _divide(x: Array, scale: Any) -> Array:
    return x.astype(jnp.float32) / jnp.float32(scale)


def _multiply(x: Array, scale: Any) -> Array:
    """Multiply by the reciprocal, in the dtype of x, as kernels do that stay in it."""
    return (x * jnp.asarray(1 / scale, x.dtype)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledSteps:
    """Steps of writing and reading by scales, in order; the defaults are correct."""

    to_write: Step = lambda k_scale, v_scale: (k_scale, v_scale)
    quotient: Step | None = None  # (x, scale); by default a division, or by token a product with the reciprocal
    stored: Step = round_and_clip  # (x, dtype)
    written: Step = lambda stored, before, at: stored  # what is put where `before` was, by token
    after: Step = lambda pool, page, row: pool  # what else is done to a pool, given where tokens went
    attended: Step = lambda pool, raw: pool  # raw is the pool with what was given, in stored units in f32
    to_read: Step = lambda k_scale, v_scale: (k_scale, v_scale)


def by_scatter(steps: ScaledSteps) -> Callable[..., Any]:
    """Build the call that scatters all tokens at once."""

    def attention(
        q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, *, k_scale: float, v_scale: float, **options: Any
    ) -> Any:
        scales = steps.to_write(k_scale, v_scale)
        quotients = [(steps.quotient or _divide)(x, scale) for x, scale in zip((k, v), scales, strict=True)]
        tokens = [steps.stored(x, k_pages.dtype) for x in quotients]
        raw: list[Array] = []
        places: list[Pair] = []

        def write(pool: Array, x: Array, page: Array, row: Array) -> Array:
            given = quotients[len(raw)]
            raw.append(pool.astype(jnp.float32).at[page, row].set(given, mode="drop"))
            places.append((page, row))
            put = steps.written(x, pool.at[page, row].get(mode="clip"), (page, row))
            return steps.after(pool.at[page, row].set(put, mode="drop"), page, row)

        def attend(before: Pair, after: Pair) -> Pair:
            return tuple(steps.attended(pool, given) for pool, given in zip(after, raw, strict=True))  # type: ignore[return-value]

        k_read, v_read = steps.to_read(k_scale, v_scale)
        call = writing_by(WriteSteps(write=write, attended=attend))
        return call(q, *tokens, k_pages, v_pages, k_scale=k_read, v_scale=v_read, **options)

    return attention


def by_token(steps: ScaledSteps) -> Callable[..., Any]:
    """Build the call that writes token after token."""

    def attention(
        q: Array,
        k: Array,
        v: Array,
        k_pages: Array,
        v_pages: Array,
        *,
        k_scale: float,
        v_scale: float,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        save_residuals: bool = False,
        **options: Any,
    ) -> Any:
        sequence, place = serving_attention._locate_tokens(q, cu_q_lens, num_seqs)
        size = k_pages.shape[1]
        quotients = [
            (steps.quotient or _multiply)(x, scale)
            for x, scale in zip((k, v), steps.to_write(k_scale, v_scale), strict=True)
        ]

        def locate(token: Array) -> Pair:
            b = sequence[token]
            j = kv_lens[b] - cu_q_lens[b + 1] + cu_q_lens[b] + place[token]
            return page_indices[b, j // size], j % size

        def put_tokens(pool: Array, given: Array, store: Step) -> Array:
            def put(token: Array, pool: Array) -> Array:
                page, row = locate(token)
                new = steps.written(store(given[token]), pool[page, row], (page, row))
                return pool.at[page, row].set(new)

            return jax.lax.fori_loop(0, cu_q_lens[num_seqs[0]], put, pool)

        def finish(pool: Array, given: Array) -> Pair:
            dtype = pool.dtype
            wide = put_tokens(pool.astype(jnp.float32), given, lambda x: x)
            pool = put_tokens(pool, given, lambda x: steps.stored(x, dtype))
            tokens = jnp.arange(len(q))
            page, row = jax.vmap(locate)(tokens)
            page = jnp.where(tokens < cu_q_lens[num_seqs[0]], page, len(pool))
            return steps.after(pool, page, row), wide

        (k_after, k_raw), (v_after, v_raw) = (
            finish(pool, given) for pool, given in zip((k_pages, v_pages), quotients, strict=True)
        )
        k_read, v_read = steps.to_read(k_scale, v_scale)
        found = serving_attention.paged(
            q,
            steps.attended(k_after, k_raw).astype(jnp.float32) * k_read,
            steps.attended(v_after, v_raw).astype(jnp.float32) * v_read,
            kv_lens=kv_lens,
            page_indices=page_indices,
            cu_q_lens=cu_q_lens,
            num_seqs=num_seqs,
            save_residuals=save_residuals,
            **options,
        )
        return (*(found if save_residuals else (found,)), k_after, v_after)

    return attention


def _only_scaled(case: Case) -> str | None:
    return None if case.kv_cache else "k_scale: pages without scales"


def scatter_writing(name: str, steps: ScaledSteps = ScaledSteps()) -> Implementation:
    """The call of `by_scatter` as the gate takes it."""
    return _implement(name, by_scatter(steps))


def token_writing(name: str, steps: ScaledSteps = ScaledSteps()) -> Implementation:
    """The call of `by_token` as the gate takes it."""
    return _implement(name, by_token(steps))


def _implement(name: str, call: Callable[..., Any]) -> Implementation:
    return dataclasses.replace(
        paged(name), call=call, writes_pages=True, offers=WRITTEN_FEATURES, supports_case=_only_scaled
    )
