"""The steps of the blockwise kernel, each replaceable; the defaults are correct."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conformance.mutation.kernels.layout import BLOCK_KV, BLOCK_Q, FULL, PARTIAL, Call, split_heads

Step = Callable[..., Any]


class Operands(NamedTuple):
    """Arrays of the call; `allowed` is mask and segment ids together, `[b, n, T, S]`, none among gradients."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None
    allowed: jax.Array | None


class Outputs(NamedTuple):
    """Results in the caller's layout."""

    out: jax.Array
    logsumexp: jax.Array
    max_logits: jax.Array


class Running(NamedTuple):
    """Softmax so far, f32: `total` and `acc` are relative to `exp(pivot)`.

    `top` is the largest logit, kept apart from the pivot so that a wrong pivot shows only in what it spoils.
    """

    pivot: jax.Array
    total: jax.Array
    acc: jax.Array
    top: jax.Array


class Rows(NamedTuple):
    """Results by row, padded and f32, before they are stored."""

    out: jax.Array
    logsumexp: jax.Array
    max_logits: jax.Array


class Gradients(NamedTuple):
    """Gradients in the caller's layout, f32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class Blocks(NamedTuple):
    """What a scan over key blocks takes, the key block in front."""

    number: jax.Array  # [key blocks]
    k: jax.Array  # [key blocks, B, K, BLOCK_KV, H]
    v: jax.Array  # [key blocks, B, K, BLOCK_KV, V]
    bias: jax.Array | None  # [key blocks, b, k, g, t, BLOCK_KV]
    kind: jax.Array  # [key blocks, b, k, g, q tiles]
    visible: jax.Array  # [key blocks, b, k, g, T, BLOCK_KV]


@dataclasses.dataclass(frozen=True)
class Block:
    """One key block, as the steps see it."""

    call: Call
    index: jax.Array
    q: jax.Array  # all queries
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    kind: jax.Array  # [b, k, g, q tiles]
    visible: jax.Array  # [b, k, g, T, BLOCK_KV]
    do: jax.Array | None = None

    @property
    def rows(self) -> jax.Array:
        """Positions of the queries, `[T, 1]`."""
        return jnp.arange(self.q.shape[3])[:, None]

    @property
    def columns(self) -> jax.Array:
        """Positions of the keys, `[BLOCK_KV]`."""
        return self.index * BLOCK_KV + jnp.arange(BLOCK_KV)

    @property
    def kind_by_row(self) -> jax.Array:
        """Kind of the tile that each query is in, `[b, k, g, T, 1]`."""
        return jnp.repeat(self.kind, BLOCK_Q, axis=-1)[..., None]


def finite_or_zero(x: jax.Array) -> jax.Array:
    """`x` with -inf replaced by 0, so that `exp(-inf - x)` is 0."""
    return jnp.where(x == -jnp.inf, 0.0, x)


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A contraction accumulated in f32."""
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=jnp.float32)


def to_bf16(x: jax.Array) -> jax.Array:
    """f32 values rounded to bf16."""
    return lax.reduce_precision(x, 8, 7)


def keep(x: Any, *context: Any) -> Any:
    """`x` as it is."""
    return x


def classify(tiles: jax.Array) -> jax.Array:
    """Kinds of mask tiles."""
    return tiles.any(axis=(-2, -1)).astype(jnp.int32) + tiles.all(axis=(-2, -1))


def visible(allowed: jax.Array, kind: jax.Array, in_range: jax.Array) -> jax.Array:
    """Pairs that may attend."""
    return ((kind == FULL) | (allowed & (kind == PARTIAL))) & in_range


def hide(x: jax.Array, seen: jax.Array) -> jax.Array:
    """Keys or values with zeros where no query looks: what is there may be NaN, and 0 * NaN is not 0."""
    return jnp.where(seen[..., None], x, jnp.zeros((), x.dtype))


def logits(products: jax.Array, block: Block) -> tuple[jax.Array, jax.Array | float]:
    """Logits of a block, not masked, and the soft cap's derivative."""
    x = products * block.call.scale
    if block.bias is not None:
        x = x + block.bias
    if block.call.soft_cap is None:
        return x, 1.0
    bent = jnp.tanh(x / block.call.soft_cap)
    return block.call.soft_cap * bent, 1 - bent * bent


def masked(z: jax.Array, block: Block) -> jax.Array:
    """Logits with -inf where no attention is allowed."""
    return jnp.where(block.visible, z, -jnp.inf)


def add_weights(acc: jax.Array, alpha: jax.Array, weights: jax.Array, v: jax.Array, block: Block) -> jax.Array:
    """The accumulator after a block."""
    return acc * alpha[..., None] + product("bkgts,bksv->bkgtv", weights.astype(v.dtype), v)


def add_sink(state: Running, sinks: jax.Array) -> Running:
    """The state with the sink as one more term of the denominator."""
    pivot = jnp.maximum(state.pivot, sinks)
    alpha = jnp.exp(state.pivot - pivot)
    return state._replace(
        pivot=pivot, total=state.total * alpha + jnp.exp(sinks - pivot), acc=state.acc * alpha[..., None]
    )


def logsumexp(state: Running) -> jax.Array:
    """Natural logarithm of the denominator, -inf where there is none."""
    return jnp.where(state.total == 0, -jnp.inf, state.pivot + jnp.log(jnp.where(state.total == 0, 1, state.total)))


def delta(out: jax.Array, do: jax.Array, call: Call) -> jax.Array:
    """`D`, the sum of `out * do`."""
    return product("bkgtv,bkgtv->bkgt", out, do)


def dz(p: jax.Array, dp: jax.Array, delta: jax.Array, dlse: jax.Array, block: Block) -> jax.Array:
    """Gradient of the capped logits of a block."""
    return p * (dp - delta[..., None] + dlse[..., None])


def dsinks(sinks: jax.Array, lse: jax.Array, delta: jax.Array, dlse: jax.Array) -> jax.Array:
    """`[N]`, from `sinks [N, 1]` and rows `[B, N, T]`."""
    return (jnp.exp(sinks - finite_or_zero(lse)) * (dlse - delta)).sum(axis=(0, 2))


def broadcast_axes(block: Block) -> tuple[int, ...]:
    """Axes that the bias is broadcast along, of `[B, K, G, T, BLOCK_KV]`."""
    assert block.bias is not None
    return tuple(axis for axis in range(4) if block.bias.shape[axis] == 1)


def dbias(dx: jax.Array, dz: jax.Array, block: Block) -> jax.Array:
    """A block's part of the bias gradient."""
    return dx.sum(axis=broadcast_axes(block), keepdims=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSteps:
    """The steps that a bug may replace; the defaults are correct."""

    # Which keys meet which queries; blocks have the key block in front.
    count: Step = lambda call: call.kv_blocks  # key blocks visited
    key_blocks: Step = keep  # [key blocks, B, K, BLOCK_KV, H], with call
    value_blocks: Step = keep
    bias_blocks: Step = keep
    mask_tiles: Step = keep  # [key blocks, b, k, g, q tiles, BLOCK_Q, BLOCK_KV], with kinds and call
    classify: Step = classify  # kinds [key blocks, b, k, g, q tiles] of mask tiles
    kinds: Step = keep  # kinds, with call
    in_range: Step = lambda rows, columns, call: (rows < call.q_length) & (columns < call.kv_length)  # no padding
    visible: Step = visible  # pairs that may attend, of mask tiles, kinds and pairs in range
    hide_v: Step = hide
    # Running softmax.
    start: Step = keep  # the first state, with kinds of all blocks
    logits: Step = logits
    masked: Step = masked
    pivot: Step = lambda state, z, block: jnp.maximum(state.pivot, z.max(axis=-1))
    shift: Step = lambda pivot, state, block: finite_or_zero(pivot)  # of the new pivot, with the state before
    weights: Step = lambda z, shift, block: jnp.exp(z - shift[..., None])
    alpha: Step = lambda old, shift, block: jnp.exp(old - shift)
    add_total: Step = lambda total, alpha, weights, block: total * alpha + weights.sum(axis=-1)
    add_weights: Step = add_weights
    top: Step = lambda top, z, block: jnp.maximum(top, z.max(axis=-1))
    between: Step = keep  # state after a block, with sinks and block
    add_sink: Step = add_sink
    normalise: Step = lambda acc, total, call: acc / jnp.where(total == 0, 1, total)[..., None]
    logsumexp: Step = logsumexp
    store: Step = keep  # Rows, with kinds and call
    round_out: Step = lambda out, dtype: out.astype(dtype)
    undifferentiated: Step = keep  # Outputs of a call that is not differentiated
    primal: Step = keep  # Outputs of a call that is
    saved: Step = lambda out, lse, operands: (out, lse)  # what the backward gets
    # Backward.
    hide_k_again: Step = hide
    hide_v_again: Step = hide
    logits_again: Step = logits
    visible_again: Step = lambda block: block.visible
    split_do: Step = lambda x, call: split_heads(x, call)
    dlse: Step = keep
    delta: Step = delta
    probabilities: Step = lambda z, lse, block: jnp.exp(z - finite_or_zero(lse)[..., None])
    dp: Step = lambda do, v, block: product("bkgtv,bksv->bkgts", do, v)
    dz: Step = dz
    dx: Step = lambda dz, slope, z, block: jnp.where(block.visible, dz * slope, 0)
    round_dx: Step = lambda dx, dtype: dx.astype(dtype)
    add_dq: Step = lambda dq, update, block: dq + update
    dk: Step = lambda dx, q, block: product("bkgts,bkgth->bkgsh", dx, q)
    dv: Step = lambda p, do, z, block: product("bkgts,bkgtv->bkgsv", p.astype(do.dtype), do)
    group_sum: Step = lambda x: x.sum(axis=2)
    write: Step = keep  # (dk, dv) of a block, with block
    scale_dq: Step = lambda dq, call: dq * call.scale
    scale_dk: Step = lambda dk, call: dk * call.scale
    gradients: Step = keep  # Gradients, with kinds and call
    dbias: Step = dbias
    dsinks: Step = dsinks
