"""Support for operands on meshes with explicit axes, whose shardings are part of their types.

From jax 0.12 on, `jax.make_mesh` makes meshes with explicit axes. There every operation must state how its result is
sharded, which loops over blocks and Pallas calls cannot do. So inside the call the compiler chooses all shardings, and
the call's results are sharded like the queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from cases.operand_registry import OPTIONAL
from impls.block_arithmetic import make_shape
from impls.captured_arrays import split_function

_Call = TypeVar("_Call", bound=Callable[..., Any])
_ARRAY_OPTIONS = (
    *(operand.name for operand in OPTIONAL if operand.arrays),
    "lengths",
    "positions",
    "dropout_key",
    "indices",
)


def accept_explicit_sharding(call: _Call) -> _Call:
    """Wrap an attention function with the contract's arguments to accept operands on meshes with explicit axes.

    The call must return a tree of arrays `[B, T, N, .]` and residuals `[B, N, T]`.
    """

    @functools.wraps(call)
    def wrapped(q: Any, k: Any, v: Any, **options: Any) -> Any:
        arrays = {
            "q": q,
            "k": k,
            "v": v,
            **{name: x for name in _ARRAY_OPTIONS if (x := options.get(name)) is not None},
        }
        if split_function(options.get("score_mod"))[1]:
            arrays["score_mod"] = options["score_mod"]
        mesh = find_explicit_mesh(arrays)
        if mesh is None:
            return call(q, k, v, **options)
        static = {name: x for name, x in options.items() if name not in arrays}

        def plain(arrays: dict[str, Any]) -> Any:
            return call(**arrays, **static)

        shapes = jax.eval_shape(plain, jax.tree.map(lambda x: make_shape(x.shape, x.dtype), arrays))
        spec: tuple[Any, ...] = tuple(jax.typeof(q).sharding.spec)
        batch, queries, heads, *_ = (*spec, None, None, None)
        found = {4: (batch, queries, heads, None), 3: (batch, heads, queries)}
        shardings = jax.tree.map(lambda x: NamedSharding(mesh, _build_spec(*found[x.ndim])), shapes)
        return jax.sharding.auto_axes(plain, axes=mesh.explicit_axes, out_sharding=shardings)(arrays)

    return cast(_Call, wrapped)


def find_explicit_mesh(arrays: Any) -> Any:
    """Find the mesh of the first array that lies on a mesh with explicit axes; None if there is no such array."""
    for x in jax.tree.leaves(arrays):
        if isinstance(x, jax.Array):
            mesh = jax.typeof(x).sharding.mesh
            if mesh.explicit_axes:
                return mesh
    return None


def _build_spec(*axes: Any) -> Any:
    return PartitionSpec(*axes)
