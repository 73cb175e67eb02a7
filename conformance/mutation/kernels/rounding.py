"""Rounding to fewer bits than a value's dtype has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` with the precision of `dtype`; a pair of casts may be optimised away, this is not."""
    bits = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)
