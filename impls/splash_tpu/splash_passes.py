"""Forward and backward pass: pad operands to whole blocks, run the kernels, and compute the rest in XLA.

The kernels compute equations (1) to (10) and (12) to (15) of `impls/__init__.py`. XLA computes the others here:

    (11) D_i = <out_i, dout_i>
    (17) dsink = sum_i exp(sink - logsumexp_i) (dlse_i - D_i)

If dq comes from the fused kernel, XLA also multiplies it by the scale, as in equation (14).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from impls.block_arithmetic import compute_dsinks, make_shape
from impls.pallas_tpu.tpu_tiles import LANES
from impls.splash_tpu.dkv_kernel import compute_dkv
from impls.splash_tpu.dq_kernel import compute_dq
from impls.splash_tpu.forward import forward
from impls.splash_tpu.splash_launch import Inputs, Outputs
from impls.splash_tpu.splash_plan import KernelCall, Operands, SplashPlan, build_call
from impls.splash_tpu.splash_schedule import Steps


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepLists:
    """Steps of each phase, and the position of the first query. The first axis of every list is the shard."""

    forward: Steps
    dq: Steps | None  # None if the backward pass is fused
    dkv: Steps
    q_offset: Any  # int32 [shards]


def run_forward(plan: SplashPlan, lists: StepLists, operands: Operands) -> Outputs:
    """Compute `out [B, N, T, V]`, and f32 `[B, N, T]` `logsumexp` and, if the plan says so, `max_logits`."""
    call = build_call("forward", plan, operands)
    batch, heads, length = operands.q.shape[:3]
    row = make_shape((batch * heads, 1, call.q_padded), jnp.float32)
    shapes = Outputs(
        out=make_shape((batch * heads, call.q_padded, call.head_dim_v), operands.q.dtype),
        logsumexp=row,
        max_logits=row if plan.save_max_logits else None,
    )
    found = forward(call, lists.forward, lists.q_offset, _build_inputs(call, operands, lists.forward), shapes)

    def rows(x: jax.Array) -> jax.Array:
        return x[:, 0, :length].reshape(batch, heads, length)

    return Outputs(
        out=_split_batch(found.out[:, :length], batch),
        logsumexp=rows(found.logsumexp),
        max_logits=None if found.max_logits is None else rows(found.max_logits),
    )


def run_backward(
    plan: SplashPlan,
    lists: StepLists,
    operands: Operands,
    out: Float[Array, "B N T V"],
    logsumexp: Float32[Array, "B N T"],
    do: Float[Array, "B N T V"],
    dlse: Float32[Array, "B N T"],
) -> Operands:
    """Compute the gradients of the operands for cotangents `do` of `out` and `dlse` of `logsumexp`."""
    # The barrier keeps XLA from fusing these with earlier operations. Fusing takes 33 MiB of HBM at length 32768 and
    # depth 256 on v6e (libtpu 0.0.42.1).
    out, do = jax.lax.optimization_barrier((out, do))  # type: ignore[no-untyped-call]  # JAX leaves it untyped
    # D, equation (11)
    row_sums = jnp.einsum("bntv,bntv->bnt", out, do, precision="highest", preferred_element_type=jnp.float32) - dlse
    # Queries that attended to nothing get probabilities of zero.
    shift = jnp.where(logsumexp == plan.mask_value, jnp.inf, logsumexp)
    dsinks = compute_dsinks(operands.sinks, shift, row_sums)  # dsinks, equation (17)

    def inputs(call: KernelCall, steps: Steps) -> Inputs:
        rows = call.q_padded - call.plan.q_length
        return _build_inputs(call, dataclasses.replace(operands, sinks=None), steps)._replace(
            do=_merge_batch(_pad_axis(do.astype(operands.q.dtype), 2, call.q_padded)),
            logsumexp=_merge_batch(jnp.pad(shift, ((0, 0), (0, 0), (0, rows)), constant_values=jnp.inf)[:, :, None]),
            row_sums=_merge_batch(_pad_axis(row_sums, 2, call.q_padded)[:, :, None]),
        )

    call = build_call("dkv", plan, operands)
    given = inputs(call, lists.dkv)
    batch, q_heads, q_length, head_dim = operands.q.shape
    kv_heads, kv_length = operands.k.shape[1:3]
    shapes = Outputs(
        dq=make_shape((batch * q_heads, call.q_padded, head_dim), jnp.float32) if call.fused else None,
        dk=make_shape((batch * kv_heads, call.kv_padded, head_dim), operands.k.dtype),
        dv=make_shape((batch * kv_heads, call.kv_padded, call.head_dim_v), operands.v.dtype),
    )
    if call.fused:
        given = given._replace(dq=jnp.zeros((batch * q_heads, call.q_padded, head_dim), jnp.float32))
    found = compute_dkv(call, lists.dkv, lists.q_offset, given, shapes)
    if call.fused:
        dq = (found.dq * jnp.float32(call.scale)).astype(operands.q.dtype)  # dq, equation (14)
    else:
        assert lists.dq is not None
        call = build_call("dq", plan, operands)
        shape = make_shape((batch * q_heads, call.q_padded, head_dim), operands.q.dtype)
        dq = compute_dq(call, lists.dq, lists.q_offset, inputs(call, lists.dq), Outputs(dq=shape)).dq
    return Operands(
        q=_split_batch(dq[:, :q_length], batch),
        k=_split_batch(found.dk[:, :kv_length], batch),
        v=_split_batch(found.dv[:, :kv_length], batch),
        sinks=dsinks,
        q_ids=None,
        kv_ids=None,
    )


def _build_inputs(call: KernelCall, operands: Operands, steps: Steps) -> Inputs:
    """Pad the operands to whole blocks and transpose them to their layouts."""
    layouts = call.plan.layouts

    def tiles(x: jax.Array, length: int, layout: str) -> jax.Array:
        x = _merge_batch(_pad_axis(x, 2, length))
        return x if layout == "head_dim_minor" else x.swapaxes(1, 2)

    sinks = operands.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (len(sinks), 1, LANES))

    def row(x: jax.Array | None, length: int) -> jax.Array | None:
        return None if x is None else _pad_axis(x, 1, length)[:, None]

    return Inputs(
        q=tiles(operands.q, call.q_padded, layouts.q),
        k=tiles(operands.k, call.kv_padded, layouts.k),
        v=tiles(operands.v, call.kv_padded, layouts.v),
        q_ids=row(operands.q_ids, call.q_padded),
        kv_ids=row(operands.kv_ids, call.kv_padded),
        low=row(operands.low, call.q_padded),
        high=row(operands.high, call.q_padded),
        sinks=sinks,
        stored=steps.stored,
    )


def _pad_axis(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Pad `x` with zeros to `length` along `axis`."""
    missing = length - x.shape[axis]
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


def _merge_batch(x: Shaped[Array, "B N *rest"]) -> Shaped[Array, " B*N *rest"]:
    """Merge batch and heads: `[B, N, ...]` to `[B * N, ...]`."""
    return x.reshape(-1, *x.shape[2:])


def _split_batch(x: Shaped[Array, " BN *rest"], batch: int) -> Shaped[Array, "{batch} N *rest"]:
    """Invert `_merge_batch`."""
    return x.reshape(batch, -1, *x.shape[1:])
