"""Judge a function by ordinary pytest tests, as a test file does."""

from __future__ import annotations

from collections.abc import Callable

import jax

from conformance.testing import conformance_tests


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False) -> jax.Array:
    """Compute attention by JAX's own function."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)


test_attention: Callable[..., None] = conformance_tests(attention, level="smoke", checks=["forward"], products="exact")
