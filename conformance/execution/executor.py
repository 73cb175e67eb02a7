"""Define the `Executor`, which compiles an implementation's calls and runs them on problems.

Problems that differ only in values share compiled functions. Checks use the executor through `Subject`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from cases.case import OPT_IN
from cases.mask_spec import KINDS
from cases.masks import And, Mask, Or, Placed
from cases.operand_registry import GRADIENT_OF, OPERANDS
from cases.operand_values import Cotangent, Problem
from conformance import environment
from conformance.execution import returned_values, stored_calls
from conformance.execution.captured_arrays import bind_tables
from conformance.execution.common_subexpressions import eliminate_common_subexpressions
from impls.contract.implementation import Implementation

Arrays = Mapping[str, Any]
Values = Mapping[str, np.ndarray]
P = ParamSpec("P")
Returned = TypeVar("Returned")
# The number of static configurations (static keywords and names of arrays) whose compiled functions are cached. More
# would only cost memory, since a session runs cases in the order of their configurations.
_MAX_CACHED = 8


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of one call by observable name (`out`, `logsumexp`, `dq`, ...), as host arrays."""

    values: Mapping[str, np.ndarray]
    # The offered results of `cases.operand_registry.FURTHER_RESULTS`, of a call with residuals.
    further: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Calls:
    """The results of all forward calls that an implementation offers, on one problem."""

    forward: Result  # the results of the call without residuals
    residuals: Result | None  # the results of the call with residuals; None if no residuals are offered
    part: Any  # the part `(out, max, sum)` as the kernel returned it; None if it offers no parts


@dataclasses.dataclass(frozen=True)
class CompiledCalls:
    """The jitted calls of an implementation for one set of static keywords; each is compiled on first use."""

    forward: Callable[[Arrays], Any]  # from arrays to `out`
    residuals: Callable[[Arrays], Any]  # from arrays to `(out, residuals)`
    part: Callable[[Arrays], Any]  # from arrays to the unnormalised part, or None
    calls: Callable[[Arrays], Any]  # from arrays to the results of the three calls above, as one program
    gradients: Callable[[Arrays, Any], Any]  # from arrays and a cotangent of `out` to `(out, gradients)`
    # From arrays and cotangents of `out` and `logsumexp` to `((out, logsumexp), gradients)`.
    gradients_lse: Callable[[Arrays, Any, Any], Any]
    # From arrays and a cotangent of `out` to the results of `forward` and of `gradients`, as one program.
    forward_and_gradients: Callable[[Arrays, Any], Any]


class Executor:
    """Compile and run one implementation, with a cache of compiled functions.

    `run(task, ...)` runs a task, a function whose first argument is the executor. This class runs tasks in its own
    process. Its subclass for sandboxed kernels (`conformance.sandbox`) runs them in the kernel's process and receives
    the results.
    """

    def __init__(self, implementation: Implementation, options: Mapping[str, bool | int] | None = None) -> None:
        """Create an executor whose programs are compiled with `options`, in addition to the process's XLA flags."""
        self.implementation = bind_tables(stored_calls.lower_implementation(implementation))
        self.options = dict(options or {})
        self._compiled: collections.OrderedDict[Hashable, CompiledCalls] = collections.OrderedDict()

    def run(
        self, function: Callable[Concatenate[Executor, P], Returned], *given: P.args, **named: P.kwargs
    ) -> Returned:
        """Call a top-level `function` with this executor; it returns arrays, numbers, text, or containers of these."""
        return function(self, *given, **named)

    def begin(self, function: Callable[Concatenate[Executor, P], Any], *given: P.args, **named: P.kwargs) -> None:
        """Start a task early, for a later `run` with equal arguments, if tasks run in another process; here a no-op."""

    def settle(self) -> None:
        """Wait for tasks that were started by `begin`, if tasks run in another process; else do nothing."""

    def begin_forward(self, problem: Problem) -> None:
        """Start the call without residuals, if tasks run in another process (`begin`)."""
        self.begin(_run_forward, problem)

    def begin_calls(self, problem: Problem) -> None:
        """Start all forward calls of `calls`, if tasks run in another process."""
        self.begin(_run_calls, problem)

    def begin_gradients(self, problem: Problem, cotangent: Cotangent) -> None:
        """Start `gradients`, or `gradients_lse` if the cotangent includes `logsumexp` (`begin`)."""
        if cotangent.logsumexp is None:
            self.begin(_run_gradients, problem, cotangent.out)
        else:
            self.begin(_run_gradients_lse, problem, cotangent.out, cotangent.logsumexp)

    def begin_forward_and_gradients(self, problem: Problem, cotangent: Cotangent) -> None:
        """Start `forward_and_gradients`, if tasks run in another process (`begin`)."""
        self.begin(_run_forward_and_gradients, problem, cotangent.out)

    def with_default_flags(self) -> Executor | None:
        """Return an executor with JAX's default compiler options; None if this executor uses them already."""
        options = environment.build_default_options()
        return None if options == self.options else Executor(self.implementation, options)

    def create_fresh(self, *, new_hashes: bool = False) -> Executor:
        """Return an executor with the same implementation and options, and no compiled functions.

        If tasks run in another process, this executor has a process of its own, in which with `new_hashes` the values
        of Python's `hash` of text differ.
        """
        return Executor(self.implementation, self.options)

    def with_declarations(self, implementation: Implementation) -> Executor:
        """Return an executor with the declarations of `implementation` but the same call and compiled functions."""
        other = Executor(implementation, self.options)
        other._compiled = self._compiled
        return other

    def variant(self, name: str) -> Executor:
        """Return the executor of a declared variant, such as other block sizes; it offers no parts."""
        return self.with_call(self.implementation.variants[name], parts=None)

    @property
    def native(self) -> Executor:
        """The executor of the declared `native` call, which the accelerator's real compiler compiles."""
        assert self.implementation.accelerator.native is not None
        return Executor(dataclasses.replace(self.implementation, call=self.implementation.accelerator.native))

    def with_call(self, call: Callable[..., Any], **declared: Any) -> Executor:
        """Return the executor of the call `call`, with the declarations of this implementation and `declared`."""
        return Executor(dataclasses.replace(self.implementation, call=call, **declared), self.options)

    @property
    def backend(self) -> str:
        """The JAX backend that calls run on."""
        return jax.default_backend()

    @property
    def isolation(self) -> str:
        """A description of the kernel's sandbox; empty for a kernel in this process."""
        return ""

    @property
    def files(self) -> Mapping[str, str]:
        """The files that a sandboxed kernel read while it was loaded, each with its digest; empty without a sandbox."""
        return {}

    def pop_later_files(self) -> dict[str, str]:
        """Return the digests, by file, of files that a sandboxed kernel first read since this method's last call."""
        return {}

    @property
    def devices(self) -> int:
        """The number of JAX devices on which calls may run."""
        return len(jax.devices())

    def forward(self, problem: Problem) -> Result:
        """Return `out` of the call without residuals."""
        return Result(self.run(_run_forward, problem))

    def calls(self, problem: Problem) -> Calls:
        """Return the results of all offered forward calls, from one program, which compiles faster than several."""
        forward, residuals, part = self.run(_run_calls, problem)
        return Calls(Result(forward), None if residuals is None else self._split_residuals(residuals), part)

    def part(self, problem: Problem) -> Any:
        """Return the unnormalised part `(out, max, sum)` as the kernel returned it; None if it offers no parts."""
        return self.run(_run_part, problem)

    def residuals(self, problem: Problem) -> Result:
        """Return `out`, the residuals and the further results of the call with `save_residuals=True`."""
        return self._split_residuals(self.run(_run_residuals, problem))

    def _split_residuals(self, values: Values) -> Result:
        """Separate the further results that are offered, which have other shapes than residuals."""
        offered = self.implementation.further_results
        return Result(
            {name: x for name, x in values.items() if name not in offered},
            {name: x for name, x in values.items() if name in offered},
        )

    def gradients(self, problem: Problem, cotangent: Cotangent) -> Result:
        """Return `out` and the operands' gradients, for a cotangent of `out`, from the call without residuals."""
        return Result(self.run(_run_gradients, problem, cotangent.out))

    def gradients_lse(self, problem: Problem, cotangent: Cotangent) -> Result:
        """Return `out`, `logsumexp` and the gradients, for cotangents of both, from the call with residuals."""
        return Result(self.run(_run_gradients_lse, problem, cotangent.out, cotangent.logsumexp))

    def forward_and_gradients(self, problem: Problem, cotangent: Cotangent) -> tuple[Result, Result]:
        """Return what `forward` and `gradients` return, from one program that compiles about as fast as `gradients`."""
        forward, gradients = self.run(_run_forward_and_gradients, problem, cotangent.out)
        return Result(forward), Result(gradients)

    def jit(self, function: Callable[..., Any], **how: Any) -> Any:
        """Return `jax.jit(function, **how)` with the compiler options of this executor."""
        return jax.jit(function, compiler_options=self.options or None, **how)

    def bind(self, problem: Problem) -> tuple[Callable[[Arrays], Any], Arrays]:
        """Return the uncompiled call without residuals, and the arrays that it takes.

        Static keywords are bound, so the call is a function of the arrays. It checks that it returns one array.
        """
        statics, arrays = self.arguments(problem)
        return functools.partial(call_plain, self.implementation.call, statics), arrays

    def compiled(self, problem: Problem) -> tuple[CompiledCalls, Arrays]:
        """Return the compiled calls for the problem's static keywords, and the arrays that they take."""
        statics, arrays = self.arguments(problem)
        key = (tuple(sorted(statics.items())), tuple(sorted(arrays)))
        if key not in self._compiled:
            self._compiled[key] = _compile(self.implementation, statics, self.jit)
            while len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key], arrays

    def arguments(self, problem: Problem) -> tuple[dict[str, Any], Arrays]:
        """Return the static keywords of the call on a problem, and its arrays by keyword."""
        batch, q_length, num_q_heads, _ = problem.q.shape
        static, extra = self.implementation.lower_mask(problem.mask, batch, num_q_heads, q_length, problem.k.shape[1])
        values = [(operand, getattr(problem, operand.name)) for operand in OPERANDS]
        # An opt-in operand is passed only if the problem has it: other calls need not have a parameter for it.
        numbers = {o.name: x for o, x in values if not o.arrays and not (x is None and o.name in OPT_IN)}
        statics = {**static, **numbers}
        if problem.dropout_rate is not None:
            statics["dropout_rate"], extra = problem.dropout_rate, {**extra, **self._choose_dropout(problem)}
        arrays = {operand.name: value for operand, value in values if operand.arrays and value is not None}
        if problem.has_whole_scales:
            del arrays["kv_scales"]  # they are numbers
        numbers, of_scales = stored_calls.list_scale_arguments(problem)
        statics, arrays = {**statics, **numbers}, {**arrays, **of_scales}
        if problem.storage is not None:
            extra = {**extra, "storage": stored_calls.build_storage_arrays_for(self.implementation, problem)}
        return statics, {**arrays, **extra}

    def _choose_dropout(self, problem: Problem) -> Arrays:
        """Return the array that decides which weights are dropped, by its keyword: a mask, or the key."""
        if self.implementation.dropout_mask != "given":
            return {"dropout_key": problem.dropout_key}
        given = problem.dropout_mask
        return {"dropout_mask": self.draw_dropout_mask(problem) if given is None else given}

    def draw_dropout_mask(self, problem: Problem) -> np.ndarray:
        """Draw the mask for a call that takes one, of length 1 along the axes that are declared as shared."""
        mask, shared = problem.drawn_dropout_mask, self.implementation.dropout_shared
        return mask[: 1 if "batch" in shared else None, : 1 if "heads" in shared else None]


def _run_forward(executor: Executor, problem: Problem) -> Values:
    compiled, arrays = executor.compiled(problem)
    return _copy_to_host({"out": compiled.forward(arrays)})


def _run_calls(executor: Executor, problem: Problem) -> tuple[Values, Values | None, Any]:
    compiled, arrays = executor.compiled(problem)
    out, saved, part = compiled.calls(arrays)
    residuals = None if saved is None else _copy_to_host({**saved[1], "out": saved[0]})
    return _copy_to_host({"out": out}), residuals, part


def _run_part(executor: Executor, problem: Problem) -> Any:
    compiled, arrays = executor.compiled(problem)
    return compiled.part(arrays)


def _run_residuals(executor: Executor, problem: Problem) -> Values:
    compiled, arrays = executor.compiled(problem)
    out, residuals = compiled.residuals(arrays)
    return _copy_to_host({**residuals, "out": out})


def _run_gradients(executor: Executor, problem: Problem, do: np.ndarray) -> Values:
    compiled, arrays = executor.compiled(problem)
    out, gradients = compiled.gradients(arrays, do)
    return _copy_to_host({"out": out, **_rename_gradients(gradients)})


def _run_forward_and_gradients(executor: Executor, problem: Problem, do: np.ndarray) -> tuple[Values, Values]:
    compiled, arrays = executor.compiled(problem)
    forward, (out, gradients) = compiled.forward_and_gradients(arrays, do)
    return _copy_to_host({"out": forward}), _copy_to_host({"out": out, **_rename_gradients(gradients)})


def _run_gradients_lse(executor: Executor, problem: Problem, do: np.ndarray, dlse: np.ndarray | None) -> Values:
    compiled, arrays = executor.compiled(problem)
    (out, lse), gradients = compiled.gradients_lse(arrays, do, dlse)
    return _copy_to_host({"out": out, "logsumexp": lse, **_rename_gradients(gradients)})


def call_plain(call: Callable[..., Any], statics: Mapping[str, Any], arrays: Arrays) -> Any:
    """Call an implementation without residuals, and check that it returns one array."""
    return returned_values.check_output(call(**arrays, **statics))


def _compile(implementation: Implementation, statics: Mapping[str, Any], jit: Callable[..., Any]) -> CompiledCalls:
    call = implementation.call
    plain = functools.partial(call_plain, call, statics)

    def with_residuals(arrays: Arrays) -> Any:
        return returned_values.check_residuals(call(**arrays, **statics, save_residuals=True))

    def with_lse(arrays: Arrays) -> Any:
        out, residuals = with_residuals(arrays)
        return out, returned_values.get_residual(residuals, "logsumexp")

    def part(arrays: Arrays) -> Any:
        return None if implementation.parts is None else implementation.parts(**arrays, **statics)

    def calls(arrays: Arrays) -> Any:
        return plain(arrays), with_residuals(arrays) if implementation.has_residual_call else None, part(arrays)

    def pad(arrays: Arrays) -> Arrays:
        return stored_calls.add_padding(arrays, implementation.storage)

    def gradients(arrays: Arrays, do: Any) -> Any:
        return pull_back(plain, pad(arrays), do)

    def forward_and_gradients(arrays: Arrays, do: Any) -> Any:
        return plain(arrays), gradients(arrays, do)

    return CompiledCalls(
        forward=jit(plain),
        residuals=jit(with_residuals),
        part=jit(part),
        calls=jit(eliminate_common_subexpressions(calls)),
        gradients=jit(gradients),
        gradients_lse=jit(lambda arrays, do, dlse: pull_back(with_lse, pad(arrays), (do, dlse))),
        forward_and_gradients=jit(eliminate_common_subexpressions(forward_and_gradients)),
    )


def pull_back(function: Callable[[Arrays], Any], arrays: Arrays, cotangent: Any) -> tuple[Any, Arrays]:
    """Return the value of a function, and the gradients of its differentiable operands for a cotangent of the value.

    The cotangent is cast to the dtype of the value. A wrong dtype of the value is judged by other checks. The zeros for
    padding (`stored_calls.add_padding`), if present among `arrays`, get gradients too.

    Raises:
      WrongReturn: if the value has another shape than the cotangent.
    """
    moves = {*GRADIENT_OF, "padding"}
    moving = {name: x for name, x in arrays.items() if name in moves}
    fixed = {name: x for name, x in arrays.items() if name not in moves}
    primal, pullback = jax.vjp(lambda m: function({**m, **fixed}), moving)
    if jax.tree.structure(primal) == jax.tree.structure(cotangent):  # type: ignore[operator] # untyped upstream
        names = ("out", "logsumexp") if isinstance(primal, tuple) else "out"
        jax.tree.map(lambda name, x, dx: returned_values.check_shape(name, x, dx.shape), names, primal, cotangent)
        cotangent = jax.tree.map(
            lambda x, dx: dx.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else dx, primal, cotangent
        )
    return primal, pullback(cotangent)[0]


def _rename_gradients(gradients: Arrays) -> dict[str, Any]:
    of_padding = {f"{GRADIENT_OF[name]}.padding": x for name, x in gradients.get("padding", {}).items()}
    return {**{GRADIENT_OF[name]: x for name, x in gradients.items() if name != "padding"}, **of_padding}


def _copy_to_host(values: Arrays) -> Values:
    return {name: np.asarray(x) for name, x in jax.device_get(dict(values)).items()}


def _rebuild_mask(kind: type[Mask], _: None, children: tuple[Any, ...]) -> Mask:
    """Rebuild a mask from its children, without validation: JAX may pass any object in place of an array."""
    mask = object.__new__(kind)
    for name, child in zip(kind.traced, children, strict=True):
        object.__setattr__(mask, name, child)
    return mask


# Masks are pytrees, so that they can be arguments of traced functions. The fields in `traced` are their children.
_KINDS: dict[type[Mask], None] = dict.fromkeys([*(kind.type for kind in KINDS), And, Or, Placed])
for _kind in _KINDS:
    if _kind.traced:
        jax.tree_util.register_pytree_node(
            _kind,
            lambda mask: (tuple(getattr(mask, name) for name in mask.traced), None),
            functools.partial(_rebuild_mask, _kind),
        )
    else:
        jax.tree_util.register_pytree_node(_kind, lambda mask: ((), mask), lambda mask, _: mask)
