"""Over which mesh axes arrays differ inside `shard_map`, which demands that a loop's carry says so from the start."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def find_varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which any array of `x` differs between devices; empty outside `shard_map`."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(x)))


def mark_varying(x: Any, axes: frozenset[str]) -> Any:
    """`x` marked as differing over `axes`. `shard_map` demands that a scan's carry has one type from the start."""

    def mark(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(leaf).manual_axis_type.varying))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, x)


def mark_shapes_varying(shapes: Any, like: Any) -> Any:
    """`jax.ShapeDtypeStruct`s of what a kernel gives, marked as differing over the axes over which `like` differs."""
    varying = jax.typeof(like).manual_axis_type

    def mark(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying)  # type: ignore[no-untyped-call]  # JAX leaves it untyped

    return jax.tree.map(mark, shapes)
