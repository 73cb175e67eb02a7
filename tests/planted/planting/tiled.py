"""A correct attention over square tiles in replaceable steps, as kernels that skip tiles are written.

Key blocks come one after another; all query blocks meet each of them. Which tiles count is said by ranges of blocks,
one for the forward pass, one for `dq` and one for `dk` and `dv`, so that a bug may be in one of the three.

Inside, everything is f32 and whole: rows are `[B, N, q blocks, block]`, queries `[B, N, q blocks, block, H]`, keys
`[key blocks, B, N, block, H]`, a tile's logits `[B, N, q blocks, block, block]`. What cuts the operands into blocks is
differentiated by JAX.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cases.case import Case
from impls.contract.implementation import Implementation
from tests.bank import PlantedBug
from tests.planted.planting import wrapped

Array = Any
Step = Callable[..., Any]
BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in one call."""

    batch: int
    q_length: int
    kv_length: int
    scale: float
    soft_cap: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    masked: bool
    packed: bool
    dtype: Any

    @property
    def q_blocks(self) -> int:
        """Query blocks, the last one padded."""
        return -(-self.q_length // BLOCK)

    @property
    def kv_blocks(self) -> int:
        """Key blocks, the last one padded."""
        return -(-self.kv_length // BLOCK)

    @property
    def whole(self) -> bool:
        """Whether no block is padded."""
        return self.q_length % BLOCK == 0 and self.kv_length % BLOCK == 0

    @property
    def left(self) -> int | None:
        """Keys before its own that a query sees, None if all."""
        return self.window[0] if self.window else None

    @property
    def right(self) -> int | None:
        """Keys behind its own that a query sees, None if all."""
        if self.causal:
            return 0
        return self.window[1] if self.window else None

    @property
    def sixteen_bits(self) -> bool:
        """Whether operands have 16 bits."""
        return bool(jnp.dtype(self.dtype).itemsize == 2)


class Blocks(NamedTuple):
    """The operands, cut; None where the call has none."""

    q: Array  # [B, N, q blocks, BLOCK, H]
    k: Array  # [key blocks, B, N, BLOCK, H]
    v: Array  # [key blocks, B, N, BLOCK, V]
    bias: Array  # [key blocks, B, N, q blocks, BLOCK, BLOCK]
    sinks: Array  # [N]
    mask: Array  # [key blocks, b, n, q blocks, BLOCK, BLOCK]
    q_ids: Array  # [B, q blocks, BLOCK]
    kv_ids: Array  # [key blocks, B, BLOCK]


class Running(NamedTuple):
    """Softmax so far, `[B, N, q blocks, BLOCK]`; `acc` has the depth behind it."""

    pivot: Array
    total: Array
    acc: Array
    top: Array


def _at_least_zero(block: Array) -> Array:
    return jnp.maximum(block, 0)


def key_range(call: Call, i: Array) -> tuple[Array, Array]:
    """The first key block that query blocks `i` meet, and the one behind the last."""
    first, stop = jnp.zeros_like(i), jnp.full_like(i, call.kv_blocks)
    if call.left is not None:
        first = _at_least_zero((i * BLOCK - call.left) // BLOCK)
    if call.right is not None:
        stop = jnp.minimum(stop, (i * BLOCK + BLOCK - 1 + call.right) // BLOCK + 1)
    return first, stop


def query_range(call: Call, j: Array) -> tuple[Array, Array]:
    """The first query block that meets key block `j`, and the one behind the last."""
    first, stop = jnp.zeros_like(j), jnp.full_like(j, call.q_blocks)
    if call.right is not None:
        first = _at_least_zero((j * BLOCK - call.right) // BLOCK)
    if call.left is not None:
        stop = jnp.minimum(stop, (j * BLOCK + BLOCK - 1 + call.left) // BLOCK + 1)
    return first, stop


def near(call: Call, rows: Array, columns: Array) -> Array:
    """Pairs that causal mask and window allow, of positions `[q blocks, BLOCK, 1]` and `[BLOCK]`."""
    ok = jnp.ones((), bool)
    if call.left is not None:
        ok = ok & (columns >= rows - call.left)
    if call.right is not None:
        ok = ok & (columns <= rows + call.right)
    return ok


def same_ids(call: Call, q_ids: Array, kv_ids: Array, rows: Array, columns: Array) -> Array:
    """Pairs of one segment, of ids `[B, 1, q blocks, BLOCK, 1]` and `[B, 1, 1, 1, BLOCK]`."""
    return q_ids == kv_ids


def positions(call: Call, block: Array) -> Array:
    """Where the elements of blocks stand, `[..., BLOCK]`."""
    return block[..., None] * BLOCK + jnp.arange(BLOCK)


def capped(call: Call, x: Array) -> tuple[Array, Array]:
    """Logits after the soft cap, and the cap's derivative."""
    if call.soft_cap is None:
        return x, jnp.ones(())
    bent = jnp.tanh(x / call.soft_cap)
    return call.soft_cap * bent, 1 - bent * bent


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileSteps:
    """The steps that a bug may replace; the defaults are correct. `j` is a key block's number, `i` query blocks'."""

    key_range: Step = key_range  # in the forward pass
    key_range_again: Step = key_range  # for dq
    query_range: Step = query_range  # for dk and dv
    value_block: Step = lambda call, j: j  # which block of v is read at j
    bias_block: Step = lambda call, j: j
    mask_block: Step = lambda call, j: j
    ids_block: Step = lambda call, j: j
    live: Step = lambda call, i, j: jnp.ones_like(i, bool)  # tiles that nothing skips
    rows: Step = positions
    columns: Step = positions
    same_ids: Step = same_ids
    bias: Step = lambda call, x, bias, j: x + bias  # logits with the bias
    capped: Step = capped
    pivot: Step = lambda call, old, top, j: jnp.maximum(old, top)
    alpha: Step = lambda call, old, shift, j: jnp.exp(old - shift)
    add_total: Step = lambda call, total, alpha, sums, j: total * alpha + sums
    add_values: Step = lambda call, acc, alpha, values, j: acc * alpha[..., None] + values
    out: Step = lambda call, out: out  # [B, T, N, V] in f32
    delta: Step = lambda call, delta: delta
    dp: Step = lambda call, dp: dp


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision="highest")


def _visible(steps: TileSteps, call: Call, x: Blocks, i: Array, j: Array) -> Array:
    """Pairs of a column of tiles that may attend, broadcastable to `[B, N, q blocks, BLOCK, BLOCK]`."""
    rows, columns = steps.rows(call, i)[..., None], steps.columns(call, j)
    true_rows, true_columns = positions(call, i)[..., None], positions(call, j)
    ok = (true_rows < call.q_length) & (true_columns < call.kv_length) & near(call, rows, columns)
    if x.mask is not None:
        ok = ok & x.mask[steps.mask_block(call, j)]
    if x.q_ids is not None:
        kv_ids = x.kv_ids[steps.ids_block(call, j)][:, None, None, None]
        ok = ok & steps.same_ids(call, x.q_ids[:, None, ..., None], kv_ids, rows, columns)
    return ok


def _logits(steps: TileSteps, call: Call, x: Blocks, i: Array, j: Array) -> tuple[Array, Array, Array]:
    """A column's logits with -inf where hidden, the cap's derivative, and its keys."""
    k = x.k[j]
    z = call.scale * _product("bnith,bnsh->bnits", x.q, k)
    if x.bias is not None:
        z = steps.bias(call, z, x.bias[steps.bias_block(call, j)], j)
    z, slope = steps.capped(call, z)
    return jnp.where(_visible(steps, call, x, i, j), z, -jnp.inf), slope, k


def _within(block: Array, edges: tuple[Array, Array]) -> Array:
    return (block >= edges[0]) & (block < edges[1])


def _forward(steps: TileSteps, call: Call, x: Blocks) -> tuple[Array, Array, Array]:
    """`(out, logsumexp, max_logits)`, padded."""
    i = jnp.arange(call.q_blocks)
    keys = steps.key_range(call, i)

    def step(state: Running, j: Array) -> tuple[Running, None]:
        z, _, _ = _logits(steps, call, x, i, j)
        pivot = steps.pivot(call, state.pivot, z.max(axis=-1), j)
        shift = jnp.where(pivot == -jnp.inf, 0.0, pivot)
        alpha = steps.alpha(call, state.pivot, shift, j)
        p = jnp.exp(z - shift[..., None])
        values = _product("bnits,bnsv->bnitv", p, x.v[steps.value_block(call, j)])
        new = Running(
            pivot,
            steps.add_total(call, state.total, alpha, p.sum(axis=-1), j),
            steps.add_values(call, state.acc, alpha, values, j),
            jnp.maximum(state.top, z.max(axis=-1)),
        )
        visited = (_within(j, keys) & steps.live(call, i, j))[:, None]
        return jax.tree.map(
            lambda a, b: jnp.where(visited[..., None] if a.ndim > 4 else visited, a, b), new, state
        ), None

    rows = x.q.shape[:4]
    nothing = jnp.full(rows, -jnp.inf, jnp.float32)
    start = Running(nothing, jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, x.v.shape[-1]), jnp.float32), nothing)
    state, _ = lax.scan(step, start, jnp.arange(call.kv_blocks))
    pivot, total, acc = state.pivot, state.total, state.acc
    if x.sinks is not None:
        sinks = x.sinks[:, None, None]
        pivot = jnp.maximum(state.pivot, sinks)
        alpha = jnp.exp(state.pivot - pivot)
        total, acc = total * alpha + jnp.exp(sinks - pivot), acc * alpha[..., None]
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    return acc / total[..., None], jnp.where(empty, -jnp.inf, pivot + jnp.log(total)), state.top


def _backward(steps: TileSteps, call: Call, x: Blocks, out: Array, lse: Array, do: Array, dlse: Array) -> Blocks:
    """Gradients of the blocks."""
    i = jnp.arange(call.q_blocks)
    keys = steps.key_range_again(call, i)
    delta = steps.delta(call, (out * do).sum(axis=-1))
    shift = jnp.where(lse == -jnp.inf, 0.0, lse)

    def step(dq: Array, j: Array) -> tuple[Array, Any]:
        z, slope, k = _logits(steps, call, x, i, j)
        live = steps.live(call, i, j)
        p = jnp.exp(z - shift[..., None])
        dp = steps.dp(call, _product("bnitv,bnsv->bnits", do, x.v[steps.value_block(call, j)]))
        dx = p * (dp - delta[..., None] + dlse[..., None]) * slope
        for_q = (_within(j, keys) & live)[:, None, None]
        for_k = (_within(i, steps.query_range(call, j)) & live)[:, None, None]
        dq = dq + call.scale * _product("bnits,bnsh->bnith", jnp.where(for_q, dx, 0), k)
        dk = call.scale * _product("bnits,bnith->bnsh", jnp.where(for_k, dx, 0), x.q)
        dv = _product("bnits,bnitv->bnsv", jnp.where(for_k, p, 0), do)
        return dq, (dk, dv, None if x.bias is None else dx)

    dq, (dk, dv, dbias) = lax.scan(step, jnp.zeros_like(x.q), jnp.arange(call.kv_blocks))
    dsinks = None
    if x.sinks is not None:
        p_sink = jnp.exp(x.sinks[:, None, None] - shift)
        dsinks = (p_sink * (dlse - delta)).sum(axis=(0, 2, 3))
    return Blocks(dq, dk, dv, dbias, dsinks, None, None, None)


def _attend(steps: TileSteps, call: Call) -> Callable[[Blocks], Any]:
    @jax.custom_vjp
    def attend(x: Blocks) -> Any:
        return _forward(steps, call, x)

    def with_saved(x: Blocks) -> Any:
        found = _forward(steps, call, x)
        return found, (x, *found[:2])

    def pull_back(saved: Any, cotangents: Any) -> tuple[Blocks]:
        return (_backward(steps, call, *saved, *cotangents[:2]),)

    attend.defvjp(with_saved, pull_back)
    return attend


def _whole(x: Array, axis: int, fill: Any = 0) -> Array:
    """`x` padded to whole blocks along `axis`."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % BLOCK)
    return jnp.pad(x, padding, constant_values=fill)


def _tiles(x: Array) -> Array:
    """`[b, n, T, S]` to `[key blocks, b, n, q blocks, BLOCK, BLOCK]`."""
    x = _whole(_whole(x, 2), 3)
    x = x.reshape(*x.shape[:2], -1, BLOCK, x.shape[3] // BLOCK, BLOCK)
    return x.transpose(4, 0, 1, 2, 3, 5)


def _keys(x: Array, group: int) -> Array:
    """`[B, S, K, D]` to `[key blocks, B, N, BLOCK, D]`."""
    x = jnp.repeat(_whole(x.astype(jnp.float32), 1), group, axis=2)
    return x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:]).transpose(1, 0, 3, 2, 4)


def cut(q: Array, k: Array, v: Array, bias: Array, sinks: Array, mask: Array, ids: Any) -> Blocks:
    """The operands of a call, cut."""
    batch, q_length, heads, _ = q.shape
    group, kv_length = heads // k.shape[2], k.shape[1]
    padded = _whole(q.astype(jnp.float32), 1).transpose(0, 2, 1, 3)
    if bias is not None:
        bias = _tiles(jnp.broadcast_to(bias.astype(jnp.float32), (batch, heads, q_length, kv_length)))
    if mask is not None:
        mask = _tiles(jnp.broadcast_to(mask, (*mask.shape[:2], q_length, kv_length)))
    return Blocks(
        q=padded.reshape(batch, heads, -1, BLOCK, q.shape[-1]),
        k=_keys(k, group),
        v=_keys(v, group),
        bias=bias,
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        mask=mask,
        q_ids=None if ids is None else _whole(ids[0], 1).reshape(batch, -1, BLOCK),
        kv_ids=None if ids is None else _whole(ids[1], 1).reshape(batch, -1, BLOCK).transpose(1, 0, 2),
    )


def kernel(steps: TileSteps) -> wrapped.Kernel:
    """Attention over square tiles made of `steps`: tiles that causal mask and window leave empty are skipped."""

    def attend(arrays: wrapped.Arrays, statics: wrapped.Statics) -> Any:
        q, k, v = (arrays[name] for name in "qkv")
        bias, sinks, mask, segment_ids = (arrays.get(name) for name in ("bias", "sinks", "mask", "segment_ids"))
        scale = q.shape[-1] ** -0.5 if statics["scale"] is None else statics["scale"]
        call = Call(
            q.shape[0], q.shape[1], k.shape[1], scale, statics["soft_cap"], statics["causal"], statics["window"],
            mask is not None, segment_ids is not None, q.dtype,
        )  # fmt: skip
        mask = None if mask is None else jnp.asarray(mask)
        found = _attend(steps, call)(cut(q, k, v, bias, sinks, mask, segment_ids))
        out, lse, top = (x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, : q.shape[1]] for x in found)
        out = steps.out(call, out.transpose(0, 2, 1, 3)).astype(q.dtype)
        return (out, {"logsumexp": lse, "max_logits": top}) if statics["save_residuals"] else out

    return attend


def implementation(steps: TileSteps, name: str) -> Implementation:
    """The kernel made of `steps`, as the gate takes it."""
    return wrapped.implementation(name, kernel(steps), empty_rows="zero")


def planted(
    *,
    name: str,
    family: str,
    kind: str,
    reference: str,
    shows: tuple[str, ...],
    trigger: Callable[[Case], bool],
    **replaced: Step,
) -> PlantedBug:
    """The bug that replacing these steps plants."""
    return PlantedBug(
        name=name,
        family=family,
        kind=kind,
        reference=reference,
        shows=shows,
        build=functools.partial(implementation, TileSteps(**replaced), name),
        trigger=trigger,
    )
