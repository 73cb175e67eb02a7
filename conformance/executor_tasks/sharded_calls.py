"""Tasks of the check `sharding`: run the call on several devices.

The call runs under `shard_map` over batch rows, heads or queries, or on a mesh of explicit axes. A call whose sequence
several devices share makes its own mesh.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.masks import Dense
from cases.operand import Axes, Operand
from cases.operand_registry import OPERANDS
from cases.operand_values import Cotangent, Problem
from conformance.execution.executor import Arrays, Executor, Values, pull_back

DEVICES = 4
_AXIS = "shards"

ShardedAxis = Literal["batch", "heads", "sequence"]
Call = Callable[[Arrays], Any]
Specs = Mapping[str, Any]


def run_sharded(
    executor: Executor, axis: ShardedAxis, problem: Problem, do: np.ndarray | None
) -> tuple[np.ndarray, Values]:
    """Run the call under `shard_map`, with one axis sharded; return `out`, and gradients for a cotangent `do`."""
    call, arrays, specs, out_spec = _SHARDS[axis](executor, problem)
    in_specs = {name: specs.get(name, _build_spec()) for name in arrays}
    mesh = jax.make_mesh((DEVICES,), (_AXIS,), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(in_specs,), out_specs=out_spec, check_vma=False)
    if do is None:
        return np.asarray(executor.jit(sharded)(arrays)), {}
    return _copy_to_host(executor.jit(functools.partial(pull_back, sharded))(arrays, do))


def run_on_second_device(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` of the call outside `jit`, with all arrays on the second device."""
    call, arrays = executor.bind(problem)
    return np.asarray(call(jax.device_put(arrays, jax.devices()[1])))


def run_on_explicit_mesh(executor: Executor, problem: Problem, do: np.ndarray | None) -> tuple[np.ndarray, Values]:
    """Run the call with batch rows sharded over explicit mesh axes; return `out`, and gradients if `do` is given."""
    call, arrays, specs, out_spec = _shard_batch(executor, problem)
    mesh = jax.make_mesh((DEVICES,), (_AXIS,), axis_types=(AxisType.Explicit,))

    def place(x: Any, spec: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), x)

    def place_all(x: Any, spec: Any) -> Any:
        return tuple(map(place, x, spec)) if isinstance(spec, tuple) and isinstance(x, tuple) else place(x, spec)

    with jax.set_mesh(mesh):
        placed = {name: place_all(x, specs.get(name, _build_spec())) for name, x in arrays.items()}
        if do is None:
            return np.asarray(jax.jit(call)(placed)), {}
        return _copy_to_host(jax.jit(functools.partial(pull_back, call))(placed, place(do, out_spec)))


def run_on_devices(
    executor: Executor, devices: int, check_vma: bool, problem: Problem, cotangent: Cotangent | None
) -> Values:
    """Return the results of the call whose sequence so many devices share, and gradients for a cotangent."""
    declared = executor.implementation
    assert declared.on_devices is not None
    shared = executor.with_call(declared.on_devices(devices, check_vma))
    found = (shared.residuals if declared.residuals else shared.forward)(problem).values
    if cotangent is None:
        return found
    gradients = shared.gradients if cotangent.logsumexp is None else shared.gradients_lse
    return {**gradients(problem, cotangent).values, **found}


def trace_with_vma_check(executor: Executor, problem: Problem, do: np.ndarray | None) -> None:
    """Trace the call under `shard_map` over batch rows with its default `check_vma=True`; errors are raised."""
    call, arrays, specs, out_spec = _shard_batch(executor, problem)
    in_specs = {name: specs.get(name, _build_spec()) for name in arrays}
    mesh = jax.make_mesh((DEVICES,), (_AXIS,), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(in_specs,), out_specs=out_spec)
    if do is None:
        jax.eval_shape(sharded, arrays)
    else:
        jax.eval_shape(functools.partial(pull_back, sharded), arrays, do)


def _build_spec(*axes: str | None) -> Any:
    return PartitionSpec(*axes)


def _build_specs(problem: Problem, letters: str) -> dict[str, Any]:
    """Return the `PartitionSpec` of each operand: sharded on axes in `letters`, such as `"NK"`, else replicated."""

    def build_spec(operand: Operand, x: np.ndarray, axes: Axes) -> Any:
        shared = [axis for letter in letters if (axis := operand.find_axis(x, axes, letter)) is not None]
        return _build_spec(*(None,) * shared[0], _AXIS) if shared else _build_spec()

    return {o.name: o.map_arrays(getattr(problem, o.name), functools.partial(build_spec, o)) for o in OPERANDS}


def _shard_batch(executor: Executor, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    """Return the call sharded over batch rows: the call, its arrays, their `PartitionSpec`s, and that of `out`.

    An array to which the mask is lowered is sharded too if it has a value for each batch row.
    """
    call, arrays = executor.bind(problem)
    rows = _build_spec(_AXIS)
    batch = problem.q.shape[0]
    mask_specs = {name: rows for name, leaves in _list_mask_arrays(arrays) if all(x.shape[0] == batch for x in leaves)}
    return call, arrays, _build_specs(problem, "B") | mask_specs, rows


def _shard_heads(executor: Executor, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    """Return the call sharded over heads, as `_shard_batch` does; masks have their heads on the second axis."""
    call, arrays = executor.bind(problem)
    mask_specs = {
        name: _build_spec(None, _AXIS)
        for name, leaves in _list_mask_arrays(arrays)
        if all(x.ndim == 4 and x.shape[1] == problem.q.shape[2] for x in leaves)
    }
    return call, arrays, _build_specs(problem, "NK") | mask_specs, _build_spec(None, None, _AXIS)


def _list_mask_arrays(arrays: Arrays) -> list[tuple[str, list[Any]]]:
    """List the arrays to which the mask was lowered, by argument: an array, or the leaves of a mask object."""
    operands = {operand.name for operand in OPERANDS}
    return [(name, jax.tree.leaves(x)) for name, x in arrays.items() if name not in operands]


def _shard_queries(executor: Executor, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    """Return the call sharded over queries, as `_shard_batch` does; each device gets the mask of its own queries."""
    q_length, kv_length = problem.q.shape[1], problem.k.shape[1]
    dense = problem.mask.dense(q_length, kv_length)
    local_length = q_length // DEVICES
    local_problem = problem.map_along("T", lambda x, axis: x.take(range(local_length), axis))
    calls = [
        _bind_mask(
            executor,
            dataclasses.replace(local_problem, mask=Dense(dense[..., n * local_length : (n + 1) * local_length, :])),
        )
        for n in range(DEVICES)
    ]

    def call(arrays: Arrays) -> Any:
        return jax.lax.switch(jax.lax.axis_index(_AXIS), calls, arrays)

    arrays = {name: x for name, x in executor.bind(problem)[1].items() if name != "mask"}
    return call, arrays, _build_specs(problem, "T"), _build_spec(None, _AXIS)


def _bind_mask(executor: Executor, problem: Problem) -> Call:
    """Return the call with the mask of `problem` bound, as static keywords or as an array."""
    call, arrays = executor.bind(problem)
    extra = {name: x for name, x in arrays.items() if name == "mask"}
    return lambda moving: call({**moving, **extra})


_SHARDS: dict[ShardedAxis, Callable[[Executor, Problem], tuple[Call, Arrays, Specs, Any]]] = {
    "batch": _shard_batch,
    "heads": _shard_heads,
    "sequence": _shard_queries,
}


def _copy_to_host(results: tuple[Any, Arrays]) -> tuple[np.ndarray, Values]:
    return np.asarray(results[0]), {name: np.asarray(x) for name, x in results[1].items()}
