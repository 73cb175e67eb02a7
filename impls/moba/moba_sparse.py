"""The block-sparse form: the public call and its derivative rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cases.masks import Mask
from impls.derivative_refusals import refuse_derivatives, refuse_reverse_mode
from impls.explicit_sharding import accept_explicit_sharding
from impls.jax_compat import resolve_interpret
from impls.moba.backward import backward
from impls.moba.forward import Outputs, forward
from impls.moba.moba_blocks import Operands, flatten_rows, split_bins
from impls.moba.moba_gate import choose_chunks
from impls.moba.moba_operands import validate_moba
from impls.moba.moba_plan import Backend, MobaPlan, MobaWork, divide_work
from impls.moba.moba_tpu import fit_block_rows
from impls.splash_tpu.block_sizes import LANES
from impls.varying_axes import find_varying_axes, mark_varying

# Of those of a TPU's kernels see docs/hardware.md.
_MAX_ROWS: Mapping[Backend, int] = {"portable": 256, "tpu": 512}


@accept_explicit_sharding
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    most_rows: int | None = None,
    backend: Backend = "portable",
    keys_together: int = 1024,
    interpret: Any = None,
) -> Any:
    """Mixture of block attention (Lu et al. 2025, arXiv:2502.13189), computing only what queries choose.

    A query attends to the keys up to its own in its own chunk, and to the `topk - 1` earlier chunks of the highest
    `<q_i, mean of the chunk's keys>`, ties going to the earlier chunk. The gates are computed in f32 and get no
    gradient. Queries that take a chunk are gathered in blocks, so that work and memory follow `T * topk * chunk`, and
    memory is linear in the lengths.

    Every operand is differentiable in reverse mode, and `logsumexp` is; `max_logits` has gradient zero. The residuals
    of the backward are tagged `"out"` and `"logsumexp"` for `jax.checkpoint` policies.

    Args:
      q: queries `[B, T, N, H]`; query `i` is at position `i + mask.offset`, `S - 1` in decode.
      k: keys `[B, S, K, H]`, `N % K == 0`; the last chunk may be shorter.
      v: values `[B, S, K, V]`.
      mask: a `cases.moba_mask.Moba`.
      segment_ids: must be None.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; the gates have none.
      sinks: `[N]`, one more logit in each query head's softmax denominator.
      bias: broadcastable to `[B, N, T, S]`, added after the scale and before the soft cap; the gates have none.
      scale: factor of `<q, k>`, default `1 / sqrt(H)`.
      save_residuals: also return `logsumexp` and `max_logits`.
      most_rows: queries a block at most, a power of two; by default 256, and 512 on a TPU, fewer where VMEM has no
        room for them.
      backend: `"tpu"` for kernels in Pallas (`impls.moba.moba_tpu`), which take no bias and no f16.
      keys_together: of these, how many keys of a chunk are computed at a time, a multiple of 128.
      interpret: of these, as `pallas_call` takes it; by default wherever the process does not compute on a TPU.

    Returns:
      `out [B, T, N, V]` in q's dtype, or `(out, {"logsumexp": ..., "max_logits": ...})`, both f32 `[B, N, T]`.

    Raises:
      ValueError: an operand, the mask or an option is not as above; the message names it.
      NotImplementedError: segment ids, or another mask than `Moba`; on a TPU's back end, bias, f16, or chunks
        that VMEM has no room for.
    """
    moba = validate_moba(
        q, k, v, mask=mask, segment_ids=segment_ids, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale
    )
    if backend not in _MAX_ROWS:
        raise ValueError(f"backend must be 'portable' or 'tpu', got {backend!r}")
    most_rows = _MAX_ROWS[backend] if most_rows is None else most_rows
    if most_rows < 1:
        raise ValueError(f"most_rows must be at least 1, got {most_rows}")
    if backend == "tpu":
        _reject_tpu_operands(q, bias, keys_together)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    used = moba.offset + q.shape[1]  # nobody attends to what comes after the last query
    if bias is not None:
        bias = jnp.asarray(bias)
        bias = bias if bias.shape[3] == 1 else bias[..., :used]
    sinks = None if sinks is None else jnp.asarray(sinks)
    operands = Operands(q, k[:, :used], v[:, :used], bias, sinks)
    plan = MobaPlan(
        moba=moba,
        batch=q.shape[0],
        num_q_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        q_length=q.shape[1],
        kv_length=used,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        bias_shape=None if bias is None else bias.shape,
        most_rows=most_rows,
        backend=backend,
        keys_together=keys_together,
        interpret=resolve_interpret(interpret, "tpu"),
    )
    if backend == "tpu":
        plan = fit_block_rows(plan, (q.shape[3], v.shape[3]), q.dtype.itemsize)
    outputs = _attend(plan, mark_varying(operands, find_varying_axes(operands)))
    if not save_residuals:
        return outputs.out
    return outputs.out, {"logsumexp": outputs.logsumexp, "max_logits": outputs.max_logits}


def _reject_tpu_operands(q: jax.Array, bias: jax.Array | None, keys_together: int) -> None:
    if keys_together < LANES or keys_together % LANES:
        raise ValueError(f"keys_together must be a multiple of {LANES}, got {keys_together}")
    if bias is not None:
        raise NotImplementedError("moba does not support bias with backend='tpu'; take backend='portable'")
    if q.dtype == jnp.float16:
        raise NotImplementedError("moba does not support q, k and v in float16 with backend='tpu': a TPU has none")


def _choose_and_attend(plan: MobaPlan, operands: Operands) -> Outputs:
    q, k = (lax.stop_gradient(x) for x in (operands.q, operands.k))
    rows = flatten_rows(plan, q).reshape(plan.lanes, plan.rows, -1)
    keys = split_bins(plan, k).reshape(plan.lanes, plan.chunks, plan.moba.chunk, -1)
    return _flash(plan, operands, divide_work(plan, choose_chunks(plan.moba, rows, keys, plan.position)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: MobaPlan, operands: Operands, work: MobaWork) -> Outputs:
    return forward(plan, operands, work)


_Residuals = tuple[Operands, MobaWork, jax.Array, jax.Array]


def _get_derivative_refusal(plan: MobaPlan) -> Callable[..., Any]:
    """What refuses second derivatives: JAX interprets no derivative of a kernel whose grid is as long as the work."""
    return refuse_derivatives if plan.backend == "tpu" else refuse_reverse_mode


def _flash_forward(plan: MobaPlan, operands: Operands, work: MobaWork) -> tuple[Outputs, _Residuals]:
    outputs = _get_derivative_refusal(plan)("moba", functools.partial(forward, plan), operands, work)
    out = checkpoint_name(outputs.out, "out")  # type: ignore[no-untyped-call]  # JAX leaves it untyped
    logsumexp = checkpoint_name(outputs.logsumexp, "logsumexp")  # type: ignore[no-untyped-call]  # likewise
    return Outputs(out, logsumexp, outputs.max_logits), (operands, work, out, logsumexp)


def _flash_backward(plan: MobaPlan, residuals: _Residuals, cotangents: Outputs) -> tuple[Operands, None]:
    pull_back = functools.partial(backward, plan)
    return _get_derivative_refusal(plan)("moba", pull_back, *residuals, cotangents.out, cotangents.logsumexp), None


_flash.defvjp(_flash_forward, _flash_backward)

# Jitted so that calls outside `jit` compile once for each plan, not once a call.
_attend = jax.jit(_choose_and_attend, static_argnums=0)
