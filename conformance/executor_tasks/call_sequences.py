"""Tasks that run several calls one after the other in one process, mostly for the check `calls`.

They also run single calls on unusual arrays: NumPy views, or one array for several operands.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from cases.operand_values import Problem
from conformance import environment
from conformance.execution import returned_values
from conformance.execution.executor import Executor

Layout = Literal["strided", "transposed"]
"""The memory layout of a NumPy array that is not contiguous."""

# The compiler option by which XLA computes matrix products on one CPU thread.
_ONE_THREAD = {"xla_cpu_multi_thread_eigen": False}


def run_eagerly(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` of the call outside `jit`, on JAX arrays."""
    plain, arrays = executor.bind(problem)
    return np.asarray(plain(jax.tree.map(jnp.asarray, arrays)))


def run_sequence_eagerly(executor: Executor, problems: Sequence[Problem]) -> list[np.ndarray]:
    """Return `out` of several calls outside `jit`; all calls are made before any result is read."""
    results = []
    for problem in problems:
        plain, arrays = executor.bind(problem)
        results.append(plain(jax.tree.map(jnp.asarray, arrays)))
    return [np.array(out) for out in results]


def run_residuals_eagerly(executor: Executor, problem: Problem) -> Mapping[str, np.ndarray]:
    """Return the residuals of the call outside `jit`, on JAX arrays."""
    statics, arrays = executor.arguments(problem)
    call = functools.partial(executor.implementation.call, **statics, save_residuals=True)
    _, residuals = returned_values.check_residuals(call(**jax.tree.map(jnp.asarray, arrays)))
    return {name: np.asarray(x) for name, x in residuals.items()}


def run_compiled(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` of the call under `jit`, compiled anew for this problem."""
    plain, arrays = executor.bind(problem)
    return np.asarray(executor.jit(plain)(arrays))


def run_one_program(executor: Executor, problems: tuple[Problem, ...]) -> list[np.ndarray]:
    """Return `out` of each problem from one compiled program; the problems differ in values only."""
    plain, _ = executor.bind(problems[0])
    program = executor.jit(plain)
    return [np.asarray(program(executor.bind(problem)[1])) for problem in problems]


def run_on_reused_numpy_arrays(executor: Executor, problem: Problem, other: Problem) -> tuple[str, list[np.ndarray]]:
    """Call outside `jit` on NumPy arrays, then again with other values in the same arrays.

    Both results are read after the second call, which must not change the first result.

    Returns:
      The reason why NumPy arrays are refused, or "". Then `out` of both calls; empty if they are refused.
    """
    plain, arrays = executor.bind(problem)
    copies = jax.tree.map(lambda x: np.array(x, copy=True), arrays)
    try:
        first = jax.block_until_ready(plain(copies))
    except Exception as error:  # a kernel may refuse NumPy arrays, but must not misread them
        return f"NumPy operands outside jit: {type(error).__name__}: {error}".split("\n")[0], []
    jax.tree.map(np.copyto, copies, executor.bind(other)[1])
    second = plain(copies)
    return "", [np.array(first), np.array(second)]


def run_on_numpy_views(executor: Executor, problem: Problem, layout: Layout) -> tuple[str, np.ndarray | None]:
    """Call outside `jit` on non-contiguous NumPy arrays; return why they are refused, or "", and `out`, or None.

    `strided` arrays are every second number of others. `transposed` arrays have their second and third axis exchanged
    in memory, as where heads come before the sequence.
    """
    plain, arrays = executor.bind(problem)

    def make_view(x: np.ndarray) -> np.ndarray:
        if not x.ndim:
            return x
        if layout == "transposed":
            axes = (0, 2, 1, *range(3, x.ndim)) if x.ndim > 2 else tuple(range(x.ndim))[::-1]
            return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    try:
        return "", np.array(plain(jax.tree.map(make_view, arrays)))
    except Exception as error:  # a kernel may refuse views, but must not misread them
        return f"views of NumPy arrays outside jit: {type(error).__name__}: {error}".split("\n")[0], None


def run_on_shared_array(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` of the call outside `jit`, with one array for queries, keys and values."""
    plain, arrays = executor.bind(problem)
    jax_arrays = dict(jax.tree.map(jnp.asarray, arrays))
    return np.asarray(plain({**jax_arrays, "k": jax_arrays["q"], "v": jax_arrays["q"]}))


def run_in_thread(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` of the call outside `jit`, in a new thread."""
    with futures.ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(run_eagerly, executor, problem).result()


def run_on_shared_ids(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` of the call outside `jit`, with one array for the segment ids of keys and of queries."""
    plain, arrays = executor.bind(problem)
    jax_arrays = dict(jax.tree.map(jnp.asarray, arrays))
    jax_arrays["segment_ids"] = (jax_arrays["segment_ids"][1],) * 2
    return np.asarray(plain(jax_arrays))


def count_differing_calls(executor: Executor, problem: Problem, count: int) -> int:
    """Run one program `count` times after a first call, and count the results whose bits differ from the first result.

    JAX's default compiler options are used: with the executor's options, many calls would take too long. One option is
    changed: matrix products run on one thread. XLA decides how several threads share a product, so the bits of a
    product on several threads may differ without a fault of the kernel.
    """
    plain, host_arrays = executor.bind(problem)
    options = environment.build_default_options()
    program = jax.jit(plain, compiler_options={**options, **_ONE_THREAD} if options else executor.options or None)
    arrays = jax.tree.map(jnp.asarray, host_arrays)
    first = np.asarray(program(arrays))
    return sum(np.asarray(program(arrays)).tobytes() != first.tobytes() for _ in range(count))
