"""Exponentials of f32 as a GPU computes them, and of what may be -inf.

A GPU has an instruction for powers of two. So logits are kept in a unit of which they are a multiple, `z = unit y`, and
`exp(z - m)` is `2 ** (c y - c m)` with `c = unit log2(e)`: one multiplication that also subtracts. The product `c m` is
rounded, once: whatever is subtracted from itself must give 0, or the weight of a long row drifts with each block.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def compute_exp(x: jax.Array) -> jax.Array:
    """`e ** x`, as the power of two that GPUs have an instruction for."""
    return jnp.exp2(x * jnp.float32(LOG2_E))


def compute_fused_exp2(x: jax.Array, shift: jax.Array, *, factor: float, interpret: object) -> jax.Array:
    """`2 ** (factor x - shift)` in a Triton kernel, with 0 for what would be subnormal; f32, all in one shape.

    These are a GPU's two instructions for it. Triton would multiply and subtract by two, and scale what is near the
    smallest numbers by a comparison and two multiplications, for values that add nothing to a sum which holds a 1.
    """
    if interpret:
        return jnp.exp2(x * jnp.float32(factor) - shift)
    constant = f"0f{np.float32(factor).view(np.uint32):08X}"  # as PTX writes the bits of a number
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)  # type: ignore[no-untyped-call] # untyped upstream
    (found,) = plt.elementwise_inline_asm(
        f"{{ .reg .f32 y; fma.rn.ftz.f32 y, $1, {constant}, $2; ex2.approx.ftz.f32 $0, y; }}",
        args=[x, jnp.broadcast_to(-shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[out],
    )
    return found


def replace_neg_inf(x: jax.Array) -> jax.Array:
    """`x` with -inf replaced by 0, so that `exp(-inf - x)` is 0 and not NaN."""
    return jnp.where(x == -jnp.inf, 0.0, x)
