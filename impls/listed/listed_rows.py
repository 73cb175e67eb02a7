"""Attend from each query to listed rows of keys and values, with a hand-written backward pass.

Equations are those of `impls/__init__.py`. A block of queries gathers its keys and values, and its logits
`[t, K, G, e]` are all that is kept of a block. So memory is linear in the number of queries. In the backward pass, the
gradients of a key that several lists name are added where the key lies (equations (9) and (15)).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from impls.block_arithmetic import compute_dsinks, multiply, replace_neg_inf
from impls.varying_axes import find_varying_axes, mark_varying


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsPlan:
    """Static part of one call. Equal plans share one compiled function."""

    num_kv_heads: int
    scale: float
    soft_cap: float | None
    block: int  # the number of queries that gather their keys together


class Operands(NamedTuple):
    """Arrays of one call: `R` queries and `M` rows of keys."""

    q: Float[Array, "R N H"]
    k: Float[Array, "M K H"]
    v: Float[Array, "M K V"]
    rows: Int32[Array, "R e"]  # the rows of k and v that each query attends to; -1 for none
    sinks: Float[Array, " N"] | None


class Outputs(NamedTuple):
    """Results of one call."""

    out: Float[Array, "R N V"]
    logsumexp: Float32[Array, "R N"]
    max_logits: Float32[Array, "R N"]


class _Block(NamedTuple):
    """A block of queries with the rows that they attend to, and in the backward pass what was computed for them."""

    q: Float[Array, "t N H"]
    rows: Int32[Array, "t e"]
    given: Any = ()


class _Gathered(NamedTuple):
    """The keys and values of a block of queries, and its logits."""

    q: Float[Array, "t K G H"]
    k: Float[Array, "t e K H"]
    v: Float[Array, "t e K V"]
    logits: Float32[Array, "t K G e"]
    slope: Float32[Array, "t K G e"] | None  # the derivative of the soft cap


def attend_rows(plan: RowsPlan, operands: Operands) -> Outputs:
    """Attend from each query to its rows; q, k, v, sinks and `logsumexp` are differentiable in reverse mode."""
    return _attend(plan, mark_varying(operands, find_varying_axes(operands)))


def _forward(plan: RowsPlan, operands: Operands) -> Outputs:
    def compute(block: _Block) -> Outputs:
        gathered = _gather(plan, operands, block)
        top = gathered.logits.max(axis=-1)
        sink = None if operands.sinks is None else _split(plan, operands.sinks.astype(jnp.float32)[None])
        shift = replace_neg_inf(top if sink is None else jnp.maximum(top, sink))  # equation (4)
        weights = jnp.exp(gathered.logits - shift[..., None])
        total = weights.sum(axis=-1) + (0.0 if sink is None else jnp.exp(sink - shift))  # equation (5)
        safe = jnp.where(total == 0, 1.0, total)
        p = (weights / safe[..., None]).astype(gathered.v.dtype)
        out = multiply("tkge,tekv->tkgv", p, gathered.v)  # equation (6)
        logsumexp = jnp.where(total == 0, -jnp.inf, shift + jnp.log(safe))  # equation (7)
        return Outputs(*map(_join, (out.astype(block.q.dtype), logsumexp, top)))

    found: Outputs = lax.map(compute, _cut(plan, operands))
    return Outputs(*(x.reshape(-1, *x.shape[2:])[: len(operands.q)] for x in found))


def _gather(plan: RowsPlan, operands: Operands, block: _Block) -> _Gathered:
    """Gather the keys and values of a block, with zeros for entries without a row, and compute its logits."""
    is_row = block.rows >= 0
    # Where there is no row, a row that may be NaN is gathered: it must not reach a product.
    at, keep = jnp.maximum(block.rows, 0), is_row[:, :, None, None]
    k, v = (jnp.where(keep, x[at], jnp.zeros((), x.dtype)) for x in (operands.k, operands.v))
    # Likewise, a query without rows may be NaN if it is padding.
    q = _split(plan, jnp.where(keep.any(axis=1), block.q, jnp.zeros((), block.q.dtype)))
    x = multiply("tkgh,tekh->tkge", q, k) * jnp.float32(plan.scale)  # equation (1)
    slope = None
    if plan.soft_cap is not None:
        bent = jnp.tanh(x / plan.soft_cap)
        x, slope = plan.soft_cap * bent, 1 - bent * bent  # equation (2)
    return _Gathered(q, k, v, jnp.where(is_row[:, None, None], x, -jnp.inf), slope)  # equation (3)


def _backward(plan: RowsPlan, saved: tuple[Operands, Array, Array], cotangents: Outputs) -> tuple[Operands]:
    operands, out, logsumexp = saved
    d_out = cotangents.out
    # The row sums D - dlse, where D is equation (11).
    row_sums = jnp.einsum("rnv,rnv->rn", out, d_out, precision="highest", preferred_element_type=jnp.float32)
    row_sums = row_sums - cotangents.logsumexp
    logsumexp = replace_neg_inf(logsumexp)

    def add(sums: tuple[Array, Array], block: _Block) -> tuple[tuple[Array, Array], Array]:
        do, lse, sum_of_row = (_split(plan, x) for x in block.given)
        gathered = _gather(plan, operands, block)
        dtype = block.q.dtype
        p = jnp.exp(gathered.logits - lse[..., None])  # equation (8)
        dp = multiply("tkgv,tekv->tkge", do, gathered.v)  # equation (10)
        dx = p * (dp - sum_of_row[..., None])  # equation (12)
        if gathered.slope is not None:
            dx = dx * gathered.slope  # equation (13)
        dx = dx.astype(dtype)
        dk = multiply("tkge,tkgh->tekh", dx, gathered.q)  # equation (15), not yet scaled
        dv = multiply("tkge,tkgv->tekv", p.astype(dtype), do)  # equation (9)
        # Entries without a row add zeros, to row 0.
        at = jnp.maximum(block.rows, 0)
        dq = multiply("tkge,tekh->tkgh", dx, gathered.k) * jnp.float32(plan.scale)  # equation (14)
        return (sums[0].at[at].add(dk), sums[1].at[at].add(dv)), _join(dq.astype(dtype))

    none = jnp.zeros(operands.k.shape, jnp.float32), jnp.zeros(operands.v.shape, jnp.float32)
    none = mark_varying(none, find_varying_axes((operands, d_out)))
    (dk, dv), dq = lax.scan(add, none, _cut(plan, operands, d_out, logsumexp, row_sums))
    gradient = Operands(
        q=dq.reshape(-1, *dq.shape[2:])[: len(operands.q)],
        k=(dk * jnp.float32(plan.scale)).astype(operands.k.dtype),
        v=dv.astype(operands.v.dtype),
        rows=None,  # type: ignore[arg-type]  # integers have no gradient
        sinks=compute_dsinks(operands.sinks, logsumexp.T[None], row_sums.T[None]),
    )
    return (gradient,)


def _split(plan: RowsPlan, x: Array) -> Array:
    """Split the axis of query heads: `[t, N, ...]` to `[t, K, G, ...]`."""
    return x.reshape(x.shape[0], plan.num_kv_heads, -1, *x.shape[2:])


def _join(x: Array) -> Array:
    """Join the axes of query heads: `[t, K, G, ...]` to `[t, N, ...]`."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _cut(plan: RowsPlan, operands: Operands, *given: Array) -> _Block:
    """Cut queries, their rows and other arrays `[R, ...]` into blocks; the queries that fill the last have no rows."""

    def cut(x: Array, padding: int = 0) -> Array:
        widths = [(0, -len(x) % plan.block), *((0, 0),) * (x.ndim - 1)]
        return jnp.pad(x, widths, constant_values=padding).reshape(-1, plan.block, *x.shape[1:])

    return _Block(cut(operands.q), cut(operands.rows, -1), tuple(map(cut, given)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(plan: RowsPlan, operands: Operands) -> Outputs:
    return _forward(plan, operands)


def _run_forward(plan: RowsPlan, operands: Operands) -> tuple[Outputs, tuple[Operands, Array, Array]]:
    outputs = _forward(plan, operands)
    out, logsumexp = checkpoint_name(outputs.out, "out"), checkpoint_name(outputs.logsumexp, "logsumexp")
    return Outputs(out, logsumexp, outputs.max_logits), (operands, out, logsumexp)


_run.defvjp(_run_forward, _backward)

# Jitted so that calls outside `jit` compile once for each plan, not once a call.
_attend = jax.jit(_run, static_argnums=0)
