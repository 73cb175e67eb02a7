"""A correct blockwise attention in replaceable steps.

Forward: one scan over key blocks with a running softmax, all queries at once. Backward: one scan over key blocks that
recomputes the probabilities from the saved `logsumexp`, with `D = <out, do>`. Query tiles of `BLOCK_Q` rows and key
blocks of `BLOCK_KV` make tiles, each empty, partial or full; an empty tile is left out, a full one is not masked.

Inside, lengths are padded to whole tiles and heads are split: rows are `[B, K, G, T]`, queries `[B, K, G, T, H]`, keys
`[B, K, S, H]`, logits of a block `[B, K, G, T, BLOCK_KV]`. Masks may have 1 for `B`, `K` and `G`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from conformance.contract import Implementation
from conformance.plain import declare, from_function

Step = Callable[..., Any]

# Different on purpose: a block size used for the other axis must show.
BLOCK_Q, BLOCK_KV = 32, 64
EMPTY, PARTIAL, FULL = 0, 1, 2


class Operands(NamedTuple):
    """Arrays of the call; `allowed` is mask and segment ids together, `[b, n, T, S]`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None
    allowed: jax.Array


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


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in one call."""

    batch: int
    q_length: int
    kv_length: int
    num_q_heads: int
    num_kv_heads: int
    scale: float
    soft_cap: float | None

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.num_q_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class Cut:
    """Operands padded to whole tiles. `tiles` and `kinds` have the key block in front and one entry a row."""

    q: jax.Array  # [B, K, G, T, H]
    k: jax.Array  # [B, K, S, H]
    v: jax.Array  # [B, K, S, V]
    bias: jax.Array | None  # [b, k, g, t, S]
    tiles: jax.Array  # [key blocks, b, k, g, T, BLOCK_KV]
    kinds: jax.Array  # [key blocks, b, k, g, T, 1]


@dataclasses.dataclass(frozen=True)
class Block:
    """One key block, as the steps see it."""

    call: Call
    index: jax.Array
    count: int
    rows: jax.Array  # positions of the queries, [T, 1]
    columns: jax.Array  # positions of the keys, [BLOCK_KV]
    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    kind: jax.Array  # [b, k, g, T, 1]
    visible: jax.Array  # [b, k, g, T, BLOCK_KV]
    do: jax.Array | None = None


def finite_or_zero(x: jax.Array) -> jax.Array:
    """`x` with -inf replaced by 0, so that `exp(-inf - x)` is 0."""
    return jnp.where(x == -jnp.inf, 0.0, x)


def product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A contraction accumulated in f32."""
    return jnp.einsum(equation, a, b, precision="highest", preferred_element_type=jnp.float32)


def _keep(x: Any, *context: Any) -> Any:
    return x


def _classify(tiles: jax.Array) -> jax.Array:
    return tiles.any(axis=(4, 6)).astype(jnp.int32) + tiles.all(axis=(4, 6))


def _in_range(rows: jax.Array, columns: jax.Array, call: Call) -> jax.Array:
    return (rows < call.q_length) & (columns < call.kv_length)


def _visible(allowed: jax.Array, kind: jax.Array, in_range: jax.Array) -> jax.Array:
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


def _masked(z: jax.Array, block: Block) -> jax.Array:
    return jnp.where(block.visible, z, -jnp.inf)


def _add_weights(acc: jax.Array, alpha: jax.Array, weights: jax.Array, v: jax.Array, block: Block) -> jax.Array:
    return acc * alpha[..., None] + product("bkgts,bksv->bkgtv", weights.astype(v.dtype), v)


def _add_sink(state: Running, sinks: jax.Array) -> Running:
    pivot = jnp.maximum(state.pivot, sinks)
    alpha = jnp.exp(state.pivot - pivot)
    return state._replace(
        pivot=pivot, total=state.total * alpha + jnp.exp(sinks - pivot), acc=state.acc * alpha[..., None]
    )


def _logsumexp(state: Running) -> jax.Array:
    return jnp.where(state.total == 0, -jnp.inf, state.pivot + jnp.log(jnp.where(state.total == 0, 1, state.total)))


def _delta(out: jax.Array, do: jax.Array, call: Call) -> jax.Array:
    return product("bkgtv,bkgtv->bkgt", out, do)


def _dz(p: jax.Array, dp: jax.Array, delta: jax.Array, dlse: jax.Array, block: Block) -> jax.Array:
    return p * (dp - delta[..., None] + dlse[..., None])


def _dsinks(sinks: jax.Array, lse: jax.Array, delta: jax.Array, dlse: jax.Array) -> jax.Array:
    """`[N]`, from `sinks [N, 1]` and rows `[B, N, T]`."""
    return (jnp.exp(sinks - finite_or_zero(lse)) * (dlse - delta)).sum(axis=(0, 2))


def _dbias(dx: jax.Array, dz: jax.Array, shape: tuple[int, ...], block: Block) -> jax.Array:
    axes = tuple(axis for axis in range(4) if shape[axis] == 1)
    return dx.sum(axis=axes, keepdims=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSteps:
    """The steps that a bug may replace; the defaults are correct."""

    # Which keys meet which queries.
    count: Step = lambda call: -(-call.kv_length // BLOCK_KV)  # key blocks visited
    key_start: Step = lambda index, call: index * BLOCK_KV  # first key of a block, for k
    value_start: Step = lambda index, call: index * BLOCK_KV  # the same for v
    bias_start: Step = lambda index, call: index * BLOCK_KV  # the same for bias
    mask_index: Step = _keep  # block of the mask
    lay_out: Step = _keep  # mask tiles [b, k, g, q tiles, BLOCK_Q, key blocks, BLOCK_KV], with kinds and call
    classify: Step = _classify  # kinds [b, k, g, q tiles, key blocks] of mask tiles
    in_range: Step = _in_range  # pairs that are not padding
    visible: Step = _visible  # pairs that may attend
    hide_k: Step = hide
    hide_v: Step = hide
    # Running softmax.
    start: Step = _keep  # the first state, with kinds
    logits: Step = logits
    masked: Step = _masked
    pivot: Step = lambda state, z, block: jnp.maximum(state.pivot, z.max(axis=-1))
    shift: Step = lambda pivot, block: finite_or_zero(pivot)
    weights: Step = lambda z, shift, block: jnp.exp(z - shift[..., None])
    alpha: Step = lambda old, shift, block: jnp.exp(old - shift)
    add_total: Step = lambda total, alpha, weights, block: total * alpha + weights.sum(axis=-1)
    add_weights: Step = _add_weights
    top: Step = lambda top, z, block: jnp.maximum(top, z.max(axis=-1))
    between: Step = _keep  # state after a block, with sinks and block
    add_sink: Step = _add_sink
    normalise: Step = lambda acc, total, call: acc / jnp.where(total == 0, 1, total)[..., None]
    logsumexp: Step = _logsumexp
    store: Step = _keep  # Rows, with kinds and call
    round_out: Step = lambda out, dtype: out.astype(dtype)
    trim: Step = lambda x, length: x[..., :length]  # padding of the residuals
    undifferentiated: Step = _keep  # Outputs of a call that is not differentiated
    primal: Step = _keep  # Outputs of a call that is
    saved: Step = lambda out, lse, operands: (out, lse)  # what the backward gets
    # Backward.
    hide_k_again: Step = hide
    hide_v_again: Step = hide
    logits_again: Step = logits
    visible_again: Step = lambda block: block.visible
    split_do: Step = lambda x, call: split_heads(x, call)
    dlse: Step = _keep
    delta: Step = _delta
    probabilities: Step = lambda z, lse, block: jnp.exp(z - finite_or_zero(lse)[..., None])
    dp: Step = lambda do, v, block: product("bkgtv,bksv->bkgts", do, v)
    dz: Step = _dz
    dx: Step = lambda dz, slope, z, block: jnp.where(block.visible, dz * slope, 0)
    round_dx: Step = lambda dx, dtype: dx.astype(dtype)
    add_dq: Step = lambda dq, update, block: dq + update
    dk: Step = lambda dx, q, block: product("bkgts,bkgth->bkgsh", dx, q)
    dv: Step = lambda p, do, z, block: product("bkgts,bkgtv->bkgsv", p.astype(do.dtype), do)
    group_sum: Step = lambda x: x.sum(axis=2)
    write: Step = _keep  # (dk, dv) of a block, with block
    scale_dq: Step = lambda dq, call: dq * call.scale
    scale_dk: Step = lambda dk, call: dk * call.scale
    gradients: Step = _keep  # Gradients, with kinds and call
    dbias: Step = _dbias
    dsinks: Step = _dsinks


def split_heads(x: jax.Array, call: Call) -> jax.Array:
    """`[B, T, N, D]` to `[B, K, G, T, D]`, `T` padded."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK_Q), (0, 0), (0, 0)])
    return x.reshape(*x.shape[:2], call.num_kv_heads, call.group, -1).transpose(0, 2, 3, 1, 4)


def _join_heads(x: jax.Array, call: Call) -> jax.Array:
    x = x.transpose(0, 3, 1, 2, 4)
    return x.reshape(*x.shape[:2], call.num_q_heads, -1)[:, : call.q_length]


def split_rows(x: jax.Array, call: Call, fill: float = 0.0) -> jax.Array:
    """`[B, N, T]` to `[B, K, G, T]`, `T` padded with `fill`."""
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % BLOCK_Q)], constant_values=fill)
    return x.reshape(x.shape[0], call.num_kv_heads, call.group, -1)


def join_rows(x: jax.Array, call: Call) -> jax.Array:
    """`[B, K, G, T]` to `[B, N, T]`, `T` still padded."""
    return x.reshape(call.batch, call.num_q_heads, -1)


def _split_keys(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK_KV), (0, 0), (0, 0)]).transpose(0, 2, 1, 3)


def _join_keys(blocks: jax.Array, call: Call) -> jax.Array:
    """`[key blocks, B, K, BLOCK_KV, D]` to `[B, S, K, D]`; blocks that were not visited are zero."""
    x = jnp.moveaxis(blocks, 0, 2).reshape(*blocks.shape[1:3], -1, blocks.shape[4])
    x = jnp.pad(x, [(0, 0), (0, 0), (0, max(0, call.kv_length - x.shape[2])), (0, 0)])
    return x[:, :, : call.kv_length].transpose(0, 2, 1, 3)


def _split_heads_of(x: jax.Array, call: Call) -> jax.Array:
    """`[b, n, t, s]` to `[b, k, g, t, s]`."""
    heads = (1, 1) if x.shape[1] == 1 else (call.num_kv_heads, call.group)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def _pad_pairs(x: jax.Array, fill: bool | float) -> jax.Array:
    padding = [(0, 0)] * 3 + [(0, -x.shape[3] % BLOCK_Q if x.shape[3] > 1 else 0), (0, -x.shape[4] % BLOCK_KV)]
    return jnp.pad(x, padding, constant_values=fill)


def _cut(steps: BlockSteps, call: Call, operands: Operands) -> Cut:
    allowed = jnp.broadcast_to(operands.allowed, (*operands.allowed.shape[:2], call.q_length, call.kv_length))
    q = split_heads(operands.q, call)
    allowed = _split_heads_of(allowed, call)
    # Padding counts as allowed, so that it makes no full tile partial; `in_range` takes it out.
    allowed = jnp.pad(
        allowed, [(0, 0)] * 3 + [(0, -n % m) for n, m in zip(allowed.shape[3:], (BLOCK_Q, BLOCK_KV), strict=True)],
        constant_values=True,
    )
    tiles = allowed.reshape(*allowed.shape[:3], -1, BLOCK_Q, allowed.shape[4] // BLOCK_KV, BLOCK_KV)
    kinds = steps.classify(tiles)
    tiles = steps.lay_out(tiles, kinds, call)
    bias = operands.bias
    if bias is not None:
        bias = _pad_pairs(_split_heads_of(bias.astype(jnp.float32), call), 0.0)
    return Cut(
        q=q,
        k=_split_keys(operands.k),
        v=_split_keys(operands.v),
        bias=bias,
        tiles=jnp.moveaxis(tiles, 5, 0).reshape(tiles.shape[5], *tiles.shape[:3], -1, BLOCK_KV),
        kinds=jnp.repeat(jnp.moveaxis(kinds, 4, 0), BLOCK_Q, axis=4)[..., None],
    )


def _read(steps: BlockSteps, call: Call, cut: Cut, index: jax.Array) -> Block:
    """Key block `index`."""
    slice_keys = functools.partial(lax.dynamic_slice_in_dim, slice_size=BLOCK_KV)
    rows = jnp.arange(cut.q.shape[3])[:, None]
    columns = index * BLOCK_KV + jnp.arange(BLOCK_KV)
    kind = cut.kinds[index]
    allowed = cut.tiles[steps.mask_index(index, call)]
    return Block(
        call=call,
        index=index,
        count=steps.count(call),
        rows=rows,
        columns=columns,
        q=cut.q,
        k=slice_keys(cut.k, steps.key_start(index, call), axis=2),
        v=slice_keys(cut.v, steps.value_start(index, call), axis=2),
        bias=None if cut.bias is None else slice_keys(cut.bias, steps.bias_start(index, call), axis=4),
        kind=kind,
        visible=steps.visible(allowed, kind, steps.in_range(rows, columns, call)),
    )


def forward(steps: BlockSteps, call: Call, operands: Operands) -> Outputs:
    """The forward pass."""
    cut = _cut(steps, call, operands)
    sinks = None if operands.sinks is None else operands.sinks.reshape(call.num_kv_heads, call.group, 1)

    def step(state: Running, index: jax.Array) -> tuple[Running, None]:
        block = _read(steps, call, cut, index)
        seen = block.visible.any(axis=(2, 3))
        k, v = steps.hide_k(block.k, seen), steps.hide_v(block.v, seen)
        z = steps.masked(steps.logits(product("bkgth,bksh->bkgts", block.q, k), block)[0], block)
        pivot = steps.pivot(state, z, block)
        shift = steps.shift(pivot, block)
        weights = steps.weights(z, shift, block)
        alpha = steps.alpha(state.pivot, shift, block)
        total = steps.add_total(state.total, alpha, weights, block)
        acc = steps.add_weights(state.acc, alpha, weights, v, block)
        return steps.between(Running(pivot, total, acc, steps.top(state.top, z, block)), sinks, block), None

    rows = cut.q.shape[:4]
    empty = jnp.full(rows, -jnp.inf)
    state = Running(empty, jnp.zeros(rows), jnp.zeros((*rows, operands.v.shape[3])), empty)
    state, _ = lax.scan(step, steps.start(state, cut.kinds), jnp.arange(steps.count(call)))
    if sinks is not None:
        state = steps.add_sink(state, sinks)
    found = Rows(steps.normalise(state.acc, state.total, call), steps.logsumexp(state), state.top)
    found = steps.store(found, cut.kinds, call)
    return Outputs(
        out=steps.round_out(_join_heads(found.out, call), operands.q.dtype),
        logsumexp=steps.trim(join_rows(found.logsumexp, call), call.q_length),
        max_logits=steps.trim(join_rows(found.max_logits, call), call.q_length),
    )


def backward(
    steps: BlockSteps, call: Call, operands: Operands, out: jax.Array, lse: jax.Array, cotangents: Outputs
) -> Operands:
    """Gradients of the operands from the saved `out` and `lse`."""
    cut = _cut(steps, call, operands)
    do = steps.split_do(cotangents.out, call)
    dlse = steps.dlse(cotangents.logsumexp)
    delta = steps.delta(split_heads(out, call), do, call)
    lse_rows, dlse_rows = split_rows(lse, call, -jnp.inf), split_rows(dlse, call)
    dtype = operands.q.dtype

    def step(dq: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
        block = dataclasses.replace(_read(steps, call, cut, index), do=do)
        block = dataclasses.replace(block, visible=steps.visible_again(block))
        seen = block.visible.any(axis=(2, 3))
        k, v = steps.hide_k_again(block.k, seen), steps.hide_v_again(block.v, seen)
        z, slope = steps.logits_again(product("bkgth,bksh->bkgts", block.q, k), block)
        z = _masked(z, block)
        p = steps.probabilities(z, lse_rows, block)
        dz = steps.dz(p, steps.dp(do, v, block), delta, dlse_rows, block)
        dx = steps.dx(dz, slope, z, block)
        rounded = steps.round_dx(dx, dtype)
        dq = steps.add_dq(dq, product("bkgts,bksh->bkgth", rounded, k), block)
        dk = steps.group_sum(steps.dk(rounded, block.q, block))
        dv = steps.group_sum(steps.dv(p, do, z, block))
        dbias = None if cut.bias is None else steps.dbias(dx, dz, cut.bias.shape, block)
        return dq, (*steps.write((dk, dv), block), dbias)

    dq, (dk, dv, dbias) = lax.scan(step, jnp.zeros(cut.q.shape), jnp.arange(steps.count(call)))
    found = Gradients(
        q=_join_heads(steps.scale_dq(dq, call), call),
        k=_join_keys(steps.scale_dk(dk, call), call),
        v=_join_keys(dv, call),
    )
    found = steps.gradients(found, cut.kinds, call)
    dsinks = None
    if operands.sinks is not None:
        delta_rows = join_rows(delta, call)[..., : call.q_length]
        dsinks = steps.dsinks(operands.sinks[:, None], lse, delta_rows, dlse).astype(operands.sinks.dtype)
    if operands.bias is not None:
        dbias = _join_bias(dbias, operands.bias.shape).astype(operands.bias.dtype)
    return Operands(*(x.astype(dtype) for x in found), bias=dbias, sinks=dsinks, allowed=None)


def _join_bias(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`[key blocks, b, k, g, t, BLOCK_KV]` to the bias's `shape [b, n, t, S]`."""
    x = jnp.moveaxis(blocks, 0, 4)
    x = x.reshape(*shape[:2], x.shape[3], -1)
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, max(0, shape[3] - x.shape[3]))])
    return x[:, :, : shape[2], : shape[3]]


def kernel(steps: BlockSteps) -> Callable[..., Any]:
    """The attention function made of `steps`."""

    @declare(empty_rows="zero")
    def attention(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        mask: jax.Array | None = None,
        segment_ids: tuple[jax.Array, jax.Array] | None = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
        bias: jax.Array | None = None,
        scale: float | None = None,
        save_residuals: bool = False,
    ) -> Any:
        """Blockwise attention with a hand-written backward."""
        call = Call(
            batch=q.shape[0],
            q_length=q.shape[1],
            kv_length=k.shape[1],
            num_q_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            scale=q.shape[3] ** -0.5 if scale is None else scale,
            soft_cap=soft_cap,
        )
        allowed = jnp.ones((1, 1, 1, 1), bool) if mask is None else jnp.asarray(mask)
        if segment_ids is not None:
            allowed = allowed & (segment_ids[0][:, None, :, None] == segment_ids[1][:, None, None, :])
        outputs = _differentiable(steps, call)(Operands(q, k, v, bias, sinks, allowed))
        if not save_residuals:
            return outputs.out
        return outputs.out, {"logsumexp": outputs.logsumexp, "max_logits": outputs.max_logits}

    return attention


def _differentiable(steps: BlockSteps, call: Call) -> Callable[[Operands], Outputs]:
    @jax.custom_vjp
    def attend(operands: Operands) -> Outputs:
        return steps.undifferentiated(forward(steps, call, operands))

    def with_saved(operands: Operands) -> tuple[Outputs, Any]:
        outputs = forward(steps, call, operands)
        return steps.primal(outputs), (operands, *steps.saved(outputs.out, outputs.logsumexp, operands))

    def pull_back(saved: Any, cotangents: Outputs) -> tuple[Operands]:
        return (backward(steps, call, *saved, cotangents),)

    attend.defvjp(with_saved, pull_back)
    return attend


def implementation(steps: BlockSteps, name: str) -> Implementation:
    """The kernel made of `steps`, as the gate takes it."""
    return from_function(kernel(steps), name)
