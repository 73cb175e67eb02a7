"""Ring attention: keys and values rotate around the devices, and each device merges the steps by `logsumexp`.

This is ring attention as in Liu et al. 2023, arXiv:2310.01889. In the backward pass keys and values rotate again,
together with their gradients, which are back on their own device after the last step. A device saves only its own
operands and results, so it needs memory only for its share of the sequence. Step `a` has the weight
`W_a = exp(lse_a - lse)` in the merged `out` and `lse`. The cotangents of its results are

    dout_a = W_a dout        dlse_a = W_a (<dout, out_a> - <dout, out> + dlse)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from cases.masks import Mask
from impls import softmax_merge
from impls.context_parallel.local_attention import Kernel, LocalAttention, Operands, Outputs
from impls.context_parallel.sequence_layout import Layout, build_schedule
from impls.varying_axes import find_varying_axes, mark_varying


def build_part(out: jax.Array, logsumexp: jax.Array) -> softmax_merge.Part:
    """Build a part from `out [B, T, N, V]` and `logsumexp [B, N, T]`; its sum is 1, or 0 where there is no key."""
    top = transpose_rows(logsumexp)
    return softmax_merge.Part(out, top, (top != -jnp.inf).astype(jnp.float32))


def restore_results(part: softmax_merge.Part) -> tuple[jax.Array, jax.Array]:
    """Convert a part back to `out [B, T, N, V]` and `logsumexp [B, N, T]`."""
    out, logsumexp = softmax_merge.normalise(part)
    return out, logsumexp.swapaxes(1, 2)


def add_sinks(out: jax.Array, logsumexp: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add sinks `[N]`, one logit in each denominator. Differentiable with respect to all arguments."""
    return restore_results(softmax_merge.merge([build_part(out, logsumexp), softmax_merge.build_sink_part(sinks)]))


def compute_share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Compute a part's share of the softmax from both `logsumexp`s; 0 where there is no key at all."""
    return jnp.exp(part - jnp.where(whole == -jnp.inf, 0.0, whole))


def transpose_rows(x: jax.Array) -> jax.Array:
    """Transpose `[B, N, T]` to `[B, T, N, 1]`."""
    return x.swapaxes(1, 2)[..., None]


def ring(
    q: Float[Array, "B T_local N H"],
    k: Float[Array, "B S_local K H"],
    v: Float[Array, "B S_local K V"],
    *,
    kernel: Kernel,
    mask: Mask,
    queries: Layout,
    keys: Layout,
    axis_name: str,
    segment_ids: tuple[Int[Array, "B T_local"], Int[Array, "B S_local"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T_local s"] | None = None,
    scale: float | None = None,
) -> tuple[Float32[Array, "B T_local N V"], dict[str, Float32[Array, "B N T_local"]]]:
    """Compute attention of this device's queries to all keys, inside a `shard_map` over the mesh axis `axis_name`.

    Steps whose keys no query of the device may attend to compute nothing. Sinks are added once, after the last step.

    Arguments are those of `all_gather`, with keys, values and the columns of the bias in the order of `keys.deal`.

    Returns:
      f32 `out [B, queries.local, N, V]`, and the residuals.
    """
    plan = build_schedule(mask, queries, keys)
    steps = _RingPlan(LocalAttention(kernel, plan.masks, soft_cap, scale, wide=True), plan.table, axis_name)
    operands = Operands(q, k, v, bias, None, segment_ids)
    outputs = _attend(steps, mark_varying(operands, find_varying_axes(operands)))
    out, logsumexp = outputs.out, outputs.logsumexp
    if sinks is not None:
        out, logsumexp = add_sinks(out, logsumexp, sinks)
    return out, {"logsumexp": logsumexp, "max_logits": outputs.max_logits}


@dataclasses.dataclass(frozen=True)
class _RingPlan:
    """The static part of ring attention; `table[rank][source]` is the index, in `local.masks`, of that pair's mask."""

    local: LocalAttention
    table: tuple[tuple[int, ...], ...]
    axis_name: str

    @property
    def devices(self) -> int:
        return len(self.table)

    def source(self, step: jax.Array) -> jax.Array:
        """Compute the rank of the device whose keys this device has at `step`."""
        return (lax.axis_index(self.axis_name) - step) % self.devices

    def index(self, source: jax.Array) -> jax.Array:
        """Look up the index, in `local.masks`, of the mask between this device's queries and the keys of `source`."""
        return jnp.asarray(self.table, jnp.int32)[lax.axis_index(self.axis_name), source]

    def passed_on(self, x: Any) -> Any:
        """Receive every array of `x` from the previous device."""
        to_next = [(rank, (rank + 1) % self.devices) for rank in range(self.devices)]
        pass_on = functools.partial(lax.ppermute, axis_name=self.axis_name, perm=to_next)
        return jax.tree.map(pass_on, x)


def _cut_columns(bias: jax.Array | None, source: jax.Array, length: int) -> jax.Array | None:
    """Cut out the columns of `bias` for the keys of device `source`."""
    if bias is None or bias.shape[3] == 1:
        return bias
    return lax.dynamic_slice_in_dim(bias, source * length, length, axis=3)


def _build_step_operands(operands: Operands, moving: Any, source: jax.Array) -> Operands:
    """Build the operands of a step: this device's queries, and the keys and values of device `source`."""
    k, v, kv_ids = moving
    ids = None if operands.segment_ids is None else (operands.segment_ids[0], kv_ids)
    return Operands(operands.q, k, v, _cut_columns(operands.bias, source, k.shape[1]), None, ids)


def _list_moving(operands: Operands) -> Any:
    kv_ids = None if operands.segment_ids is None else operands.segment_ids[1]
    return operands.k, operands.v, kv_ids


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(steps: _RingPlan, operands: Operands) -> Outputs:
    def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
        moving, done, top = carry
        received = steps.passed_on(moving)  # before the computation, so that the two overlap
        source = steps.source(number)
        found = steps.local.forward(steps.index(source), _build_step_operands(operands, moving, source))
        done = softmax_merge.merge([done, build_part(found.out, found.logsumexp)])
        return (received, done, jnp.maximum(top, found.max_logits)), None

    q, v = operands.q, operands.v
    nothing = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, jnp.float32)
    start = build_part(jnp.zeros((*q.shape[:3], v.shape[3]), jnp.float32), nothing)
    begin = mark_varying((_list_moving(operands), start, nothing), find_varying_axes(operands))
    (_, done, top), _ = lax.scan(step, begin, jnp.arange(steps.devices, dtype=jnp.int32))
    return Outputs(*restore_results(done), top)


def _forward(steps: _RingPlan, operands: Operands) -> tuple[Outputs, Any]:
    outputs = _attend(steps, operands)
    return outputs, (operands, outputs.out, outputs.logsumexp)


def _backward(steps: _RingPlan, saved: Any, cotangents: Outputs) -> tuple[Operands]:
    operands, out, logsumexp = saved
    do, dlse = cotangents.out, cotangents.logsumexp
    shift = dlse - _compute_row_sums(do, out)

    def of_step(found: Outputs) -> tuple[jax.Array, jax.Array]:
        weight = compute_share(found.logsumexp, logsumexp)
        return do * transpose_rows(weight), weight * (_compute_row_sums(do, found.out) + shift)

    def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
        moving, travelling, dq, dbias = carry
        source = steps.source(number)
        at = _build_step_operands(operands, moving, source)
        found = steps.local.backward(steps.index(source), at, of_step)
        dk, dv = travelling
        travelling = (dk + found.k, dv + found.v)
        dbias = _add_columns(dbias, found.bias, source, at.k.shape[1])
        return (*steps.passed_on((moving, travelling)), dq + found.q, dbias), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands._replace(segment_ids=None))
    carry = (_list_moving(operands), (zeros.k, zeros.v), zeros.q, zeros.bias)
    carry = mark_varying(carry, find_varying_axes(operands))
    (_, (dk, dv), dq, dbias), _ = lax.scan(step, carry, jnp.arange(steps.devices, dtype=jnp.int32))
    found = Operands(dq, dk, dv, dbias, None, None)
    return (jax.tree.map(lambda x, like: x.astype(like.dtype), found, operands._replace(segment_ids=None)),)


_attend.defvjp(_forward, _backward)


def _compute_row_sums(do: jax.Array, out: jax.Array) -> jax.Array:
    """Compute `<do, out>` of each row, `[B, N, T]`."""
    return jnp.einsum("btnv,btnv->bnt", do, out, precision="highest")


def _add_columns(total: Any, part: Any, source: jax.Array, length: int) -> Any:
    """Add `part`, the bias gradient in the columns of device `source`, to the bias gradient `total`."""
    if total is None:
        return None
    part = part.astype(jnp.float32)
    if total.shape[3] == 1:
        return total + part
    old = lax.dynamic_slice_in_dim(total, source * length, length, axis=3)
    return lax.dynamic_update_slice_in_dim(total, old + part, source * length, axis=3)
