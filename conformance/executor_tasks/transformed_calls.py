"""Tasks that run the call under transformations of JAX, for the checks `transforms` and `differentiation`.

In all of them `do` is a cotangent of `out`, and gradients are returned by the operand's name.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from cases.operand_registry import GRADIENT_OF
from cases.operand_values import Problem
from conformance.execution import returned_values
from conformance.execution.executor import Arrays, Executor, Values, pull_back

OutAndGradients = tuple[np.ndarray, Values]
MappingOrder = Literal["grad_of_vmap", "vmap_of_grad", "scan"]


def run_vmap(executor: Executor, problems: Sequence[Problem]) -> np.ndarray:
    """Return the stacked `out` of several problems with the same shapes, with every operand mapped by `vmap`."""
    plain, _ = executor.bind(problems[0])
    return np.asarray(executor.jit(jax.vmap(plain))(_stack_operands(executor, problems)))


def run_vmap_with_residuals(executor: Executor, problems: Sequence[Problem]) -> Values:
    """Return stacked `out` and residuals of several problems, by name, with every operand mapped by `vmap`."""
    statics, _ = executor.arguments(problems[0])
    call = functools.partial(executor.implementation.call, **statics, save_residuals=True)
    mapped = jax.vmap(lambda arrays: returned_values.check_residuals(call(**arrays)))
    out, residuals = executor.jit(mapped)(_stack_operands(executor, problems))
    return _copy_to_host({**residuals, "out": out})


def run_vmap_over(
    executor: Executor, problems: Sequence[Problem], names: Sequence[str], of_pair: int | None = None
) -> np.ndarray:
    """Return the stacked `out` of the call under `vmap` over the operands `names`.

    All other operands are those of the first problem and are shared. If both keys and values are mapped, the mapped
    axis is their second one. For pairs such as segment ids, `of_pair` is the index of the mapped array; by default both
    arrays are mapped.
    """
    plain, shared = executor.bind(problems[0])
    stacked = dict(_stack_operands(executor, problems))
    axes: dict[str, Any] = {name: 0 if name in names else None for name in shared}
    arrays = {name: stacked[name] if name in names else x for name, x in shared.items()}
    if of_pair is not None:
        for name in names:
            axes[name] = tuple(0 if n == of_pair else None for n in range(2))
            arrays[name] = tuple((stacked if n == of_pair else shared)[name][n] for n in range(2))
    if {"k", "v"} <= set(names):  # a kernel's own batching rule may assume that the mapped axis comes first
        for name in ("k", "v"):
            axes[name], arrays[name] = 1, jax.tree.map(lambda x: np.moveaxis(x, 0, 1), stacked[name])
    return np.asarray(executor.jit(jax.vmap(plain, in_axes=(axes,)))(arrays))


def run_vmap_twice(executor: Executor, problems: Sequence[Problem], names: Sequence[str]) -> np.ndarray:
    """Return `out` under two nested `vmap`s over `names`, stacked for the problems in order and in reverse order."""
    plain, shared = executor.bind(problems[0])
    stacked = _stack_operands(executor, problems)
    axes = {name: 0 if name in names else None for name in shared}
    both = {name: jax.tree.map(lambda x: np.stack([x, x[::-1]]), stacked[name]) for name in names}
    mapped = jax.vmap(jax.vmap(plain, in_axes=(axes,)), in_axes=(axes,))
    out = np.asarray(executor.jit(mapped)({**shared, **both}))
    return out.reshape(-1, *out.shape[2:])


def run_at_highest_precision(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` under `jax.default_matmul_precision("highest")`."""
    plain, arrays = executor.bind(problem)
    with jax.default_matmul_precision("highest"):
        return np.asarray(executor.jit(plain)(arrays))


def run_donated(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` of a call whose operands are donated."""
    plain, host_arrays = executor.bind(problem)
    arrays = jax.tree.map(jnp.array, host_arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns about buffers that it cannot reuse, which is harmless
        return np.asarray(executor.jit(plain, donate_argnums=0)(arrays))


def run_x64(executor: Executor, problem: Problem) -> np.ndarray:
    """Return `out` with `jax.enable_x64`, where JAX may use float64."""
    plain, arrays = executor.bind(problem)
    with jax.enable_x64(True):
        return np.asarray(executor.jit(plain)(arrays))


def find_residual_dtypes(executor: Executor, problem: Problem, *, doubles: bool) -> dict[str, str]:
    """Return the dtype of each residual, found by tracing; `doubles` enables x64."""
    compiled, arrays = executor.compiled(problem)
    with jax.enable_x64(doubles):
        _, residuals = jax.eval_shape(compiled.residuals, arrays)
    return {name: str(x.dtype) for name, x in residuals.items()}


def run_x64_backward(executor: Executor, problem: Problem, do: np.ndarray) -> Values:
    """Return the gradients with `jax.enable_x64`, where JAX may use float64."""
    plain, arrays = executor.bind(problem)
    with jax.enable_x64(True):
        return _copy_to_host(executor.jit(functools.partial(pull_back, plain))(arrays, do)[1])


def run_gradients(
    executor: Executor, how: MappingOrder, problems: Sequence[Problem], do: np.ndarray
) -> OutAndGradients:
    """Return `out` and gradients of several problems for stacked cotangents.

    The mapped call is differentiated (`grad_of_vmap`), or the differentiated call is mapped (`vmap_of_grad`), or the
    problems are layers under `lax.scan` (`scan`), each with its own operands.
    """
    plain, _ = executor.bind(problems[0])

    def apply_layers(stacked: Arrays) -> Any:
        return jax.lax.scan(lambda carry, arrays: (carry, plain(arrays)), None, stacked)[1]

    program: dict[str, Callable[..., Any]] = {
        "grad_of_vmap": functools.partial(pull_back, jax.vmap(plain)),
        "vmap_of_grad": jax.vmap(functools.partial(pull_back, plain)),
        "scan": functools.partial(pull_back, apply_layers),
    }
    return _copy_pulled_to_host(executor.jit(program[how])(_stack_operands(executor, problems), do))


def run_alternating_layers(executor: Executor, problems: Sequence[Problem], dos: Sequence[np.ndarray]) -> list[Values]:
    """Return the gradients of each problem from one program that contains all calls, as in a model with several layers.

    The problems may have different masks, scales and soft caps. All calls are traced first, then all pullbacks.
    """
    calls, operands = zip(*(executor.bind(problem) for problem in problems), strict=True)
    moving = [{name: x for name, x in arrays.items() if name in GRADIENT_OF} for arrays in operands]
    fixed = [{name: x for name, x in arrays.items() if name not in GRADIENT_OF} for arrays in operands]

    def compute_gradients(moving: Sequence[Arrays], fixed: Sequence[Arrays], dos: Sequence[Any]) -> Any:
        def apply_layers(moving: Sequence[Arrays]) -> list[Any]:
            return [call({**m, **f}) for call, m, f in zip(calls, moving, fixed, strict=True)]

        return jax.vjp(apply_layers, moving)[1](list(dos))[0]

    return [_copy_to_host(x) for x in executor.jit(compute_gradients)(moving, fixed, list(dos))]


def run_shared_gradients(
    executor: Executor, problems: Sequence[Problem], names: Sequence[str], dos: np.ndarray
) -> Values:
    """Return gradients under `vmap` over `names` for stacked cotangents; gradients of shared operands are summed."""
    plain, shared = executor.bind(problems[0])
    axes = {name: 0 if name in names else None for name in shared}
    stacked = _stack_operands(executor, problems)
    arrays = {name: stacked[name] if name in names else x for name, x in shared.items()}
    return _copy_to_host(executor.jit(functools.partial(pull_back, jax.vmap(plain, in_axes=(axes,))))(arrays, dos)[1])


def run_gradients_eagerly(executor: Executor, problems: Sequence[Problem], dos: Sequence[np.ndarray]) -> Values:
    """Return the first problem's gradients outside `jit`, from the second call of its pullback.

    The earlier calls, of the other problem's pullback and then of this one, get the other cotangent, `dos[1]`.
    """
    for problem in reversed(problems):
        plain, host_arrays = executor.bind(problem)
        arrays = jax.tree.map(jnp.asarray, host_arrays)
        fixed = {name: x for name, x in arrays.items() if name not in GRADIENT_OF}
        moving = {name: x for name, x in arrays.items() if name in GRADIENT_OF}
        out, pullback = jax.vjp(lambda m, plain=plain, fixed=fixed: plain({**fixed, **m}), moving)
        cotangents = [jnp.asarray(do).astype(out.dtype) for do in dos]
        pullback(cotangents[1])
    return _copy_to_host(pullback(cotangents[0])[0])


def run_query_gradient_eagerly(executor: Executor, problem: Problem, do: np.ndarray) -> Values:
    """Return the gradient of q outside `jit`, where all other operands are arrays, not tracers."""
    plain, host_arrays = executor.bind(problem)
    arrays = jax.tree.map(jnp.asarray, host_arrays)
    out, pullback = jax.vjp(lambda q: plain({**arrays, "q": q}), arrays["q"])
    return _copy_to_host({"q": pullback(jnp.asarray(do).astype(out.dtype))[0]})


def run_mapped_pullback(executor: Executor, problem: Problem, dos: np.ndarray) -> Values:
    """Return the stacked gradients of one problem, from `vmap` of its pullback over stacked cotangents."""
    plain, arrays = executor.bind(problem)

    def compute_gradients(arrays: Arrays, stacked: Any) -> Any:
        return jax.vmap(lambda do: pull_back(plain, arrays, do)[1])(stacked)

    return _copy_to_host(executor.jit(compute_gradients)(arrays, dos))


def run_checkpoint(executor: Executor, problem: Problem, do: np.ndarray, saved: Sequence[str]) -> OutAndGradients:
    """Return `out` and gradients under `jax.checkpoint`, with a policy that saves only values named in `saved`."""
    plain, arrays = executor.bind(problem)
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(*saved) if saved else policies.nothing_saveable
    pull = functools.partial(pull_back, jax.checkpoint(plain, policy=policy))
    return _copy_pulled_to_host(executor.jit(pull)(arrays, do))


def run_forward_mode(
    executor: Executor, problem: Problem, tangents: Mapping[str, np.ndarray]
) -> tuple[str, np.ndarray | None]:
    """Run the call in forward mode; return why it has no such mode, or "", and the tangent of `out`, or None."""
    plain, arrays = executor.bind(problem)
    moving = {name: jnp.asarray(arrays[name]) for name in tangents}
    fixed = {name: x for name, x in arrays.items() if name not in moving}

    def compute_tangent(moving: Arrays, tangents: Arrays) -> Any:
        return jax.jvp(lambda m: plain({**m, **fixed}), (moving,), (tangents,))

    try:
        return "", np.asarray(executor.jit(compute_tangent)(moving, dict(tangents))[1])
    except TypeError as error:  # JAX raises this for a custom VJP, which has no forward mode
        return f"forward mode: {error}".split("\n")[0], None


def run_single_gradients(executor: Executor, problem: Problem, do: np.ndarray) -> Values:
    """Return the gradient of each operand, each differentiated without the other operands."""
    plain, arrays = executor.bind(problem)
    names = [name for name in GRADIENT_OF if name in arrays]

    def differentiate(name: str, arrays: Arrays, do: Any) -> Any:
        fixed = {other: x for other, x in arrays.items() if other != name}
        return jax.vjp(lambda x: plain({**fixed, name: x}), arrays[name])[1](do)[0]

    def differentiate_each(arrays: Arrays, do: Any) -> Arrays:
        return {name: differentiate(name, arrays, do) for name in names}

    return _copy_to_host(executor.jit(differentiate_each)(arrays, do))


def run_second_derivative(
    executor: Executor, problem: Problem, do: np.ndarray, weights: Mapping[str, np.ndarray]
) -> Values:
    """Return second derivatives: the gradient of `<gradients, weights>` in each operand of `weights`, as float64.

    `gradients` are those for the cotangent `do` of `out`.
    """
    plain, arrays = executor.bind(problem)
    fixed = {name: x for name, x in arrays.items() if name not in weights}

    def weigh_gradients(moving: Arrays, fixed: Arrays, do: Any, weights: Arrays) -> Any:
        _, pulled = pull_back(plain, {**fixed, **moving}, do)
        return sum(jnp.vdot(pulled[name], x) for name, x in weights.items())

    moving = {name: jnp.asarray(arrays[name]) for name in weights}
    f32_weights = {name: x.astype(np.float32) for name, x in weights.items()}
    derivatives = executor.jit(jax.grad(weigh_gradients))(moving, fixed, do, f32_weights)
    return {name: np.asarray(x).astype(np.float64) for name, x in derivatives.items()}


def _stack_operands(executor: Executor, problems: Sequence[Problem]) -> Arrays:
    stacked: Arrays = jax.tree.map(lambda *xs: np.stack(xs), *(executor.bind(problem)[1] for problem in problems))
    return stacked


def _copy_pulled_to_host(results: tuple[Any, Arrays]) -> OutAndGradients:
    return np.asarray(results[0]), _copy_to_host(results[1])


def _copy_to_host(values: Arrays) -> Values:
    return {name: np.asarray(x) for name, x in values.items()}
