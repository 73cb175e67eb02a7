"""A correct plain kernel in replaceable steps, and bugs planted by replacing one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from conformance import declare
from tests.kernels.naive import allowed_pairs

Step = Callable[..., Any]


def _keep(*operands: Any) -> Any:
    return operands if len(operands) > 1 else operands[0]


def _expand(x: jax.Array, group: int) -> jax.Array:
    return jnp.repeat(x, group, axis=2)


def _cap(x: jax.Array, soft_cap: float) -> jax.Array:
    return soft_cap * jnp.tanh(x / soft_cap)


def _with_sink(total: jax.Array, sinks: jax.Array, m: jax.Array) -> jax.Array:
    return total + jnp.exp(sinks[:, None, None] - m)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps that a bug may replace; the defaults are correct."""

    operands: Step = _keep  # (q, k, v) before anything
    expand_k: Step = _expand  # k for each query head
    scale: Step = _keep  # the scale
    logits: Step = _keep  # scaled logits
    cap: Step = _cap  # soft cap
    window: Step = _keep  # (left, right)
    segment_ids: Step = _keep  # (q, kv)
    with_sink: Step = _with_sink  # denominator with the sink


def kernel(steps: Steps) -> Callable[..., Any]:
    """The attention function made of `steps`."""

    @declare(behind_mask="finite")
    def attention(
        q,
        k,
        v,
        *,
        causal=False,
        window=None,
        mask=None,
        segment_ids=None,
        soft_cap=None,
        sinks=None,
        bias=None,
        scale=None,
        save_residuals=False,
    ):
        q, k, v = steps.operands(q, k, v)
        dtype, group = q.dtype, q.shape[2] // k.shape[2]
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = steps.expand_k(k, group), _expand(v, group)
        scale = steps.scale(q.shape[-1] ** -0.5 if scale is None else scale)
        z = scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest", preferred_element_type=jnp.float32)
        z = steps.logits(z if bias is None else z + bias)
        if soft_cap is not None:
            z = steps.cap(z, soft_cap)
        window = None if window is None else steps.window(*window)
        segment_ids = None if segment_ids is None else steps.segment_ids(*segment_ids)
        ok = allowed_pairs(q, k, causal, window, mask, segment_ids)
        z = jnp.where(ok, z, -1e30)
        m = z.max(axis=-1, keepdims=True)
        if sinks is not None:
            m = jnp.maximum(m, sinks[:, None, None])
        m = jax.lax.stop_gradient(m)
        e = jnp.where(ok, jnp.exp(z - m), 0)
        total = e.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = steps.with_sink(total, sinks, m)
        total = jnp.where(total == 0, 1, total)
        p = (e / total).astype(dtype)
        out = jnp.einsum("bnts,bsnv->btnv", p, v, precision="highest", preferred_element_type=jnp.float32)
        out = out.astype(dtype)
        if not save_residuals:
            return out
        top = jnp.where(ok, z, -jnp.inf).max(axis=-1)
        return out, {"logsumexp": (m + jnp.log(total))[..., 0], "max_logits": top}

    return attention


def _stop(x: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(x)


def _gradient_off_by(operand: int, relative: float) -> Step:
    """The operand's value is untouched, its gradient is `1 + relative` times what it should be."""

    def operands(*xs: jax.Array) -> tuple[jax.Array, ...]:
        changed = list(xs)
        x = xs[operand]
        changed[operand] = x + (relative * (x.astype(jnp.float32) - _stop(x).astype(jnp.float32))).astype(x.dtype)
        return tuple(changed)

    return operands


def _first_head_only(k: jax.Array, group: int) -> jax.Array:
    """The values of a repeat, but only the first head of each group hands its gradient back."""
    first = jnp.arange(k.shape[2] * group)[:, None] % group == 0
    return jnp.where(first, _expand(k, group), _stop(_expand(k, group)))


def _q_ids_for_both(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return q_ids, jax.vmap(lambda row: jnp.resize(row, kv_ids.shape[1:]))(q_ids)


SENSITIVITY: dict[str, Steps] = {
    "scale wrong by 0.1%": Steps(scale=lambda scale: scale * 1.001),
    "logits rounded to bf16": Steps(logits=lambda z: jax.lax.reduce_precision(z, 8, 7)),
    "window off by one": Steps(window=lambda left, right: (left + 1, right)),
    "soft-cap derivative missing": Steps(cap=lambda x, cap: x + _stop(_cap(x, cap) - x)),
    "sinks left out of the denominator": Steps(with_sink=lambda total, sinks, m: total),
    "dk not summed over the group": Steps(expand_k=_first_head_only),
    "segment ids of q used for kv": Steps(segment_ids=_q_ids_for_both),
    "dq off by 1e-4": Steps(operands=_gradient_off_by(0, 1e-4)),
    "dk off by 1e-4": Steps(operands=_gradient_off_by(1, 1e-4)),
    "dv off by 1e-4": Steps(operands=_gradient_off_by(2, 1e-4)),
}
"""Small errors that the quick grid must see, by what they are."""
