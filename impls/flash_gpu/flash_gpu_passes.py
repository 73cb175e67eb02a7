"""Forward and backward pass: dispatch each kernel to its back end, and compute the rest in XLA.

The kernels compute equations (1) to (10) and (12) to (16) of `impls/__init__.py`. XLA computes the other two here:

    (11) D_i = <out_i, dout_i>
    (17) dsink = sum_i exp(sink - logsumexp_i) (dlse_i - D_i)
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from impls.block_arithmetic import compute_dsinks, replace_neg_inf
from impls.flash_gpu.flash_gpu_arrays import Operands, Outputs, QueryRows
from impls.flash_gpu.mosaic import backward as mosaic_backward
from impls.flash_gpu.mosaic import forward as mosaic_forward
from impls.flash_gpu.tile_schedule import FlashGpuPlan
from impls.flash_gpu.triton import backward as triton_backward
from impls.flash_gpu.triton import forward as triton_forward


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
