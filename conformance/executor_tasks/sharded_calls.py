"""The call on several devices: under `shard_map` over batch, heads and query sequence, and on explicit axes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cases.masks import Dense
from cases.operand_registry import OPERANDS, Axes, Operand
from cases.operand_values import Problem
from conformance.execution.executor import Arrays, Executor, Values, pull_back

DEVICES = 4
_AXIS = "shards"

ShardedAxis = Literal["batch", "heads", "sequence"]
Call = Callable[[Arrays], Any]
Specs = Mapping[str, Any]


def run_sharded(
    executor: Executor, axis: ShardedAxis, problem: Problem, do: np.ndarray | None
) -> tuple[np.ndarray, Values]:
    """`out`, and the gradients for a cotangent, with the axis shared by the devices."""
    call, arrays, specs, out_spec = _SHARDS[axis](executor, problem)
    in_specs = {name: specs.get(name, _build_spec()) for name in arrays}
    mesh = jax.make_mesh((DEVICES,), (_AXIS,), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(in_specs,), out_specs=out_spec, check_vma=False)
    if do is None:
        return np.asarray(executor.jit(sharded)(arrays)), {}
    return _copy_to_host(executor.jit(functools.partial(pull_back, sharded))(arrays, do))


def run_on_explicit_mesh(executor: Executor, problem: Problem, do: np.ndarray | None) -> tuple[np.ndarray, Values]:
    """Likewise, batch rows on a mesh of explicit axes, as `jax.make_mesh` makes it from jax 0.12 on."""
    call, arrays, specs, out_spec = _shard_batch(executor, problem)
    mesh = jax.make_mesh((DEVICES,), (_AXIS,), axis_types=(AxisType.Explicit,))

    def put(x: Any, spec: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), x)

    def put_each(x: Any, spec: Any) -> Any:
        return tuple(map(put, x, spec)) if isinstance(spec, tuple) and isinstance(x, tuple) else put(x, spec)

    with jax.set_mesh(mesh):
        placed = {name: put_each(x, specs.get(name, _build_spec())) for name, x in arrays.items()}
        if do is None:
            return np.asarray(jax.jit(call)(placed)), {}
        return _copy_to_host(jax.jit(functools.partial(pull_back, call))(placed, put(do, out_spec)))


def trace_with_vma_check(executor: Executor, problem: Problem, do: np.ndarray | None) -> None:
    """`shard_map` over batch rows as it is by default, `check_vma=True`; traced only."""
    call, arrays, specs, out_spec = _shard_batch(executor, problem)
    in_specs = {name: specs.get(name, _build_spec()) for name in arrays}
    mesh = jax.make_mesh((DEVICES,), (_AXIS,), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(in_specs,), out_specs=out_spec)
    if do is None:
        jax.eval_shape(sharded, arrays)
    else:
        jax.eval_shape(functools.partial(pull_back, sharded), arrays, do)


def _build_spec(*axes: str | None) -> Any:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call] # untyped upstream


def _build_specs(problem: Problem, letters: str) -> dict[str, Any]:
    """How the operands of `problem` are shared where devices share the axes `letters`; the others have all of it."""

    def spec(operand: Operand, x: np.ndarray, axes: Axes) -> Any:
        shared = [axis for letter in letters if (axis := operand.find_axis(x, axes, letter)) is not None]
        return _build_spec(*(None,) * shared[0], _AXIS) if shared else _build_spec()

    return {o.name: o.each(getattr(problem, o.name), functools.partial(spec, o)) for o in OPERANDS}


def _shard_batch(executor: Executor, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    call, arrays = executor.bind(problem)
    rows = _build_spec(_AXIS)
    own = {name: rows for name in _find_mask_arrays(arrays) if arrays[name].shape[0] == problem.q.shape[0]}
    return call, arrays, _build_specs(problem, "B") | own, rows


def _find_mask_arrays(arrays: Arrays) -> set[str]:
    """Names of the arrays that the mask was lowered to: those with a value for each batch row are sharded with them."""
    return set(arrays) - {operand.name for operand in OPERANDS}


def _shard_heads(executor: Executor, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    call, arrays = executor.bind(problem)
    return call, arrays, _build_specs(problem, "NK"), _build_spec(None, None, _AXIS)


def _shard_queries(executor: Executor, problem: Problem) -> tuple[Call, Arrays, Specs, Any]:
    """Each device has some of the queries, and masks with the rows that are theirs."""
    q_length, kv_length = problem.q.shape[1], problem.k.shape[1]
    dense = problem.mask.dense(q_length, kv_length)
    local = q_length // DEVICES
    here = problem.along("T", lambda x, axis: x.take(range(local), axis))
    calls = [
        _bind_mask(executor, dataclasses.replace(here, mask=Dense(dense[..., n * local : (n + 1) * local, :])))
        for n in range(DEVICES)
    ]

    def call(arrays: Arrays) -> Any:
        return jax.lax.switch(jax.lax.axis_index(_AXIS), calls, arrays)

    arrays = {name: x for name, x in executor.bind(problem)[1].items() if name != "mask"}
    return call, arrays, _build_specs(problem, "T"), _build_spec(None, _AXIS)


def _bind_mask(executor: Executor, problem: Problem) -> Call:
    """The call with the mask of `problem`, be it static or an array."""
    call, arrays = executor.bind(problem)
    extra = {name: x for name, x in arrays.items() if name == "mask"}
    return lambda moving: call({**moving, **extra})


_SHARDS: dict[ShardedAxis, Callable[[Executor, Problem], tuple[Call, Arrays, Specs, Any]]] = {
    "batch": _shard_batch,
    "heads": _shard_heads,
    "sequence": _shard_queries,
}


def _copy_to_host(found: tuple[Any, Arrays]) -> tuple[np.ndarray, Values]:
    return np.asarray(found[0]), {name: np.asarray(x) for name, x in found[1].items()}
