"""The flags of the process: what XLA compiles on CPU under them is right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@jax.jit
def product_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Sum of products over the last axis and two axes of size 1, as the D of a backward pass under two vmaps."""
    long = (1, 1, *x.shape)
    return jnp.sum(x.astype(jnp.float32).reshape(long) * y.astype(jnp.float32).reshape(long), axis=(0, 1, 4))


@pytest.mark.parametrize("shape", [(1, 128, 64), (8, 100, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_sum_of_products_is_compiled_soundly(shape: tuple[int, ...], dtype: str):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    exact = (np.asarray(x, np.float64) * np.asarray(y, np.float64)).sum(-1)
    np.testing.assert_allclose(product_sum(x, y), exact, atol=1e-4)
