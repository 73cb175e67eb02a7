"""Calls that write pages with scales, in two styles, made of steps that a planted bug replaces one of.

`by_scatter` quantises all new tokens at once, scatters them and applies scales to logits and results. `by_token` writes
token after token, multiplies by reciprocals and reads pages that it dequantises first. Both take given scales, and
compute those that each token and head has of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cases.case import Case
from cases.storage_forms.paged_form import COMPUTED_FEATURES, WRITTEN_FEATURES
from impls.contract.implementation import Implementation
from tests.kernels import serving_attention
from tests.planted.planting.page_writes import WriteSteps, writing_by
from tests.planted.planting.served import PagedSteps, cap_logits, paged

Array = jax.Array
Step = Callable[..., Any]
Pair = tuple[Any, Any]


def get_largest(dtype: Any) -> float:
    """Return the largest number of a stored dtype."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def round_and_clip(x: Array, dtype: Any) -> Array:
    """Clip to the range of a stored dtype and round to its nearest number."""
    largest = get_largest(dtype)
    return jnp.clip(jnp.round(x) if dtype == jnp.int8 else x, -largest, largest).astype(dtype)


def compute_scales(peaks: Array, dtype: Any) -> Array:
    """Compute the scales of tokens from their peaks; 1 for a token that is zero."""
    return jnp.where(peaks == 0, 1.0, peaks / get_largest(dtype))


def _divide(x: Array, scale: Any) -> Array:
    return x.astype(jnp.float32) / scale


def _multiply(x: Array, scale: Any) -> Array:
    """Multiply by the reciprocal; if that is one for all, in the dtype of x, as kernels do that stay in it."""
    dtype = x.dtype if jnp.ndim(scale) == 0 else jnp.float32
    return (x.astype(dtype) * jnp.asarray(1 / scale, dtype)).astype(jnp.float32)


def _write(pool: Array, x: Array, page: Array, row: Array) -> Array:
    return pool.at[page, row].set(x, mode="drop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledSteps:
    """Steps of writing and reading by scales, in order; the defaults are correct."""

    to_write: Step = lambda k_scale, v_scale: (k_scale, v_scale)  # given scales
    peaks: Step = lambda x: jnp.abs(x.astype(jnp.float32)).max(axis=-1)  # [tokens, K]
    computed: Step = compute_scales  # (peaks, dtype)
    quotient: Step | None = None  # (x, scale); by default a division, or by token a product with the reciprocal
    stored: Step = round_and_clip  # (x, dtype)
    written: Step = lambda stored, before, at: stored  # what is put where `before` was, by token
    after: Step = lambda pool, page, row: pool  # what else is done to a pool, given where tokens went
    write_scales: Step = _write  # (pool, scales, page, row)
    attended: Step = lambda pool, raw: pool  # raw is the pool with what was given, in stored units in f32
    to_read: Step = lambda k_scale, v_scale: (k_scale, v_scale)  # given scales
    scales_to_read: Step = lambda before, after: after  # pairs of pools of scales
    scales_returned: Step = lambda before, after: after
    # Of queries in fp8: what multiplies them, what multiplies capped logits, and the dtype of `out`.
    to_queries: Step = lambda q_scale: q_scale
    to_capped: Step = lambda q_scale: 1.0
    out_dtype: Step = lambda dtype: dtype
    updates: Step = lambda update_kv_cache: update_kv_cache
    logsumexp: Step = lambda lse, update_kv_cache: lse  # by scatter


def _quantize(
    steps: ScaledSteps, default: Step, tokens: Pair, dtype: Any, given: Pair, *, computes: bool
) -> tuple[list[Array], list[Any]]:
    """Return the tokens in stored units in f32, not yet rounded, and the scales by which these were divided."""
    if computes:
        scales: list[Any] = [steps.computed(steps.peaks(x), dtype) for x in tokens]
        wide = [x[..., None] for x in scales]
    else:
        scales = wide = [float(x) for x in steps.to_write(*given)]
    return [(steps.quotient or default)(x, scale) for x, scale in zip(tokens, wide, strict=True)], scales


def _widen(q: Array, out_dtype: Any) -> Array:
    return q.astype(jnp.bfloat16 if out_dtype is None else out_dtype)


def by_scatter(steps: ScaledSteps) -> Callable[..., Any]:
    """Build the call that scatters all tokens at once."""

    def attention(
        q: Array,
        k: Array,
        v: Array,
        k_pages: Array,
        v_pages: Array,
        *,
        k_scales: Array | None = None,
        v_scales: Array | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        q_scale: float | None = None,
        out_dtype: Any = None,
        update_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        factor, updates = 1.0, steps.updates(update_kv_cache)
        if q_scale is not None:
            q, factor = _widen(q, out_dtype), steps.to_capped(q_scale)
            scale = options.get("scale")
            options["scale"] = (q.shape[-1] ** -0.5 if scale is None else scale) * steps.to_queries(q_scale)
        computes, dtype, given = k_scales is not None, k_pages.dtype, (k_scale, v_scale)
        quotients, scales = _quantize(steps, _divide, (k, v), dtype, given, computes=computes)
        old_scales, new_scales = (k_scales, v_scales), []
        raw: list[Array] = []

        def write(pool: Array, x: Array, page: Array, row: Array) -> Array:
            n = len(raw)
            page = page if updates else jnp.full_like(page, len(pool))
            raw.append(_write(pool.astype(jnp.float32), quotients[n], page, row))
            if computes:
                new_scales.append(steps.write_scales(old_scales[n], scales[n], page, row))
            put = steps.written(x, pool.at[page, row].get(mode="clip"), (page, row))
            return steps.after(_write(pool, put, page, row), page, row)

        def attend(before: Pair, after: Pair) -> list[Any]:
            return [steps.attended(pool, wide) for pool, wide in zip(after, raw, strict=True)]

        def get_returned(before: Pair, after: Pair) -> tuple[Any, ...]:
            return (*after, *(steps.scales_returned(old_scales, new_scales) if computes else ()))

        if computes:
            options |= {"k_scales": k_scales, "v_scales": v_scales}
        else:
            options |= dict(zip(("k_scale", "v_scale"), steps.to_read(*given), strict=True))
        call = writing_by(
            WriteSteps(write=write, attended=attend, returned=get_returned),
            PagedSteps(
                scales=lambda *_: steps.scales_to_read(old_scales, new_scales),
                cap=lambda x, allowed, call: cap_logits(x, allowed, call) * factor,
                output=lambda out, call: out if q_scale is None else out.astype(steps.out_dtype(q.dtype)),
                logsumexp=lambda lse, allowed: steps.logsumexp(lse, update_kv_cache),
            ),
        )
        return call(q, *(steps.stored(x, dtype) for x in quotients), k_pages, v_pages, **options)

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
        k_scales: Array | None = None,
        v_scales: Array | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        q_scale: float | None = None,
        out_dtype: Any = None,
        update_kv_cache: bool = True,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: Array,
        save_residuals: bool = False,
        **options: Any,
    ) -> Any:
        if q_scale is not None:
            q = _widen(q, out_dtype) * jnp.asarray(steps.to_queries(q_scale), _widen(q, out_dtype).dtype)
        end = jnp.where(steps.updates(update_kv_cache), cu_q_lens[num_seqs[0]], 0)
        sequence, place = serving_attention._locate_tokens(q, cu_q_lens, num_seqs)
        computes, dtype, size = k_scales is not None, k_pages.dtype, k_pages.shape[1]
        quotients, scales = _quantize(steps, _multiply, (k, v), dtype, (k_scale, v_scale), computes=computes)

        def locate(token: Array) -> Pair:
            b = sequence[token]
            j = kv_lens[b] - cu_q_lens[b + 1] + cu_q_lens[b] + place[token]
            return page_indices[b, j // size], j % size

        def put_tokens(pool: Array, given: Array, put: Step) -> Array:
            def put_one(token: Array, pool: Array) -> Array:
                return put(pool, given[token], *locate(token))

            return jax.lax.fori_loop(0, end, put_one, pool)

        def store(pool: Array, x: Array, page: Array, row: Array) -> Array:
            return pool.at[page, row].set(steps.written(steps.stored(x, dtype), pool[page, row], (page, row)))

        tokens = jnp.arange(len(q))
        page, row = jax.vmap(locate)(tokens)
        page = jnp.where(tokens < end, page, len(k_pages))
        old_scales: Pair = (k_scales, v_scales)
        after, new_scales = [], []
        for n, pool in enumerate((k_pages, v_pages)):
            after.append(steps.after(put_tokens(pool, quotients[n], store), page, row))
            if computes:
                new_scales.append(put_tokens(old_scales[n], scales[n], steps.write_scales))
        raw = [put_tokens(x.astype(jnp.float32), y, _write) for x, y in zip((k_pages, v_pages), quotients, strict=True)]
        if computes:
            factors = [x[..., None] for x in steps.scales_to_read(old_scales, new_scales)]
        else:
            factors = steps.to_read(k_scale, v_scale)
        found = serving_attention.paged(
            q,
            *(
                steps.attended(pool, wide).astype(jnp.float32) * factor
                for pool, wide, factor in zip(after, raw, factors, strict=True)
            ),
            kv_lens=kv_lens,
            page_indices=page_indices,
            cu_q_lens=cu_q_lens,
            num_seqs=num_seqs,
            save_residuals=save_residuals,
            **options,
        )
        returned = steps.scales_returned(old_scales, new_scales) if computes else ()
        return (*(found if save_residuals else (found,)), *after, *returned)

    return attention


def scatter_writing(name: str, steps: ScaledSteps = ScaledSteps()) -> Implementation:
    """The call of `by_scatter` as the gate takes it."""
    return _implement(name, by_scatter(steps))


def token_writing(name: str, steps: ScaledSteps = ScaledSteps()) -> Implementation:
    """The call of `by_token` as the gate takes it."""
    return _implement(name, by_token(steps))


def _implement(name: str, call: Callable[..., Any]) -> Implementation:
    return dataclasses.replace(
        paged(name),
        call=call,
        writes_pages=True,
        offers=WRITTEN_FEATURES | COMPUTED_FEATURES | {"q_fp8"},
        supports_case=_refuse_unscaled,
    )


def _refuse_unscaled(case: Case) -> str | None:
    return None if case.kv_cache else "k_scale: pages without scales"
