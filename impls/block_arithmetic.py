"""Arithmetic on blocks that kernels of every back end share: products in f32, exponentials, and shapes of results.

Kernels compute exponentials as powers of two, for which chips have an instruction. Tiles hold logits divided by a
factor, their unit: `z = unit y`. So `exp(z - m)` is `2 ** (c y - c m)` with `c = unit log2(e)`, which takes one fused
multiply-add before the power. The product `c m` is rounded once and stored. A block that does not raise m then
subtracts a stored value from itself, which gives exactly 0. Otherwise the weights of a long row would drift with each
block.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Integer, Shaped

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


def compute_exp(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Compute `e ** x` as a power of two, for which GPUs have an instruction."""
    return jnp.exp2(x * jnp.float32(LOG2_E))


def convert_sinks(sinks: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Convert sinks to units of log 2, at most the largest float32: a sink that large takes all the weight anyway."""
    return jnp.minimum(sinks * jnp.float32(LOG2_E), np.finfo(np.float32).max)


def replace_neg_inf(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Replace -inf by 0, so that `exp(-inf - x)` is 0 and not NaN."""
    return jnp.where(x == -jnp.inf, 0.0, x)


def make_shape(shape: tuple[int, ...], dtype: Any, varying: Any = None) -> jax.ShapeDtypeStruct:
    """Make the shape and dtype of an output, with the mesh axes over which it varies."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def take_block(x: Shaped[Array, " blocks *block"], index: Integer[Array, ""]) -> Shaped[Array, "*block"]:
    """Return block `index` of `x`."""
    block: Shaped[Array, "*block"] = lax.dynamic_index_in_dim(x, index, keepdims=False)
    return block


def put_block(
    x: Shaped[Array, " blocks *block"], block: Shaped[Array, "*block"], index: Integer[Array, ""]
) -> Shaped[Array, " blocks *block"]:
    """Replace block `index` of `x`. XLA does this in place inside a loop."""
    updated: Shaped[Array, " blocks *block"] = lax.dynamic_update_index_in_dim(x, block, index, 0)
    return updated


def multiply(equation: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Contract two operands of one dtype by an einsum equation, accumulating in f32."""
    precision = _choose_precision(a)
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def compute_dsinks(
    sinks: Float[Array, " N"] | None, shift: Float32[Array, "B N T"], row_sums: Float32[Array, "B N T"]
) -> Float[Array, " N"] | None:
    """Compute the gradient of the sinks from `row_sums = D - dlse`, equation (17) of `impls/__init__.py`.

    `shift` is `logsumexp`, replaced by any number where a query attends to nothing.
    """
    if sinks is None:
        return None
    p = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - shift)
    return -(p * row_sums).sum(axis=(0, 2)).astype(sinks.dtype)  # dsinks, equation (17)


def multiply_tiles(
    a: jax.Array, b: jax.Array, over: tuple[int, int], *, exact: bool = True, widen: bool = False
) -> jax.Array:
    """Multiply two tiles in f32, contracting axis `over[0]` of `a` with axis `over[1]` of `b`.

    Args:
      exact: whether f32 is multiplied exactly, and not as the chip does by default.
      widen: whether bf16 is converted to f32 first, for interpreters. The result is the same, since a product of two
        bf16 is exact in f32. XLA multiplies f32 on a CPU ten times faster.
    """
    precision = _choose_precision(a) if exact else lax.Precision.DEFAULT
    if widen and a.dtype == b.dtype == jnp.bfloat16:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _choose_precision(x: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
