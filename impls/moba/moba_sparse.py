"""Block-sparse mixture of block attention (MoBA): the public call and its derivative rule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from cases.masks import Mask
from impls.derivative_refusals import refuse_derivatives, refuse_reverse_mode
from impls.explicit_sharding import accept_explicit_sharding
from impls.jax_compat import Interpret, resolve_interpret
from impls.moba.backward import backward
from impls.moba.forward import Outputs, forward
from impls.moba.moba_blocks import Operands, flatten_rows, split_bins
from impls.moba.moba_plan import Backend, MobaPlan, MobaWork, choose_chunks, divide_work, validate_moba
from impls.moba.moba_tpu import fit_block_rows
from impls.pallas_tpu.tpu_tiles import LANES
from impls.varying_axes import find_varying_axes, mark_varying

# Largest number of queries per block, by backend. docs/measurements/tpu-cycles.md has the cycles behind that for TPU.
_MAX_ROWS: Mapping[Backend, int] = {"portable": 256, "tpu": 512}


@accept_explicit_sharding
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask,
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    save_residuals: bool = False,
    most_rows: int | None = None,
    backend: Backend = "portable",
    keys_together: int = 1024,
    interpret: Interpret = None,
) -> Any:
    """Compute mixture of block attention (Lu et al. 2025, arXiv:2502.13189), only for the selected chunks.

    A query attends to the keys of its own chunk up to its own position. It also attends to the `topk - 1` earlier
    chunks with the highest gates `<q_i, mean of the chunk's keys>`; ties go to the earlier chunk. The gates are
    computed in f32 and get no gradient. The queries that selected a chunk are gathered into blocks, so that the work is
    proportional to `T * topk * chunk`. Memory is linear in the lengths.

    Every operand is differentiable in reverse mode. So is `logsumexp`; `max_logits` has gradient zero. The residuals of
    the backward pass are tagged `"out"` and `"logsumexp"` for `jax.checkpoint` policies.

    The operands and results are those of the contract (docs/contract.md, section 1).

    Args:
      q: queries `[B, T, N, H]`; query `i` is at position `i + mask.offset`, `S - 1` in decode.
      mask: a `cases.moba_mask.Moba`.
      soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`; not applied to the gates.
      bias: broadcastable to `[B, N, T, S]`, added after the scale and before the soft cap; not added to the gates.
      most_rows: largest number of queries per block, a power of two. By default 256, or 512 on a TPU, where it is
        reduced to fit VMEM.
      backend: `"tpu"` for the Pallas kernels (`impls.moba.moba_tpu`), which support no bias and no f16.
      keys_together: keys of a chunk that the TPU kernels compute at once, a multiple of 128.
      interpret: `interpret` of the TPU kernels' `pallas_call`; by default true unless the process runs on a TPU.

    Raises:
      ValueError: an operand, the mask or an option is invalid; the message names it.
      NotImplementedError: there are segment ids, or the mask is not a `Moba`. For the TPU kernels also: there is a
        bias, operands are f16, or chunks do not fit VMEM.
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
    used = moba.offset + q.shape[1]  # keys after the last query's position are never attended to
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
    """Return the wrapper that refuses second derivatives, and on TPU, where the grid length is traced, forward mode."""
    return refuse_derivatives if plan.backend == "tpu" else refuse_reverse_mode


def _flash_forward(plan: MobaPlan, operands: Operands, work: MobaWork) -> tuple[Outputs, _Residuals]:
    outputs = _get_derivative_refusal(plan)("moba", functools.partial(forward, plan), operands, work)
    out = checkpoint_name(outputs.out, "out")
    logsumexp = checkpoint_name(outputs.logsumexp, "logsumexp")
    return Outputs(out, logsumexp, outputs.max_logits), (operands, work, out, logsumexp)


def _flash_backward(plan: MobaPlan, residuals: _Residuals, cotangents: Outputs) -> tuple[Operands, None]:
    pull_back = functools.partial(backward, plan)
    return _get_derivative_refusal(plan)("moba", pull_back, *residuals, cotangents.out, cotangents.logsumexp), None


_flash.defvjp(_flash_forward, _flash_backward)

# Jitted so that calls outside `jit` compile once for each plan, not once a call.
_attend = jax.jit(_choose_and_attend, static_argnums=0)
