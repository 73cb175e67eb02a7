"""Tiles of Triton kernels: guarded loads and stores, products, and powers of two.

The sides of a tile are powers of two; those of the operands need not be. The part of a tile beyond its array, in the
length or in the depth, is never read. It is zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from impls.block_arithmetic import make_shape
from impls.jax_compat import Ref, Scalar

# The smallest side of an operand of Triton's matrix product.
MIN_TILE = 16


def round_up_to_tile(size: int) -> int:
    """Round `size` up to the side of a tile: the next power of two, at least `MIN_TILE`."""
    return max(MIN_TILE, 1 << (size - 1).bit_length())


def compute_fused_exp2(x: jax.Array, shift: jax.Array, *, factor: float, interpret: object) -> jax.Array:
    """Compute `2 ** (factor x - shift)` in a Triton kernel, flushing subnormal results to 0; all f32 in one shape.

    This takes two GPU instructions. Triton's own power of two takes more: a separate multiplication and subtraction,
    then a comparison and two multiplications that scale very small values. These values add nothing to a sum that
    contains a 1.
    """
    if interpret:
        return jnp.exp2(x * jnp.float32(factor) - shift)
    constant = f"0f{np.float32(factor).view(np.uint32):08X}"  # PTX syntax for the bits of an f32
    out = make_shape(x.shape, x.dtype)
    (found,) = plt.elementwise_inline_asm(
        f"{{ .reg .f32 y; fma.rn.ftz.f32 y, $1, {constant}, $2; ex2.approx.ftz.f32 $0, y; }}",
        args=[x, jnp.broadcast_to(-shift, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[out],
    )
    return found


def compute_positions(start: Scalar, size: int) -> jax.Array:
    """Compute `start, ..., start + size - 1`, int32."""
    return start + jnp.arange(size, dtype=jnp.int32)


def load_rows(
    ref: Ref,
    start: Scalar,
    size: int,
    length: int,
    depth: int,
    head: Scalar = None,
    at: Scalar = None,
    there: Any = None,
) -> jax.Array:
    """Load a tile `[size, depth of the tile]` of rows `start, ...` of an array `[length, (heads,) depth]`.

    The rows begin at `at` in `ref`. Rows for which `there`, booleans `[size]`, is False are not read either.
    """
    at = start if at is None else at
    rows = ref.at[pl.ds(at, size), :] if head is None else ref.at[pl.ds(at, size), jnp.int32(head), :]
    mask = find_existing(start, size, length, ref.shape[-1], depth)
    if there is not None:
        there = jnp.broadcast_to(there[:, None], (size, ref.shape[-1]))
        mask = there if mask is None else mask & there
    return plt.load(rows) if mask is None else plt.load(rows, mask=mask, other=0)


def store_rows(ref: Ref, start: Scalar, tile: jax.Array, length: int, depth: int) -> None:
    """Store rows `start, ...` of an array `[length, depth]`, of which `ref` is a block."""
    mask = find_existing(start, tile.shape[0], length, tile.shape[1], depth)
    plt.store(ref, tile.astype(ref.dtype), mask=mask)


def find_existing(start: Scalar, size: int, length: int, columns: int, depth: int) -> jax.Array | None:
    """Find which elements of a tile exist, booleans `[size, columns]`; None if all always do."""
    if length % size == 0 and columns == depth:
        return None
    rows = compute_positions(start, size)[:, None] < length
    return rows & (jnp.arange(columns, dtype=jnp.int32)[None, :] < depth)


def load_values(ref: Ref, start: Scalar, size: int, length: int, head: Scalar = None, at: Scalar = None) -> jax.Array:
    """Load a tile `[size]` of values `start, ...` of an array `[(heads,) length]`, at `at` in `ref`."""
    at = start if at is None else at
    values = ref.at[pl.ds(at, size)] if head is None else ref.at[jnp.int32(head), pl.ds(at, size)]
    if length % size == 0:
        return plt.load(values)
    return plt.load(values, mask=compute_positions(start, size) < length, other=0)


def store_values(ref: Ref, start: Scalar, values: jax.Array, length: int) -> None:
    """Store values `start, ...` of an array `[length]`, of which `ref` is a block."""
    size = values.shape[0]
    plt.store(ref, values, mask=None if length % size == 0 else compute_positions(start, size) < length)


def find_seen_keys(allowed: jax.Array) -> jax.Array:
    """Find the keys of a tile `[queries, keys]` that any query may attend to, `[keys, 1]`."""
    # Triton reduces numbers, not booleans.
    return (jnp.max(allowed.astype(jnp.int32), axis=0) > 0)[:, None]


def zero_hidden_rows(tile: jax.Array, visible: jax.Array | None) -> jax.Array:
    """Zero the rows of `tile` that are not visible: they may be NaN, and 0 * NaN is not 0."""
    return tile if visible is None else jnp.where(visible, tile, jnp.zeros_like(tile))
