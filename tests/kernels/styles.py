"""Correct attention functions in the styles that users write, each with honest declarations.

A failure of one of them is a false alarm of the gate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare
from tests.kernels import low_precision_attention
from tests.kernels.low_precision_attention import Roundings, round_to_nearest
from tests.kernels.naive import build_mask

_F32 = jnp.float32
_LARGE = -1e30
_BLOCK = 64
_einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=_F32)


def _get_scale(q: Any, scale: Any) -> Any:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _cast_to_f32(*operands: Any) -> Any:
    return tuple(x.astype(_F32) for x in operands)


@declare(behind_mask="finite")
def einsum(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, scale: Any = None) -> Any:
    """Compute two einsums around `jax.nn.softmax`, grouping heads by a reshape of q, with `-inf` as mask."""
    batch, length, heads, depth = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, depth)
    logits = _einsum("btkgh,bskh->bkgts", grouped, k).reshape(batch, heads, length, -1) * _get_scale(q, scale)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        # A row of -inf only would be NaN, in the gradients too. It sees everything instead; its result is not used.
        logits = jnp.where(mask | ~mask.any(axis=-1, keepdims=True), logits, -jnp.inf)
    p = jax.nn.softmax(logits, axis=-1).astype(q.dtype).reshape(batch, kv_heads, -1, length, k.shape[1])
    return _einsum("bkgts,bskv->btkgv", p, v).reshape(batch, length, heads, -1).astype(q.dtype)


@declare(behind_mask="finite", empty_rows="mean")
def large_negative(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, segment_ids: Any = None) -> Any:
    """Compute with `-1e30` as mask: a row that sees nothing gets the mean of v."""
    wide = _cast_to_f32(q, k, v)
    ok = build_mask(q, k, causal, None, mask, segment_ids)
    k32, v32 = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in wide[1:])
    logits = jnp.where(ok, _einsum("btnh,bsnh->bnts", wide[0], k32) * _get_scale(q, None), _LARGE)
    return _einsum("bnts,bsnv->btnv", jax.nn.softmax(logits, axis=-1), v32).astype(q.dtype)


@declare(behind_mask="finite")
def vmap_heads(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, soft_cap: Any = None) -> Any:
    """Compute one head, mapped over groups, heads and batch rows by `vmap`."""
    ok = build_mask(q, k, causal, window, None, None)[0, 0]
    # A row without a key sees all keys; its result is not used.
    ok = ok | ~ok.any(axis=-1, keepdims=True)

    def head(q: Any, k: Any, v: Any) -> Any:  # [T, H], [S, H], [S, V]
        logits = _einsum("th,sh->ts", q, k) * _get_scale(q, None)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        return _einsum("ts,sv->tv", jax.nn.softmax(jnp.where(ok, logits, -jnp.inf), axis=-1), v)

    group = jax.vmap(head, in_axes=(1, None, None), out_axes=1)  # query heads that read one head
    heads = jax.vmap(group, in_axes=(1, 1, 1), out_axes=1)
    q32, k32, v32 = _cast_to_f32(q, k, v)
    grouped = q32.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    return jax.vmap(heads)(grouped, k32, v32).reshape(*q.shape[:3], -1).astype(q.dtype)


# The gradient of JAX's softmax divides by the square of the sum of weights. From a sum of 256 on, the square overflows
# f16 and the quotient is zero. So the gradients of a row that weighs many keys equally are wrong.
_F16 = {"f16": "JAX's softmax has no right gradients in f16 where hundreds of keys weigh alike"}


@declare(behind_mask="finite", softmax="input", group_sums="input", unsupported=_F16)
def repeat_in_operands_dtype(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, soft_cap: Any = None
) -> Any:
    """Compute with repeated k and v, and logits and softmax in the operands' dtype."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    if bias is not None:
        logits = logits + bias.astype(q.dtype)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(q.dtype).min)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(logits, axis=-1), v, precision="highest")


@declare(behind_mask="finite", group_sums="input")
def repeat(q: Any, k: Any, v: Any, *, mask: Any = None, soft_cap: Any = None, scale: Any = None) -> Any:
    """Compute with k and v repeated in the operands' dtype, and softmax in f32."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = _einsum("btnh,bsnh->bnts", q, k) * _get_scale(q, scale)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    p = jax.nn.softmax(logits if mask is None else jnp.where(mask, logits, _LARGE), axis=-1)
    return _einsum("bnts,bsnv->btnv", p.astype(q.dtype), v).astype(q.dtype)


@declare(behind_mask="finite", logits="input", group_sums="input")
def broadcast(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, segment_ids: Any = None) -> Any:
    """Compute with k and v broadcast over the group, rounded logits, and softmax in f32."""
    group = q.shape[2] // k.shape[2]
    k, v = (
        jnp.broadcast_to(x[:, :, :, None], (*x.shape[:3], group, x.shape[3])).reshape(*x.shape[:2], -1, x.shape[3])
        for x in (k, v)
    )
    logits = _einsum("btnh,bsnh->bnts", q, k) * _get_scale(q, None)
    logits = logits.astype(q.dtype).astype(_F32)
    ok = build_mask(q, k, causal, None, mask, segment_ids)
    p = jax.nn.softmax(jnp.where(ok, logits, _LARGE), axis=-1)
    return _einsum("bnts,bsnv->btnv", p.astype(q.dtype), v).astype(q.dtype)


def _update_state(state: Any, block: Any, q: Any) -> Any:
    """Update the online softmax with a block: q `[B, T, N, H]`, k and v `[B, s, N, .]`, ok `[., ., T, s]`."""
    top, total, acc = state
    k, v, ok = block
    logits = jnp.where(ok, _einsum("btnh,bsnh->bnts", q, k) * _get_scale(q, None), -jnp.inf)
    new = jnp.maximum(top, jax.lax.stop_gradient(logits.max(axis=-1)))
    pivot = jnp.where(jnp.isfinite(new), new, 0)
    keep = jnp.where(jnp.isfinite(top), jnp.exp(top - pivot), 0)
    weights = jnp.where(ok, jnp.exp(jnp.where(ok, logits - pivot[..., None], 0)), 0)
    acc = acc * keep[..., None] + _einsum("bnts,bsnv->bntv", weights, v)
    return new, total * keep + weights.sum(axis=-1), acc


def _split_blocks(operands: Any, mask: Any, size: int = _BLOCK) -> Any:
    """Pad k, v and the mask, and split them into key blocks, which come first; also return the initial state."""
    q, k, v = operands
    batch, length, heads, _ = q.shape
    keys = k.shape[1]
    pad = -keys % size
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (k, v))
    ok = jnp.ones((1, 1, 1, keys), bool) if mask is None else mask
    ok = jnp.pad(jnp.broadcast_to(ok, (*ok.shape[:2], length, keys)), ((0, 0), (0, 0), (0, 0), (0, pad)))
    k, v = (x.reshape(batch, -1, size, heads, x.shape[-1]).swapaxes(0, 1) for x in (k, v))
    ok = jnp.moveaxis(ok.reshape(*ok.shape[:3], -1, size), 3, 0)
    shape = (batch, heads, length)
    return (k, v, ok), (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1])))


def _finish(state: Any, dtype: Any) -> Any:
    _, total, acc = state
    return (acc / jnp.where(total == 0, 1, total)[..., None]).swapaxes(1, 2).astype(dtype)


@declare(behind_mask="finite", empty_rows="zero")
def scanned(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """Compute key blocks by `lax.scan`, differentiated by JAX."""
    wide = _cast_to_f32(q, k, v)
    blocks, start = _split_blocks(wide, mask)
    state, _ = jax.lax.scan(lambda state, block: (_update_state(state, block, wide[0]), None), start, blocks)
    return _finish(state, q.dtype)


@declare(behind_mask="finite", empty_rows="zero", unsupported={"train": "a loop whose length is dynamic to JAX"})
def fori(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """Compute key blocks by `lax.fori_loop`, forward only."""
    wide = _cast_to_f32(q, k, v)
    blocks, start = _split_blocks(wide, mask)

    def step(number: Any, state: Any) -> Any:
        return _update_state(
            state, jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), blocks), wide[0]
        )

    return _finish(jax.lax.fori_loop(0, jnp.asarray(blocks[0].shape[0]), step, start), q.dtype)


@declare(behind_mask="finite", empty_rows="zero")
def unrolled(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """Compute key blocks by a Python loop.

    There are at most 64 blocks, since XLA takes minutes to compile hundreds.
    """
    wide = _cast_to_f32(q, k, v)
    blocks, state = _split_blocks(wide, mask, max(_BLOCK, -(-k.shape[1] // 64)))
    for number in range(blocks[0].shape[0]):
        state = _update_state(state, jax.tree.map(lambda x, n=number: x[n], blocks), wide[0])
    return _finish(state, q.dtype)


@declare(behind_mask="finite", empty_rows="zero")
def checkpointed(q: Any, k: Any, v: Any, *, mask: Any = None) -> Any:
    """Compute key blocks by `lax.scan`, recomputed in the backward pass by `jax.checkpoint`."""
    wide = _cast_to_f32(q, k, v)
    blocks, start = _split_blocks(wide, mask)
    step = jax.checkpoint(lambda state, block: _update_state(state, block, wide[0]))
    state, _ = jax.lax.scan(lambda state, block: (step(state, block), None), start, blocks)
    return _finish(state, q.dtype)


@declare(behind_mask="finite", empty_rows="zero")
def double_where(q: Any, k: Any, v: Any, *, mask: Any = None, sinks: Any = None, save_residuals: bool = False) -> Any:
    """Compute all logits at once, with a `where` before and after `exp`, so that no gradient is NaN."""
    q32, k32, v32 = _cast_to_f32(q, k, v)
    k32, v32 = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k32, v32))
    ok = build_mask(q, k, False, None, mask, None)
    logits = _einsum("btnh,bsnh->bnts", q32, k32) * _get_scale(q, None)
    top = jax.lax.stop_gradient(jnp.where(ok, logits, -jnp.inf).max(axis=-1))
    pivot = top if sinks is None else jnp.maximum(top, jax.lax.stop_gradient(sinks)[:, None])
    pivot = jnp.where(jnp.isfinite(pivot), pivot, 0)
    weights = jnp.where(ok, jnp.exp(jnp.where(ok, logits - pivot[..., None], 0)), 0)
    total = weights.sum(axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks[:, None] - pivot)
    safe = jnp.where(total == 0, 1, total)
    out = _einsum("bnts,bsnv->btnv", weights / safe[..., None], v32).astype(q.dtype)
    if not save_residuals:
        return out
    lse = jnp.where(total == 0, -jnp.inf, pivot + jnp.log(safe))
    return out, {"logsumexp": lse, "max_logits": jnp.where(ok, logits, -jnp.inf).max(axis=-1)}


def _compute_probabilities(q: Any, k: Any, ok: Any) -> tuple[Any, Any]:
    """Return probabilities `[B, N, T, S]`, zero in rows that see nothing, and logsumexp."""
    logits = jnp.where(ok, _einsum("btnh,bsnh->bnts", q, k) * _get_scale(q, None), -jnp.inf)
    top = logits.max(axis=-1, keepdims=True)
    pivot = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.where(ok, jnp.exp(logits - pivot), 0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total), (pivot + jnp.log(total))[..., 0]


def _repeat_heads(x: Any, heads: int) -> Any:
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def _build_custom_vjp(flash: bool) -> Callable[..., Any]:
    """Build attention with a custom backward pass, from `logsumexp` (flash) or from saved probabilities."""

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, ok: Any) -> Any:
        return save(q, k, v, ok)[0]

    def save(q: Any, k: Any, v: Any, ok: Any) -> Any:
        heads = q.shape[2]
        p, lse = _compute_probabilities(q.astype(_F32), _repeat_heads(k.astype(_F32), heads), ok)
        out = _einsum("bnts,bsnv->btnv", p.astype(v.dtype), _repeat_heads(v, heads)).astype(q.dtype)
        return out, (q, k, v, ok, out, lse) if flash else (q, k, v, ok, p)

    def pull_back(saved: Any, do: Any) -> Any:
        q, k, v, ok = saved[:4]
        heads = q.shape[2]
        q32, k32, v32, do32 = (
            q.astype(_F32),
            _repeat_heads(k, heads).astype(_F32),
            _repeat_heads(v, heads).astype(_F32),
            do.astype(_F32),
        )
        dp = _einsum("btnv,bsnv->bnts", do32, v32)
        if flash:
            out, lse = saved[4:]
            logits = _einsum("btnh,bsnh->bnts", q32, k32) * _get_scale(q, None)
            p = jnp.where(ok, jnp.exp(jnp.where(ok, logits - lse[..., None], 0)), 0)
            d = (out.astype(_F32) * do32).sum(axis=-1).swapaxes(1, 2)[..., None]
        else:
            p = saved[4]
            d = (p * dp).sum(axis=-1, keepdims=True)
        dx = p * (dp - d) * _get_scale(q, None)
        dq = _einsum("bnts,bsnh->btnh", dx, k32)
        dk, dv = _einsum("bnts,btnh->bsnh", dx, q32), _einsum("bnts,btnv->bsnv", p, do32)
        dk, dv = (x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1]).sum(axis=3) for x in (dk, dv))
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None

    attend.defvjp(save, pull_back)
    return attend


_FLASH, _PLAIN = _build_custom_vjp(flash=True), _build_custom_vjp(flash=False)


@declare(behind_mask="finite", empty_rows="zero")
def custom_vjp_flash(q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, mask: Any = None) -> Any:
    """Compute with a custom backward pass from the saved `out` and `logsumexp`."""
    return _FLASH(q, k, v, build_mask(q, k, causal, window, mask, None))


@declare(behind_mask="finite", empty_rows="zero")
def custom_vjp_probabilities(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None) -> Any:
    """Compute with a custom backward pass from the saved probabilities."""
    return _PLAIN(q, k, v, build_mask(q, k, causal, None, mask, None))


_IN_OPERANDS_DTYPE = low_precision_attention.build_kernel(
    Roundings(accumulator=round_to_nearest, dq_sum=round_to_nearest, group_sum=round_to_nearest),
)


@declare(behind_mask="finite", block_sums=low_precision_attention.BLOCK, group_sums="input")
def sums_in_operands_dtype(q: Any, k: Any, v: Any) -> Any:
    """Compute with sums over blocks and group heads in the operands' dtype, and a custom backward pass."""
    return _IN_OPERANDS_DTYPE(q, k, v)


@declare(behind_mask="finite", block_sums=_BLOCK)
def mapped_queries(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """Compute query blocks by `lax.map`.

    JAX sums dk and dv from the last block to the first, in the operands' dtype.
    """
    batch, length, heads, depth = q.shape
    rows = jnp.pad(q, ((0, 0), (0, -length % _BLOCK), (0, 0), (0, 0)))
    rows = rows.reshape(batch, -1, _BLOCK, k.shape[2], heads // k.shape[2], depth).swapaxes(0, 1)

    def block(numbered: tuple[Any, Any]) -> Any:
        number, q = numbered
        logits = _einsum("btkgh,bskh->bkgts", q, k) * _get_scale(q, None)
        if causal:
            i = number * _BLOCK + jnp.arange(_BLOCK)[:, None]
            logits = jnp.where(jnp.arange(k.shape[1]) <= i, logits, -jnp.inf)
        return _einsum("bkgts,bskv->btkgv", jax.nn.softmax(logits, axis=-1).astype(q.dtype), v)

    out = jax.lax.map(block, (jnp.arange(len(rows)), rows)).swapaxes(0, 1)  # [B, blocks, t, K, G, V]
    return out.reshape(batch, -1, heads, v.shape[-1])[:, :length].astype(q.dtype)


STYLES = (
    einsum,
    large_negative,
    vmap_heads,
    repeat_in_operands_dtype,
    repeat,
    broadcast,
    scanned,
    fori,
    unrolled,
    checkpointed,
    double_where,
    custom_vjp_flash,
    custom_vjp_probabilities,
    sums_in_operands_dtype,
    mapped_queries,
)
"""All styles."""
