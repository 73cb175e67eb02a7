"""Pass heads through attention modules that project their inputs: with identity weights, a projection changes nothing.

A module takes features `[B, T, N * H]`, and splits them into heads after its own projection. The product of a number
and an identity matrix is exact in every dtype, forward and backward, if it is not rounded to fewer bits on the way. So
an adapter calls its module under `jax.default_matmul_precision("highest")`, or sets the module's own precision.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_heads(x: Float[Array, "B T N H"]) -> Float[Array, "B T NH"]:
    """Return the features of all heads, head by head."""
    return x.reshape(*x.shape[:2], -1)


def split_heads(x: Float[Array, "B T NH"], num_heads: int) -> Float[Array, "B T N H"]:
    """Return the features of each head; the inverse of `merge_heads`."""
    return x.reshape(*x.shape[:2], num_heads, -1)


def initialize_identity(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, *unused: Any, **others: Any) -> Any:
    """Initialise weights as an identity matrix whose axes may be split, as in `[N * H, N, H]`."""
    del key, unused, others
    return jnp.eye(math.isqrt(math.prod(shape)), dtype=dtype).reshape(shape)
