"""Flash attention for GPUs: the public call, its derivative rule, and the forward and the backward pass.

The call validates its operands, builds the static plan of the call, and runs the forward pass. JAX runs the backward
pass through a `custom_vjp`. Each kernel has a back end, Triton or Mosaic GPU. The kernels compute equations (1) to (10)
and (12) to (16) of `impls/__init__.py`; XLA computes (11) and (17) here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int

from cases.masks import Full, Indexer, Mask, iter_leaves
from impls.block_arithmetic import compute_dsinks, replace_neg_inf
from impls.contract.implementation import validate_mask, validate_operands
from impls.derivative_refusals import refuse_derivatives
from impls.dropout_bits import validate_dropout
from impls.explicit_sharding import accept_explicit_sharding
from impls.flash_gpu.block_sizes import BlockSizes, look_up
from impls.flash_gpu.mosaic import backward as mosaic_backward
from impls.flash_gpu.mosaic import forward as mosaic_forward
from impls.flash_gpu.pallas_backends import Backend, choose_mosaic_kernels, fit_rings
from impls.flash_gpu.tile_schedule import FlashGpuPlan, Operands, Outputs, QueryRows
from impls.flash_gpu.triton import backward as triton_backward
from impls.flash_gpu.triton import forward as triton_forward
from impls.jax_compat import Interpret, get_device_kind, resolve_interpret
from impls.varying_axes import find_varying_axes, mark_varying


def run_forward(plan: FlashGpuPlan, operands: Operands) -> Outputs:
    """Compute attention. Device memory holds only operands, outputs and the schedule."""
    kernel = mosaic_forward if "forward" in plan.mosaic else triton_forward
    return kernel.forward(plan, operands)


def run_backward(
    plan: FlashGpuPlan,
    operands: Operands,
    out: Float[Array, "B T N V"],
    logsumexp: Float32[Array, "B N T"],
    d_out: Float[Array, "B T N V"],
    d_logsumexp: Float32[Array, "B N T"],
) -> Operands:
    """Compute the gradient of every operand except segment ids and ranges, in the operand's shape and dtype."""
    weighted = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1)  # D, equation (11)
    row_sums = weighted.transpose(0, 2, 1) - d_logsumexp
    if operands.ranges is not None:
        # Cotangents of queries outside all sequences may be any values, and must not reach the gradient of the sinks.
        real = jnp.arange(plan.q_length, dtype=jnp.int32) < operands.ranges.tokens
        row_sums = jnp.where(real, row_sums, 0.0)
    rows = QueryRows(d_out, replace_neg_inf(logsumexp), row_sums)
    dk, dv = (mosaic_backward if "dkv" in plan.mosaic else triton_backward).compute_dkv(plan, operands, rows)
    return Operands(
        q=(mosaic_backward if "dq" in plan.mosaic else triton_backward).compute_dq(plan, operands, rows),
        k=dk,
        v=dv,
        bias=None if operands.bias is None else triton_backward.compute_dbias(plan, operands, operands.bias, rows),
        sinks=compute_dsinks(operands.sinks, rows.shift, row_sums),
        segment_ids=None,
    )


Products = Literal["exact", "tf32"]

UNSUPPORTED = {"indexer": "finds the tiles to visit before the program runs"}


@accept_explicit_sharding
def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    mask: Mask = Full(),
    segment_ids: tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N #T #S"] | None = None,
    scale: float | None = None,
    dropout_rate: float | None = None,
    dropout_key: jax.Array | None = None,
    save_residuals: bool = False,
    block_sizes: BlockSizes | None = None,
    products: Products = "exact",
    backend: Backend | None = None,
    interpret: Interpret = None,
) -> Any:
    """Compute softmax attention on a GPU, skipping tiles that the mask hides.

    The result is `out_i = sum_j softmax_j(cap(scale <q_i, k_j> + bias_ij)) v_j` over the allowed `j`, computed in tiles
    (Dao 2023, arXiv:2307.08691). Memory is linear in the lengths, except for the gradient of a bias, which takes one
    f32 value per pair. Tiles that the mask leaves empty are never visited, and full ones are not masked. Segment ids
    never skip a tile; they only mask inside tiles. Query heads share key/value heads (Ainslie et al. 2023,
    arXiv:2305.13245) without copies of k and v. Lengths and depths may be any: nothing beyond the arrays is read.

    Every operand is differentiable in reverse mode. So is `logsumexp`; `max_logits` has gradient zero. The residuals of
    the backward pass are tagged `"out"` and `"logsumexp"` for `jax.checkpoint` policies. A query that may attend to
    nothing gets `out = 0`, `logsumexp = -inf` (or its sink) and `max_logits = -inf`. It passes no gradient.

    The operands and results are those of the contract (docs/contract.md, section 1).

    Args:
      dropout_rate: the share of the weights that is dropped after the softmax (`impls.dropout_bits`).
      dropout_key: the key of `jax.random` that decides which weights are dropped.
      block_sizes: tiles and launch parameters of each kernel, by default those of `block_sizes.TABLE`. Tiles are
        clipped to the lengths.
      products: how f32 operands multiply on the GPU, exactly or rounded to tf32. An interpreter's products are exact.
      backend: the Pallas back end. `"triton"` serves Ampere to Blackwell, `"mosaic"` Hopper
        (`impls.flash_gpu.mosaic.mosaic_launch`); by default Mosaic for the kernels that were measured there to be right
        and faster, else Triton (`impls.flash_gpu.pallas_backends`).
      interpret: run in an interpreter, by default wherever the process does not compute on a GPU: Pallas's fast one for
        Triton, JAX's interpreter of Mosaic GPU for Mosaic, which takes its parameters here instead of `True`.

    Raises:
      ValueError: an operand, the mask or an option is invalid; the message names it.
      NotImplementedError: the mask has an `Indexer`, or Mosaic was requested and does not support the call or the GPU.
    """
    validate_operands(q, k, v, segment_ids=segment_ids, soft_cap=soft_cap, sinks=sinks, bias=bias, scale=scale)
    dropout_rate, dropout_key = validate_dropout(dropout_rate, dropout_key)
    batch, q_length, num_q_heads, head_dim = q.shape
    kv_length, num_kv_heads = k.shape[1:3]
    validate_mask(mask, batch, num_q_heads, q_length, kv_length)
    if any(isinstance(leaf, Indexer) for leaf in iter_leaves(mask)):
        raise NotImplementedError(f"flash_gpu does not support indexer: it {UNSUPPORTED['indexer']}")
    if products not in ("exact", "tf32"):
        raise ValueError(f"products must be 'exact' or 'tf32', got {products!r}")
    depth = max(head_dim, v.shape[3])
    if block_sizes is None:
        full_mask = isinstance(mask, Full) and segment_ids is None
        sizes = look_up(get_device_kind("gpu"), depth, q.dtype.itemsize, full_mask=full_mask).sizes
    else:
        sizes = block_sizes
    plan = FlashGpuPlan(
        mask=mask,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        q_length=q_length,
        kv_length=kv_length,
        head_dim=head_dim,
        v_head_dim=v.shape[3],
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        segmented=segment_ids is not None,
        exact=products == "exact",
        dropout_rate=dropout_rate,
        sizes=sizes.cut_to(q_length, kv_length),
        interpret=resolve_interpret(interpret, "gpu"),
    )
    given = Operands(q, k, v, bias, sinks, segment_ids, dropout_key=dropout_key)
    operands = jax.tree.map(jnp.asarray, given)
    if block_sizes is None:
        plan = dataclasses.replace(plan, sizes=fit_rings(plan))
    plan = dataclasses.replace(plan, mosaic=choose_mosaic_kernels(backend, plan, operands))
    outputs = attend(plan, mark_varying(operands, find_varying_axes(operands)))
    if not save_residuals:
        return outputs.out
    return outputs.out, {"logsumexp": outputs.logsumexp, "max_logits": outputs.max_logits}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(plan: FlashGpuPlan, operands: Operands) -> Outputs:
    return run_forward(plan, operands)


def _flash_forward(plan: FlashGpuPlan, operands: Operands) -> tuple[Outputs, tuple[Operands, jax.Array, jax.Array]]:
    outputs = refuse_derivatives(plan.name, functools.partial(run_forward, plan), operands)
    out = checkpoint_name(outputs.out, "out")
    logsumexp = checkpoint_name(outputs.logsumexp, "logsumexp")
    return Outputs(out, logsumexp, outputs.max_logits), (operands, out, logsumexp)


def _flash_backward(
    plan: FlashGpuPlan, residuals: tuple[Operands, jax.Array, jax.Array], cotangents: Outputs
) -> tuple[Operands]:
    pull_back = functools.partial(run_backward, plan)
    return (refuse_derivatives(plan.name, pull_back, *residuals, cotangents.out, cotangents.logsumexp),)


_flash.defvjp(_flash_forward, _flash_backward)

# Jitted so that calls outside `jit` compile once for each plan, not once for each call.
attend = jax.jit(_flash, static_argnums=0)
