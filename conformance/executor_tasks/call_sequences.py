"""Calls that follow each other in one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from cases.operand_values import Problem
from conformance import environment
from conformance.execution import kernel_errors
from conformance.execution.executor import Executor

_ONE_THREAD = {"xla_cpu_multi_thread_eigen": False}


def run_eagerly(executor: Executor, problem: Problem) -> np.ndarray:
    """`out` of the call outside `jit`, on JAX arrays."""
    plain, arrays = executor.bind(problem)
    return np.asarray(plain(jax.tree.map(jnp.asarray, arrays)))


def run_sequence_eagerly(executor: Executor, problems: Sequence[Problem]) -> list[np.ndarray]:
    """`out` of calls outside `jit`, on JAX arrays: no result is looked at before the last call was made."""
    found = []
    for problem in problems:
        plain, arrays = executor.bind(problem)
        found.append(plain(jax.tree.map(jnp.asarray, arrays)))
    return [np.array(out) for out in found]


def run_residuals_eagerly(executor: Executor, problem: Problem) -> Mapping[str, np.ndarray]:
    """The residuals of the call outside `jit`, on JAX arrays."""
    statics, arrays = executor.arguments(problem)
    call = functools.partial(executor.implementation.call, **statics, save_residuals=True)
    _, residuals = kernel_errors.check_residuals(call(**jax.tree.map(jnp.asarray, arrays)))
    return {name: np.asarray(x) for name, x in residuals.items()}


def run_compiled(executor: Executor, problem: Problem) -> np.ndarray:
    """`out` of the call under a `jit` of its own."""
    plain, arrays = executor.bind(problem)
    return np.asarray(executor.jit(plain)(arrays))


def run_one_program(executor: Executor, problems: tuple[Problem, ...]) -> list[np.ndarray]:
    """`out` of each problem in turn by one compiled program; they differ in values alone."""
    plain, _ = executor.bind(problems[0])
    program = executor.jit(plain)
    return [np.asarray(program(executor.bind(problem)[1])) for problem in problems]


def run_on_reused_numpy_arrays(executor: Executor, problem: Problem, other: Problem) -> tuple[str, list[np.ndarray]]:
    """`out` on NumPy arrays outside `jit`, then with other values in the same arrays; or why they are refused.

    Both are read after the second call, which must not change what the first returned.
    """
    plain, arrays = executor.bind(problem)
    given = jax.tree.map(lambda x: np.array(x, copy=True), arrays)
    try:
        first = jax.block_until_ready(plain(given))  # type: ignore[no-untyped-call] # untyped upstream
    except Exception as error:  # a kernel may want arrays of JAX; what it computes from others is what counts
        return f"NumPy operands outside jit: {type(error).__name__}: {error}".split("\n")[0], []
    jax.tree.map(np.copyto, given, executor.bind(other)[1])
    second = plain(given)
    return "", [np.array(first), np.array(second)]


def run_on_numpy_views(executor: Executor, problem: Problem) -> tuple[str, np.ndarray | None]:
    """`out` outside `jit` on NumPy arrays that are every second number of others; or why these are refused."""
    plain, arrays = executor.bind(problem)

    def apart(x: np.ndarray) -> np.ndarray:
        if not x.ndim:
            return x
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    try:
        return "", np.array(plain(jax.tree.map(apart, arrays)))
    except Exception as error:  # a kernel may want whole arrays; what it computes from others is what counts
        return f"views of NumPy arrays outside jit: {type(error).__name__}: {error}".split("\n")[0], None


def run_on_shared_array(executor: Executor, problem: Problem) -> np.ndarray:
    """`out` of the call outside `jit`, with one array for queries, keys and values."""
    plain, arrays = executor.bind(problem)
    given = dict(jax.tree.map(jnp.asarray, arrays))
    return np.asarray(plain({**given, "k": given["q"], "v": given["q"]}))


def run_in_thread(executor: Executor, problem: Problem) -> np.ndarray:
    """`out` of the call outside `jit`, in a thread that has called nothing yet."""
    with futures.ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(run_eagerly, executor, problem).result()


def run_on_shared_ids(executor: Executor, problem: Problem) -> np.ndarray:
    """`out` of the call outside `jit`, with one array for both segment ids, those of the keys."""
    plain, arrays = executor.bind(problem)
    given = dict(jax.tree.map(jnp.asarray, arrays))
    given["segment_ids"] = (given["segment_ids"][1],) * 2
    return np.asarray(plain(given))


def count_differing_calls(executor: Executor, problem: Problem, count: int) -> int:
    """How many of `count` calls of one program give other bits than the first.

    It is compiled as JAX does by itself, since so many calls take longer than that. A product is computed by one thread
    all the same: how several share one is up to XLA.
    """
    plain, given = executor.bind(problem)
    own = environment.build_default_options()
    program = jax.jit(plain, compiler_options={**own, **_ONE_THREAD} if own else executor.options or None)
    arrays = jax.tree.map(jnp.asarray, given)
    first = np.asarray(program(arrays))
    return sum(np.asarray(program(arrays)).tobytes() != first.tobytes() for _ in range(count))
