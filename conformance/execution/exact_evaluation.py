"""Evaluate a function with every float in float64, so that what is left of its error is the algorithm's own.

`evaluate_exactly` traces a function as it is, and evaluates its jaxpr with other types: conversions among floats do
nothing, products are those of float64, and `reduce_precision` does nothing. Integers and booleans stay what they are.
Loops, branches, custom derivatives, `shard_map` and interpreted Pallas kernels are evaluated in the same way.

What was rounded while the function was traced stays rounded: a Python number takes the dtype of the array that it
meets. `Roundoff.of_constants` bounds what that does to results.

Some programs have no such evaluation: they look at the bits of a float, or leave JAX. They raise `NoExactEvaluation`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

# Primitives that compute in another precision, and nothing if every float is float64.
_IDENTITIES = frozenset({"reduce_precision", "name", "optimization_barrier", "copy", "copy_p"})
# Primitives that hold one jaxpr which is called on their operands, by the parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "call_jaxpr",
    "custom_lin": "call_jaxpr",
}
# Parameters that choose a precision or the accuracy of a function, and mean nothing in float64.
_PRECISIONS = frozenset({"precision", "accuracy", "algorithm"})
# Primitives that read or write the bits of a float, or whose last bit means something.
_OF_BITS = frozenset(
    {"bitcast_convert_type", "bitcast", "nextafter", "stochastic_convert_element_type", "pack_elementwise"}
)
_SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter_add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul,
    "scatter_mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter_min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
    "scatter_max": lax.scatter_max,
}


class NoExactEvaluation(Exception):
    """Say which primitive has no evaluation in float64, and where the function calls it."""


def evaluate_exactly(function: Callable[..., Any], *args: Any) -> Any:
    """Evaluate a function of arrays with every float in float64.

    Args:
      function: a function that JAX can trace.
      args: pytrees of arrays; floats of any width are exact in float64.

    Returns:
      What the function returns, with float64 in place of each float.

    Raises:
      NoExactEvaluation: if the function looks at the bits of a float, or leaves JAX.
    """
    return build_exact(function)(*args)


def build_exact(
    function: Callable[..., Any], jit: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit
) -> Callable[..., Any]:
    """Return the function that `evaluate_exactly` calls; `jit` compiles the evaluation."""

    def evaluate(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        with jax.enable_x64(True):
            evaluated = jit(lambda *leaves: _evaluate(closed.jaxpr, closed.consts, leaves))
            results = evaluated(*(_widen_constant(x) for x in jax.tree.leaves(args)))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return evaluate


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.inexact)


def _widen(dtype: Any) -> Any:
    """Return the dtype in which values of a dtype are evaluated."""
    if not _is_float(dtype):
        return dtype
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, np.complexfloating) else np.dtype(np.float64)


def _widen_constant(value: Any) -> Any:
    """Return a constant in float64 if it is a float; JAX's keys and other objects stay what they are."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        dtype = np.result_type(value)
    if not _is_float(dtype):
        return value
    if isinstance(value, jax.core.Tracer):
        return lax.convert_element_type(value, _widen(dtype))
    return np.asarray(value).astype(_widen(dtype))


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on arguments whose floats are float64."""
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return _widen_constant(atom.val) if isinstance(atom, core.Literal) else values[atom]

    values.update(zip(jaxpr.constvars, map(_widen_constant, consts), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        with equation.ctx.manager:
            results = _evaluate_equation(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _evaluate_closed(closed: Any) -> Callable[..., list[Any]]:
    """Return the evaluation of a jaxpr as a function of its arguments."""
    jaxpr, consts = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
    return lambda *args: _evaluate(jaxpr, consts, args)


def _evaluate_equation(equation: Any, args: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, dict(equation.params)
    if name in _CALLS:
        return _evaluate_closed(params[_CALLS[name]])(*args)
    if name in _RULES:
        return _RULES[name](equation, args, params)
    if name in _IDENTITIES:
        return args
    if name == "debug_callback" or name == "debug_print":
        return []
    if name in _SCATTERS:
        return [_evaluate_scatter(_SCATTERS[name], args, params)]
    if "callback" in name or name in ("ffi_call", "custom_call"):
        raise _build_refusal(equation, "leaves JAX")
    avals = [*(atom.aval for atom in equation.invars), *(atom.aval for atom in equation.outvars)]
    has_floats = any(_is_float(getattr(aval, "dtype", np.int32)) for aval in avals)
    if has_floats and name in _OF_BITS:
        raise _build_refusal(equation, "depends on the bits of a float")
    if has_floats and any(map(_holds_program, params.values())):
        raise _build_refusal(equation, "calls a function in a way that is not known here")
    if any(hasattr(aval, "inner_aval") for aval in avals):
        raise _build_refusal(equation, "changes an array in place")
    return _bind_widened(equation, args, params) if has_floats else _bind(equation.primitive, args, params)


def _bind_widened(equation: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Bind a primitive that computes the same in any dtype, and check that its results are float64."""
    for key, value in params.items():
        if key in _PRECISIONS:
            params[key] = None
        elif _is_dtype(value) and _is_float(value):
            params[key] = _widen(value)
    try:
        results = _bind(equation.primitive, args, params)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise _build_refusal(equation, f"refuses float64: {str(error).splitlines()[0]}") from error
    for result, atom in zip(results, equation.outvars, strict=True):
        if result.dtype != _widen(atom.aval.dtype) or result.shape != atom.aval.shape:
            raise _build_refusal(equation, f"gives {result.dtype} from float64")
    return results


def _bind(primitive: Any, args: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    results = primitive.bind(*args, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _is_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))


def _holds_program(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_program, value))
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def _build_refusal(equation: Any, why: str) -> NoExactEvaluation:
    from jax._src import source_info_util  # private API, used only for a message

    place = source_info_util.summarize(equation.source_info)
    return NoExactEvaluation(f"{equation.primitive.name} {why} ({place})")


def _convert(equation: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Convert a dtype: among floats, nothing changes."""
    dtype = params["new_dtype"]
    before = equation.invars[0].aval.dtype
    if _is_float(before) and before != dtype and np.dtype(dtype).itemsize == 1 and dtype != np.bool_:
        if args[0].ndim:
            # What a cache stores in 8 bits is the operand of later calls, so its rounding belongs to the result.
            raise _build_refusal(equation, f"rounds to {np.dtype(dtype).name}")
        # A single number is no cache. It fills memory that nobody has written.
        stored = lax.convert_element_type(args[0], dtype)
        return [lax.convert_element_type(stored, _widen(dtype))]
    if _is_float(before) and _is_float(dtype) and _widen(before) == _widen(dtype):
        return args
    return [lax.convert_element_type(args[0], _widen(dtype))]


def _multiply_matrices(equation: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Multiply in float64 if the product is a float, also if an operand is an integer."""
    if _is_float(equation.outvars[0].aval.dtype):
        args = [lax.convert_element_type(x, np.float64) for x in args]
        params.update(preferred_element_type=np.dtype(np.float64), precision=None)
    return _bind(equation.primitive, args, params)


def _scan(_: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    body = _evaluate_closed(params["jaxpr"])
    if "ft_in" in params:  # jax 0.12
        consts, init, xs = map(list, params["ft_in"].update(args).unpack())
    else:
        begin, end = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, init, xs = args[:begin], args[begin:end], args[end:]

    def step(carry: Any, x: Any) -> Any:
        results = body(*consts, *carry, *x)
        return tuple(results[: len(init)]), tuple(results[len(init) :])

    carry, ys = lax.scan(
        step,
        tuple(map(_strip_weakness, init)),
        tuple(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _strip_weakness(value: Any) -> Any:
    """Return the value with a dtype that does not depend on the values that it meets, as a carry needs it."""
    return lax.convert_element_type(value, value.dtype) if hasattr(value, "dtype") else jnp.asarray(value)


def _loop(_: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    for_condition, for_body = params["cond_nconsts"], params["body_nconsts"]
    condition, body = _evaluate_closed(params["cond_jaxpr"]), _evaluate_closed(params["body_jaxpr"])
    condition_consts, body_consts = args[:for_condition], args[for_condition : for_condition + for_body]

    def goes_on(carry: Any) -> jax.Array:
        """Return whether to go on: a boolean, or under `vmap` one for each element of the leading axes of a carry."""
        return jnp.asarray(condition(*condition_consts, *carry)[0])

    def step(carry: Any) -> Any:
        goes, new = goes_on(carry), tuple(body(*body_consts, *carry))
        if goes.ndim == 0:
            return new
        wide = (goes.reshape(goes.shape + (1,) * (x.ndim - goes.ndim)) for x in new)
        return tuple(jnp.where(keep, x, old) for keep, x, old in zip(wide, new, carry, strict=True))

    start = tuple(map(_strip_weakness, args[for_condition + for_body :]))
    return lax.while_loop(lambda carry: goes_on(carry).any(), step, start)


def _choose(_: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    branches = [_evaluate_closed(branch) for branch in params["branches"]]
    index = lax.convert_element_type(args[0], np.int32)
    return lax.switch(index, [lambda *xs, run=run: tuple(run(*xs)) for run in branches], *args[1:])


def _map_over_shards(equation: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    names = inspect.signature(jax.shard_map).parameters
    options: dict[str, Any] = {name: params[name] for name in ("mesh", "check_vma") if name in params and name in names}
    if "manual_axes" in params:
        options["axis_names"] = set(params["manual_axes"])
    mapped: Any = jax.shard_map(
        lambda *xs: tuple(_evaluate_closed(params["jaxpr"])(*xs)),
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        **options,
    )
    return mapped(*args)


def _run_pallas(equation: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Evaluate a Pallas kernel by the loops that JAX's own interpreter makes of it."""
    if params.get("interpret") is not True:
        raise _build_refusal(equation, "is not run by JAX's plain interpreter")
    from jax._src.pallas import hlo_interpreter  # private API, which has no public form

    interpret = hlo_interpreter.pallas_call_hlo_interpret
    known = {name: params[name] for name in inspect.signature(interpret).parameters if name in params}
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    with jax.enable_x64(False):
        closed = jax.make_jaxpr(lambda *xs: interpret(*xs, **known))(*shapes)
    return _evaluate(closed.jaxpr, closed.consts, args)


def _evaluate_scatter(scatter: Callable[..., Any], args: list[Any], params: dict[str, Any]) -> Any:
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return scatter(*args, **{name: params[name] for name in names})


def _sum_in_place(_: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    return [args[0] + args[1]]


def _invert(_: Any, args: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Invert exactly, whether or not an approximation is asked: it is a rounding."""
    return [1.0 / args[0]]


_RULES: Mapping[str, Callable[[Any, list[Any], dict[str, Any]], Sequence[Any]]] = {
    "convert_element_type": _convert,
    "dot_general": _multiply_matrices,
    "ragged_dot": _multiply_matrices,
    "ragged_dot_general": _multiply_matrices,
    "scan": _scan,
    "while": _loop,
    "cond": _choose,
    "shard_map": _map_over_shards,
    "pallas_call": _run_pallas,
    "add_any": _sum_in_place,
    "reciprocal": _invert,
}
