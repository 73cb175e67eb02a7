"""Correct attention that returns the largest logit of each head and the weights, in replaceable steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from conformance import declare
from conformance.execution.plain_functions import build_implementation
from impls.contract.implementation import Implementation
from tests.kernels import naive


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a call knows of its rows when it returns further results."""

    x: Float[Array, "B N T S"]  # logits before the soft cap, not masked
    z: Float[Array, "B N T S"]  # logits after the soft cap, not masked
    allowed: Bool[Array, "B N T S"]
    top: Float[Array, "B N T"]  # the largest logit of each row
    sinks: Float[Array, " N"] | None
    exponentials: Float[Array, "B N T S"]  # exp(z - m), 0 at hidden pairs
    p: Float[Array, "B N T S"]  # weights before dropout
    kept: Bool[Array, "B N T S"] | None  # the weights that dropout keeps
    rate: float
    dtype: Any
    group: int

    @property
    def dropped(self) -> Float[Array, "B N T S"]:
        """The weights after dropout."""
        return self.p if self.kept is None else jnp.where(self.kept, self.p / (1 - self.rate), 0)


def find_head_maximum(rows: Rows) -> Float[Array, " N"]:
    """Return the largest logit of each head, over all rows and allowed keys."""
    return rows.top.max(axis=(0, 2))


@dataclasses.dataclass(frozen=True)
class Results:
    """The steps that compute the further results, each a function of the rows."""

    head_max_logits: Callable[[Rows], Any] = find_head_maximum
    weights: Callable[[Rows], Any] = lambda rows: rows.p
    dropped_weights: Callable[[Rows], Any] = lambda rows: rows.dropped


def build_kernel(results: Results) -> Callable[..., Any]:
    """Return the attention function with these steps."""

    @declare(behind_mask="finite", empty_rows="zero")
    def attention(
        q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        window: Any = None,
        mask: Any = None,
        segment_ids: Any = None,
        soft_cap: Any = None,
        sinks: Any = None,
        bias: Any = None,
        scale: Any = None,
        dropout_rate: Any = None,
        dropout_key: Any = None,
        save_residuals: bool = False,
    ) -> Any:
        dtype, group = q.dtype, q.shape[2] // k.shape[2]
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
        x = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * (q.shape[-1] ** -0.5 if scale is None else scale)
        x = x if bias is None else x + bias
        z = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
        allowed = jnp.broadcast_to(naive.build_mask(q, k, causal, window, mask, segment_ids), z.shape)
        top = jax.lax.stop_gradient(jnp.where(allowed, z, -jnp.inf).max(axis=-1))
        m = top if sinks is None else jnp.maximum(top, jax.lax.stop_gradient(sinks)[:, None])
        m = jnp.where(jnp.isinf(m), 0, m)
        exponentials = jnp.where(allowed, jnp.exp(jnp.where(allowed, z, 0) - m[..., None]), 0)
        total = exponentials.sum(axis=-1) + (0 if sinks is None else jnp.exp(sinks[:, None] - m))
        total = jnp.where(total == 0, 1, total)
        kept = None
        if dropout_rate:
            key = jax.random.wrap_key_data(dropout_key, impl="threefry2x32")
            kept = jax.random.bernoulli(key, 1 - dropout_rate, z.shape)
        p = exponentials / total[..., None]
        rows = Rows(x, z, allowed, top, sinks, exponentials, p, kept, dropout_rate or 0.0, dtype, group)
        out = jnp.einsum("bnts,bsnv->btnv", rows.dropped.astype(dtype).astype(jnp.float32), v, precision="highest")
        if not save_residuals:
            return out.astype(dtype)
        return out.astype(dtype), {name: step(rows) for name, step in vars(results).items()}

    return attention


def build(name: str, results: Results) -> Implementation:
    """Return the kernel with these steps as an implementation."""
    return build_implementation(build_kernel(results), name)
