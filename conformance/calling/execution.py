"""Running an implementation on a case: compiled functions, shared between cases that differ only in values."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cases.inputs import Cotangent, Problem
from cases.operands import GRADIENT_OF, OPERANDS
from conformance.calling import mask_tree  # noqa: F401  registers masks with JAX
from conformance.contract import Implementation

Arrays = Mapping[str, Any]
# Compiled functions are kept for this many static configurations; more only costs memory, since runs are ordered by
# configuration.
_KEPT = 8


@dataclasses.dataclass(frozen=True)
class Result:
    """What one call gave: observables by name, as host arrays."""

    values: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Calls:
    """What the forward calls gave."""

    forward: Result  # the plain call
    residuals: Result | None  # none if no residuals are offered
    part: Any  # as it was returned; none if no parts are offered


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The entry points of an implementation at one static configuration, compiled on first use."""

    forward: Callable[[Arrays], Any]
    residuals: Callable[[Arrays], Any]
    part: Callable[[Arrays], Any]
    calls: Callable[[Arrays], Any]
    gradients: Callable[[Arrays, Any], Any]
    gradients_lse: Callable[[Arrays, Any, Any], Any]


class Executor:
    """Runs one implementation; keeps the compiled functions of the last few static configurations."""

    def __init__(self, implementation: Implementation, options: Mapping[str, bool | int] | None = None) -> None:
        """An executor of `implementation`; its programs get these compiler options beside the process's flags."""
        self.implementation = implementation
        self.options = dict(options or {})
        self._compiled: collections.OrderedDict[Hashable, Compiled] = collections.OrderedDict()

    def declaring(self, implementation: Implementation) -> Executor:
        """The executor for the same call with other declarations; compiled functions are shared."""
        other = Executor(implementation, self.options)
        other._compiled = self._compiled
        return other

    def jit(self, function: Callable[..., Any], **how: Any) -> Any:
        """`jax.jit` with the compiler options of this executor: whatever is compiled to be judged is compiled by it."""
        return jax.jit(function, compiler_options=self.options or None, **how)

    def forward(self, problem: Problem) -> Result:
        """`out` of the plain call, without residuals."""
        compiled, arrays = self.compiled(problem)
        return _on_host({"out": compiled.forward(arrays)})

    def calls(self, problem: Problem) -> Calls:
        """All forward calls that are offered in one compiled program, which costs less than one for each."""
        compiled, arrays = self.compiled(problem)
        out, saved, part = compiled.calls(arrays)
        residuals = None if saved is None else _on_host({"out": saved[0], **saved[1]})
        return Calls(_on_host({"out": out}), residuals, part)

    def part(self, problem: Problem) -> Any:
        """Attention that is not normalised, as it was returned."""
        compiled, arrays = self.compiled(problem)
        return compiled.part(arrays)

    def residuals(self, problem: Problem) -> Result:
        """`out` and the residuals of the call with `save_residuals=True`."""
        compiled, arrays = self.compiled(problem)
        out, residuals = compiled.residuals(arrays)
        return _on_host({"out": out, **residuals})

    def gradients(self, problem: Problem, cotangent: Cotangent) -> Result:
        """`out` and the gradients of the plain call for a cotangent of `out`."""
        compiled, arrays = self.compiled(problem)
        out, gradients = compiled.gradients(arrays, cotangent.out)
        return _on_host({"out": out, **_renamed(gradients)})

    def gradients_lse(self, problem: Problem, cotangent: Cotangent) -> Result:
        """`out`, `logsumexp` and the gradients for cotangents of both."""
        compiled, arrays = self.compiled(problem)
        (out, lse), gradients = compiled.gradients_lse(arrays, cotangent.out, cotangent.logsumexp)
        return _on_host({"out": out, "logsumexp": lse, **_renamed(gradients)})

    def ask(self, problem: Problem, *, gradients: bool) -> None:
        """Make the call outside `jit`, differentiated if asked; whatever it raises is the answer."""
        plain, arrays = self.bind(problem)
        arrays = jax.tree.map(jnp.asarray, arrays)
        if gradients:
            out = jax.eval_shape(plain, arrays)
            pull_back(plain, arrays, jnp.ones(out.shape, out.dtype))
        else:
            plain(arrays)

    def in_form(self, problem: Problem, given: Mapping[str, Any]) -> np.ndarray:
        """`out` of the plain call with some of its arguments as they are `given`."""
        statics, arrays = self.arguments(problem)
        static = {**statics, **{name: x for name, x in given.items() if name not in arrays}}
        plain = functools.partial(_call_plain, self.implementation.call, static)
        return np.asarray(self.jit(plain)({name: given.get(name, x) for name, x in arrays.items()}))

    def bind(self, problem: Problem) -> tuple[Callable[[Arrays], Any], Arrays]:
        """The plain call with its static keywords bound, not compiled, and the arrays it takes."""
        statics, arrays = self.arguments(problem)
        return functools.partial(_call_plain, self.implementation.call, statics), arrays

    def temporary_bytes(self, problem: Problem, *, gradients: bool) -> int | None:
        """Temporary memory of the compiled plain call, with its backward pass if asked; none if unknown."""
        plain, arrays = self.bind(problem)
        out = jax.eval_shape(plain, arrays)
        if gradients:
            compiled = self.jit(functools.partial(pull_back, plain)).lower(arrays, out).compile()
        else:
            compiled = self.jit(plain).lower(arrays).compile()
        analysis = compiled.memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def compiled(self, problem: Problem) -> tuple[Compiled, Arrays]:
        """The entry points at the problem's static configuration, and the arrays they take."""
        statics, arrays = self.arguments(problem)
        key = (tuple(sorted(statics.items())), tuple(sorted(arrays)))
        if key not in self._compiled:
            self._compiled[key] = _compile(self.implementation, statics, self.jit)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key], arrays

    def arguments(self, problem: Problem) -> tuple[dict[str, Any], Arrays]:
        """Static keywords and arrays of the call."""
        batch, q_length, num_q_heads, _ = problem.q.shape
        static, extra = self.implementation.lower_mask(problem.mask, batch, num_q_heads, q_length, problem.k.shape[1])
        values = [(operand, getattr(problem, operand.name)) for operand in OPERANDS]
        statics = {**static, **{operand.name: value for operand, value in values if not operand.arrays}}
        arrays = {operand.name: value for operand, value in values if operand.arrays and value is not None}
        return statics, {**arrays, **extra}


def _call_plain(call: Callable[..., Any], statics: Mapping[str, Any], arrays: Arrays) -> Any:
    return call(**arrays, **statics)


def _compile(implementation: Implementation, statics: Mapping[str, Any], jit: Callable[..., Any]) -> Compiled:
    call = implementation.call
    plain = functools.partial(_call_plain, call, statics)

    def with_residuals(arrays: Arrays) -> Any:
        result = call(**arrays, **statics, save_residuals=True)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise TypeError(
                f"with save_residuals=True the call must return (out, {{'logsumexp': ..., 'max_logits': ...}}), "
                f"got {type(result).__name__}"
            )
        return result[0], dict(result[1])

    def with_lse(arrays: Arrays) -> Any:
        out, residuals = with_residuals(arrays)
        return out, residuals["logsumexp"]

    def part(arrays: Arrays) -> Any:
        return None if implementation.parts is None else implementation.parts(**arrays, **statics)

    def calls(arrays: Arrays) -> Any:
        return plain(arrays), with_residuals(arrays) if implementation.residuals else None, part(arrays)

    return Compiled(
        forward=jit(plain),
        residuals=jit(with_residuals),
        part=jit(part),
        calls=jit(calls),
        gradients=jit(lambda arrays, do: pull_back(plain, arrays, do)),
        gradients_lse=jit(lambda arrays, do, dlse: pull_back(with_lse, arrays, (do, dlse))),
    )


def pull_back(function: Callable[[Arrays], Any], arrays: Arrays, cotangent: Any) -> tuple[Any, Arrays]:
    """The value, and the gradients of the differentiable operands for a cotangent of it.

    A value in another floating-point dtype than it should have is a failure of its own. It is differentiated all the
    same: the cotangent is given in that dtype.
    """
    moving = {name: x for name, x in arrays.items() if name in GRADIENT_OF}
    fixed = {name: x for name, x in arrays.items() if name not in GRADIENT_OF}
    primal, pullback = jax.vjp(lambda m: function({**m, **fixed}), moving)
    if jax.tree.structure(primal) == jax.tree.structure(cotangent):  # type: ignore[operator] # untyped upstream
        cotangent = jax.tree.map(_in_dtype_of, primal, cotangent)
    return primal, pullback(cotangent)[0]


def _in_dtype_of(value: Any, cotangent: Any) -> Any:
    return cotangent.astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.floating) else cotangent


def _renamed(gradients: Arrays) -> dict[str, Any]:
    return {GRADIENT_OF[name]: x for name, x in gradients.items()}


def _on_host(values: Arrays) -> Result:
    return Result({name: np.asarray(x) for name, x in jax.device_get(dict(values)).items()})
