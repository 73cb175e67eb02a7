"""Tasks that run, trace or measure a single call, mostly outside `jit` or with unusual or wrong arguments."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.operand_values import Problem
from conformance import program_cache
from conformance.execution import returned_values
from conformance.execution.executor import Arrays, Executor, call_plain, pull_back
from conformance.execution.stored_calls import DENSE_ARGUMENTS, StoredCall

# Equal calls whose operands are compared afterwards: a kernel may spare those of its first calls.
_CALLS = 3
# How long threads that a call started may go on before its operands are compared.
_THREAD_SECONDS = 5.0


def run_eagerly(executor: Executor, problem: Problem, *, gradients: bool) -> None:
    """Make the call outside `jit`, and with `gradients` differentiate it, only to see whether it raises."""
    plain, arrays = executor.bind(problem)
    arrays = jax.tree.map(jnp.asarray, arrays)
    if gradients:
        out = jax.eval_shape(plain, arrays)
        pull_back(plain, arrays, jnp.ones(out.shape, out.dtype))
    else:
        plain(arrays)


def trace_call(executor: Executor, problem: Problem) -> None:
    """Trace the call without compiling or running it, only to see whether it raises."""
    plain, arrays = executor.bind(problem)
    jax.eval_shape(plain, arrays)


def list_returned_residuals(executor: Executor, problem: Problem) -> list[str]:
    """List the residuals that the call returns with `save_residuals=True`, by tracing; empty if it raises."""
    statics, arrays = executor.arguments(problem)
    call = functools.partial(executor.implementation.call, **statics, save_residuals=True)
    try:
        _, residuals = jax.eval_shape(lambda arrays: returned_values.check_residuals(call(**arrays)), arrays)
    except Exception:  # a call that raises returns no residuals
        return []
    return list(residuals)


def run_with_arguments(executor: Executor, problem: Problem, given: Mapping[str, Any]) -> np.ndarray:
    """Return the call's compiled `out` with arguments replaced by `given`: arrays `[]` are traced, numbers static."""
    statics, arrays = executor.arguments(problem)
    traced = {name: x for name, x in given.items() if isinstance(x, np.ndarray) and not x.ndim}
    static = {**statics, **{name: x for name, x in given.items() if name not in arrays}}
    static = {name: x for name, x in static.items() if name not in traced}
    plain = functools.partial(call_plain, executor.implementation.call, static)
    return np.asarray(executor.jit(plain)({name: given.get(name, x) for name, x in arrays.items()} | traced))


def run_exactly(executor: Executor, arguments: Mapping[str, Any], traced: str) -> np.ndarray:
    """Return `out` of the call with exactly these arguments outside `jit`, or in a `jit` of the argument `traced`."""
    call = executor.implementation.call
    if not traced:
        return np.asarray(call(**arguments))
    rest = {name: x for name, x in arguments.items() if name != traced}
    return np.asarray(jax.jit(lambda number: call(**rest, **{traced: number}))(arguments[traced]))


def has_parameter(executor: Executor, keyword: str) -> bool:
    """Return whether the call has a parameter of this name, or takes any keyword."""
    parameters = inspect.signature(executor.implementation.call).parameters.values()
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)


def find_mask_arguments(executor: Executor, problem: Problem) -> dict[str, Any]:
    """Return by name whether the call gets `causal=True`, a `mask` array and a `mask_mod`, and its `window` or None."""
    statics, arrays = executor.arguments(problem)
    window = statics.get("window")
    return {
        "causal": statics.get("causal") is True,
        "window": window if isinstance(window, tuple) else None,
        "mask": isinstance(arrays.get("mask"), np.ndarray),
        "mask_mod": "mask_mod" in statics,
    }


def list_arrays(executor: Executor, problem: Problem) -> tuple[str, ...]:
    """List the names of the arrays that the call takes."""
    return tuple(executor.arguments(problem)[1])


def compute_second_derivative(executor: Executor, problem: Problem) -> np.ndarray:
    """Return the gradient in q of `sum(g**2)`, where `g` is the gradient in q of `sum(out**2)`."""
    call, arrays = executor.bind(problem)
    rest = {name: x for name, x in arrays.items() if name != "q"}

    def compute_gradient(q: Any) -> Any:
        return jax.grad(lambda q: (call({**rest, "q": q}).astype(np.float32) ** 2).sum())(q)

    return np.asarray(jax.grad(lambda q: (compute_gradient(q).astype(np.float32) ** 2).sum())(jnp.asarray(arrays["q"])))


def measure_temporary_bytes(executor: Executor, problem: Problem, *, gradients: bool) -> int | None:
    """Return the compiled call's temporary bytes, with the backward pass if `gradients` is set; None if unknown."""
    plain, arrays = executor.bind(problem)
    out = jax.eval_shape(plain, arrays)
    operands = (arrays, out) if gradients else (arrays,)
    lowered = executor.jit(functools.partial(pull_back, plain) if gradients else plain).lower(*operands)
    with program_cache.bypass_cache():
        analysis = lowered.compile().memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def merge_parts(executor: Executor, parts: list[Any]) -> Any:
    """Merge parts by the implementation's own merge."""
    merge = executor.implementation.merge
    assert merge is not None
    return executor.jit(merge)(parts)


def find_written_operands(executor: Executor, problem: Problem, *, compiled: bool) -> tuple[list[str], str]:
    """Find the operands that several equal calls modify or delete, or one call under `jit` if `compiled`.

    A call that takes stored operands gets them in its own form, since it could not delete the dense ones.
    The calls get NumPy arrays. Outside `jit`, or if NumPy arrays are refused, as many more calls get JAX arrays. All
    operands are compared after the last call, and after the threads that the calls started.

    Returns:
      The names of the modified operands. Then the reason why the calls got no NumPy arrays, or "".
    """
    plain, arrays = _bind_own_form(executor, problem)
    call = executor.jit(plain) if compiled else plain
    count = 1 if compiled else _CALLS
    threads = threading.enumerate()
    given, reason = [jax.tree.map(np.copy, arrays) for _ in range(count)], ""
    try:
        for operands in given:
            jax.block_until_ready(call(operands))
    except Exception as refusal:  # libraries that check types raise errors of their own types
        given, reason = [], f"given JAX arrays, since NumPy arrays are refused ({type(refusal).__name__})"
    if reason or not compiled:
        for _ in range(count):
            given.append(jax.tree.map(jnp.array, arrays))
            jax.block_until_ready(call(given[-1]))
    _join_threads_since(threads)
    pairs = [pair for after in given for pair in zip(_list_leaves(arrays), _list_leaves(after), strict=True)]
    changed = [name for (name, before), (_, after) in pairs if is_changed(before, after)]
    return list(dict.fromkeys(changed)), reason


def _bind_own_form(executor: Executor, problem: Problem) -> tuple[Callable[[Arrays], Any], Arrays]:
    """Return the call on the operands as they lie in memory, and these as NumPy arrays."""
    plain, arrays = executor.bind(problem)
    call = executor.implementation.call
    if not isinstance(call, StoredCall):
        return plain, arrays
    statics, _ = executor.arguments(problem)
    dense = {name: arrays[name] for name in DENSE_ARGUMENTS if name in arrays}
    stored = call.store(**dense, q_scale=statics.get("q_scale"))
    others = {name: x for name, x in arrays.items() if name not in dense}
    attend = call.bind_depth(problem.v.shape[-1])
    return lambda given: attend(**given, **statics), jax.tree.map(np.asarray, {**stored, **others})


def _join_threads_since(before: Collection[threading.Thread]) -> None:
    """Wait for threads that are not in `before` to end, for a limited time."""
    until = time.monotonic() + _THREAD_SECONDS
    for thread in threading.enumerate():
        if thread not in before and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))


def is_changed(before: np.ndarray, after: Any) -> bool:
    """Tell whether an operand was deleted, or has other bits than before."""
    if isinstance(after, jax.Array) and after.is_deleted():
        return True
    return before.tobytes() != np.asarray(after).tobytes()


def _list_leaves(arrays: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(arrays)]
