"""Calls that follow each other in one process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from cases.inputs import Problem
from conformance.calling.execution import Executor


def eagerly(executor: Executor, problem: Problem) -> np.ndarray:
    """`out` of the call outside `jit`, on JAX arrays."""
    plain, arrays = executor.bind(problem)
    return np.asarray(plain(jax.tree.map(jnp.asarray, arrays)))


def compiled(executor: Executor, problem: Problem) -> np.ndarray:
    """`out` of the call under a `jit` of its own."""
    plain, arrays = executor.bind(problem)
    return np.asarray(executor.jit(plain)(arrays))


def one_program(executor: Executor, problems: tuple[Problem, ...]) -> list[np.ndarray]:
    """`out` of each problem in turn by one compiled program; they differ in values alone."""
    plain, _ = executor.bind(problems[0])
    program = executor.jit(plain)
    return [np.asarray(program(executor.bind(problem)[1])) for problem in problems]


def numpy_operands(executor: Executor, problem: Problem, other: Problem) -> tuple[str, list[np.ndarray]]:
    """`out` on NumPy arrays outside `jit`, then with other values in the same arrays; or why they are refused."""
    plain, arrays = executor.bind(problem)
    given = jax.tree.map(lambda x: np.array(x, copy=True), arrays)
    try:
        first = np.array(plain(given))
    except Exception as error:  # a kernel may want arrays of JAX; what it computes from others is what counts
        return f"NumPy operands outside jit: {type(error).__name__}: {error}".split("\n")[0], []
    jax.tree.map(np.copyto, given, executor.bind(other)[1])
    return "", [first, np.array(plain(given))]


def again_and_again(executor: Executor, problem: Problem, count: int) -> int:
    """How many of `count` calls of one program give other bits than the first."""
    plain, given = executor.bind(problem)
    program = executor.jit(plain)
    arrays = jax.tree.map(jnp.asarray, given)
    first = np.asarray(program(arrays))
    return sum(np.asarray(program(arrays)).tobytes() != first.tobytes() for _ in range(count))
