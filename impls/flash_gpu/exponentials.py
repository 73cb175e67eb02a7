"""Exponentials of f32 as powers of two, for which GPUs have an instruction, and exponentials of -inf.

Tiles hold logits divided by a factor, their unit: `z = unit y`. So `exp(z - m)` is `2 ** (c y - c m)` with
`c = unit log2(e)`, which takes one fused multiply-add before the power. The product `c m` is rounded once and stored.
A block that does not raise m then subtracts a stored value from itself, which gives exactly 0. Otherwise the weights
of a long row would drift with each block.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def compute_exp(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Compute `e ** x` as a power of two, for which GPUs have an instruction."""
    return jnp.exp2(x * jnp.float32(LOG2_E))


def compute_fused_exp2(x: jax.Array, shift: jax.Array, *, factor: float, interpret: object) -> jax.Array:
    """Compute `2 ** (factor x - shift)` in a Triton kernel, flushing subnormal results to 0; all f32 in one shape.

    This takes two GPU instructions. Triton's own power of two takes more: a separate multiplication and subtraction,
    then a comparison and two multiplications that scale very small values. These values add nothing to a sum that
    contains a 1.
    """
    if interpret:
        return jnp.exp2(x * jnp.float32(factor) - shift)
    constant = f"0f{np.float32(factor).view(np.uint32):08X}"  # PTX syntax for the bits of an f32
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (found,) = plt.elementwise_inline_asm(
        f"{{ .reg .f32 y; fma.rn.ftz.f32 y, $1, {constant}, $2; ex2.approx.ftz.f32 $0, y; }}",
        args=[x, jnp.broadcast_to(-shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[out],
    )
    return found


def convert_sinks(sinks: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Convert sinks to units of log 2. The largest would overflow, so they stop at the largest float32.

    Such a sink takes all the weight either way.
    """
    return jnp.minimum(sinks * jnp.float32(LOG2_E), np.finfo(np.float32).max)


def replace_neg_inf(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Replace -inf by 0, so that `exp(-inf - x)` is 0 and not NaN."""
    return jnp.where(x == -jnp.inf, 0.0, x)
