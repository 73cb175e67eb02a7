"""Find and mark the mesh axes over which arrays vary inside `shard_map`.

`shard_map` requires that the carry of a loop has the same varying axes from its start to its end.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from impls.block_arithmetic import make_shape


def find_varying_axes(x: Any) -> frozenset[str]:
    """Find the mesh axes over which any array of `x` varies between devices; empty outside `shard_map`."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(x)))


def mark_varying(x: Any, axes: frozenset[str]) -> Any:
    """Mark the arrays of `x` as varying over `axes`, as `shard_map` requires of a loop's carry before the loop."""

    def mark(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(leaf).manual_axis_type.varying))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, x)


def mark_shapes_varying(shapes: Any, like: Any) -> Any:
    """Mark the `jax.ShapeDtypeStruct`s of a kernel's results as varying over the same axes as `like`."""
    varying = jax.typeof(like).manual_axis_type

    return jax.tree.map(lambda x: make_shape(x.shape, x.dtype, varying), shapes)
