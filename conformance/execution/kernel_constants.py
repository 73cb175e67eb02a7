"""Find the numbers in a kernel's source and in its traced program at which it may change its behaviour.

Such a number, a code number, is a block size, a threshold, or a length from which the kernel takes another path. Cases
with lengths and values next to these numbers are then judged (`cases.case_space.code_numbers`).

Code numbers are found in two places. The first is the source: the bytecode of the function and of the functions that it
calls, and the values that these get from a closure, a `functools.partial` or a global. In bytecode, `2**15` and `1 <<
15` are the same number. The second is the jaxpr of the function. It is traced for two sets of sizes, and a number is a
code number only if both jaxprs contain it. Other numbers follow from the sizes of the operands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from cases.case import Case
from cases.case_space.code_numbers import CodeNumbers
from cases.operand_registry import REMOVABLE
from cases.operand_values import draw_problem
from conformance.execution.executor import Executor, pull_back
from impls.contract.implementation import Implementation

# The largest number of integers, and also of floats, that are returned from the source and from the program.
_MAX_NUMBERS = {"source": 24, "program": 10}
_COMMON = frozenset({0, 0.5, 1, 2})  # numbers that are in every kernel, so they are no code numbers
_MAX_INTEGER = 2**17  # the largest integer that may be a code number
_MIN_PROGRAM_INTEGER = 8  # the smallest integer code number in a jaxpr; smaller integers are ranks and axes
# Packages whose functions do not belong to a kernel, so their code is not read. Their closures may hold the kernel.
_LIBRARY_PACKAGES = frozenset({"jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "conformance", "cases", "functools"})
_MAX_OBJECTS = 4000  # the largest number of Python objects that are searched for numbers
_DECIDING_OPERATORS = ("%", "//", "&", ">>", "<<")  # an operand of these is probably a block size or a threshold
# For each narrow type, the first integer that it cannot hold, or above which it cannot hold every integer.
_EXACT_INTEGER_LIMITS = {
    "int8": 2**7,
    "uint8": 2**8,
    "int16": 2**15,
    "uint16": 2**16,
    "bfloat16": 2**8,
    "float16": 2**11,
}
# Types whose name in the source is a code number. The other types of `_EXACT_INTEGER_LIMITS` are dtypes of operands, so
# every kernel may name them.
_NARROW_INTEGERS = ("int8", "uint8", "int16", "uint16")

# The two sets of sizes for which a program is traced. Lengths are multiples of 128, which most kernels support.
_FIRST_LENGTH, _SECOND_LENGTH = 256, 640
_SIZES: tuple[dict[str, int], ...] = (
    {"batch": 2, "kv_length": _FIRST_LENGTH, "num_q_heads": 6, "num_kv_heads": 6, "head_dim": 64, "v_head_dim": 64},
    {"batch": 3, "kv_length": _SECOND_LENGTH, "num_q_heads": 4, "num_kv_heads": 4, "head_dim": 128, "v_head_dim": 128},
)


def find_code_numbers(implementation: Implementation) -> CodeNumbers:
    """Find the code numbers in the source and traced programs of an implementation; the result is deterministic."""
    told, aside = _find_source_numbers(implementation.call)
    shown = _find_program_numbers(implementation)
    source, program = _deduplicate([*told, *aside]), _deduplicate(shown)
    found = {}
    for kind in (int, float):
        ours = [x for x in source if isinstance(x, kind)][: _MAX_NUMBERS["source"]]
        theirs = [x for x in program if isinstance(x, kind) and x not in ours][: _MAX_NUMBERS["program"]]
        found[kind] = (ours, theirs)
    (ints, more_ints), (floats, more_floats) = found[int], found[float]
    return CodeNumbers(
        integers=tuple(int(x) for x in (*ints, *more_ints)),
        floats=tuple(float(x) for x in (*floats, *more_floats)),
        in_source=frozenset(float(x) for x in (*ints, *floats)),
    )


def report_code_numbers(executor: Executor) -> tuple[list[int], list[float], list[float]]:
    """Run `find_code_numbers` as a task, and return its integers, its floats, and those that are in the source."""
    code_numbers = find_code_numbers(executor.implementation)
    return list(code_numbers.integers), list(code_numbers.floats), sorted(code_numbers.in_source)


def _deduplicate(numbers: Iterable[Any]) -> list[Any]:
    """Return the magnitudes of numbers that may be code numbers, each once, in order of appearance.

    Common numbers, too large integers, infinity and NaN are left out.
    """
    found: dict[Any, None] = {}
    for x in numbers:
        if isinstance(x, (bool, np.bool_)) or not isinstance(x, (int, float, np.integer, np.floating)):
            continue
        size = abs(x.item() if isinstance(x, np.generic) else x)
        usable = math.isfinite(size) if isinstance(size, float) else size <= _MAX_INTEGER
        if usable and size not in _COMMON:
            found.setdefault(size)
    return list(found)


# Numbers in the source.


def _find_source_numbers(call: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
    """Return two lists of numbers: those that probably decide something, and all others.

    The first list has numbers that code compares with or divides by, and values of closures, globals and arguments.
    """
    decisive: list[Any] = []
    others: list[Any] = []
    for x in _iter_kernel_objects(call):
        if (number := _parse_number(x)) is not None:
            decisive.append(number)
        elif isinstance(x, types.CodeType):
            decisive += _find_constants(x, deciding=True)
            others += _find_constants(x, deciding=False)
    return decisive, others


def iter_kernel_functions(call: Callable[..., Any]) -> Iterator[types.FunctionType]:
    """Iterate over the functions that a kernel's call leads to, apart from those of libraries, the nearest first."""
    return (x for x in _iter_kernel_objects(call) if isinstance(x, types.FunctionType) and not _is_foreign(x))


def _iter_kernel_objects(call: Callable[..., Any]) -> Iterator[Any]:
    """Iterate over numbers, code and other objects that a kernel's call leads to, the nearest first."""
    waiting: list[Any] = [call]
    met: dict[int, Any] = {}  # visited objects by `id`; they are kept alive so that ids stay unique
    while waiting and len(met) < _MAX_OBJECTS:
        x = waiting.pop(0)
        if _parse_number(x) is not None:
            yield x
            continue
        if id(x) in met or x is None or isinstance(x, (str, bytes, bool, types.ModuleType)):
            continue
        met[id(x)] = x
        yield x
        if isinstance(x, types.CodeType):
            waiting += [const for const in x.co_consts if isinstance(const, types.CodeType)]
        else:
            waiting += _list_referenced(x)


def _parse_number(x: Any) -> Any:
    if isinstance(x, bool):
        return None
    if isinstance(x, (int, float, np.integer, np.floating)):
        return x
    name = _get_dtype_name(x)
    return _EXACT_INTEGER_LIMITS.get(name) if name else None


def _get_dtype_name(x: Any) -> str:
    """Return the name of a NumPy dtype, or of a JAX scalar type such as `jnp.float16`; "" for anything else."""
    if isinstance(x, np.dtype):
        return x.name
    dtype = getattr(x, "dtype", None) if type(x).__name__ == "_ScalarMeta" else None
    return dtype.name if isinstance(dtype, np.dtype) else ""


def _list_referenced(x: Any) -> list[Any]:
    """Return the objects that an object refers to, if they may belong to the kernel."""
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, (tuple, list, set, frozenset)):
        return sorted(x, key=repr) if isinstance(x, (set, frozenset)) else list(x)
    if isinstance(x, Mapping):
        return [*x.keys(), *x.values()]
    if isinstance(x, property):
        return [x.fget]
    if isinstance(x, (staticmethod, classmethod)):
        return [x.__func__]
    if isinstance(x, types.FunctionType):
        return _list_referenced_by_function(x)
    if isinstance(x, type):
        return [] if _is_foreign(x) else [value for name, value in vars(x).items() if not name.startswith("__")]
    found = []
    with contextlib.suppress(Exception):  # reading an attribute of a lazy module may import, and fail
        found.append(getattr(x, "__wrapped__", None))
    if not _is_foreign(type(x)) and hasattr(x, "__dict__"):
        found += [type(x), *vars(x).values()]
    elif callable(x):  # objects such as `jax.custom_vjp` hold the functions that they wrap
        held = vars(x).values() if hasattr(x, "__dict__") else ()
        found += [value for value in held if isinstance(value, (types.FunctionType, functools.partial))]
    return found


def _list_referenced_by_function(function: types.FunctionType) -> list[Any]:
    held = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # raised for a cell without a value
            held.append(cell.cell_contents)
    found = [getattr(function, "__wrapped__", None), *held]
    if _is_foreign(function):
        return found
    found += [function.__code__, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names = _list_names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            found += [] if _is_foreign(value) else [vars(value)[n] for n in names if n in vars(value)]
        else:
            found.append(value)
    return [*found, *(_EXACT_INTEGER_LIMITS[name] for name in names if name in _NARROW_INTEGERS)]


def _is_foreign(x: Any) -> bool:
    name = x.__name__ if isinstance(x, types.ModuleType) else (getattr(x, "__module__", None) or "")
    return str(name).partition(".")[0] in _LIBRARY_PACKAGES


def _list_names(code: types.CodeType) -> list[str]:
    inner = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _list_names(const))
    return list(dict.fromkeys((*code.co_names, *inner)))


def _find_constants(code: types.CodeType, *, deciding: bool) -> list[Any]:
    """Return constants of a code object, in the order of its instructions.

    With `deciding`, they are those that the next instruction compares with, divides by or shifts by. Without, they are
    all others.
    """
    found: list[Any] = []
    steps = list(dis.get_instructions(code))
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if not step.opname.startswith("LOAD_") or not ("CONST" in step.opname or "SMALL_INT" in step.opname):
            continue
        compared = following is not None and (
            following.opname in ("COMPARE_OP", "CONTAINS_OP")
            or (following.opname.startswith("BINARY_OP") and following.argrepr.rstrip("=") in _DECIDING_OPERATORS)
        )
        if compared == deciding:
            several = isinstance(step.argval, (tuple, frozenset))
            found += sorted(step.argval, key=repr) if several else [step.argval]
    return found


# Numbers in the traced program.


def _find_program_numbers(implementation: Implementation) -> list[Any]:
    """Return the numbers that an implementation's jaxprs have in common for the two entries of `_SIZES`.

    Four pairs of cases are traced: with all supported operands, in bf16, with a window, and with one query. The two
    cases of a pair have different sizes and, where they have any, different numbers for the scale and the window.
    """
    plain = Case()
    usual = (operand for operand in REMOVABLE if not operand.opt_in)
    combined = {o.field: o.levels[0] for o in usual if implementation.supports(_add_operand(plain, o)) is None}
    found: list[Any] = []
    other = {field: value if isinstance(value, (bool, str)) else 1.7 * value for field, value in combined.items()}
    asked: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"mask": "causal", **combined}, {"mask": "causal", **other}),
        ({"mask": "causal", "dtype": "bf16"},) * 2,
        ({"mask": "window-l31-r7"}, {"mask": "window-l45-r11"}),
        ({"phase": "decode", "q_length": 1},) * 2,
    )
    for pair in asked:
        both = []
        for fields, sizes in zip(pair, _SIZES, strict=True):
            # A kernel may fail in any way while it is traced; then it has no program to read.
            with contextlib.suppress(Exception):
                case = dataclasses.replace(plain, **{"q_length": sizes["kv_length"], **sizes, **fields})
                if implementation.supports(case) is None:
                    both.append(_trace_numbers(implementation, case))
        if len(both) == len(_SIZES):
            found += [x for x in both[0] if x in both[1] and (isinstance(x, float) or x >= _MIN_PROGRAM_INTEGER)]
    return sorted(dict.fromkeys(found), key=lambda x: (isinstance(x, float), -found.count(x), x))


def _add_operand(case: Case, operand: Any) -> Case:
    return dataclasses.replace(case, **{operand.field: operand.levels[0]})


def _trace_numbers(implementation: Implementation, case: Case) -> dict[Any, None]:
    """Return the numbers in the jaxpr of a case's call, in order; with gradients if the implementation offers any."""
    plain, arrays = Executor(implementation).bind(draw_problem(case))
    arrays = {name: jax.tree.map(np.asarray, x) for name, x in arrays.items()}
    program: Callable[[Any], Any] = plain
    if case.phase == "train" and implementation.gradients:
        out = jax.eval_shape(plain, arrays)
        ones = np.ones(out.shape, out.dtype)
        program = lambda given: pull_back(plain, given, ones)  # noqa: E731
    return dict.fromkeys(_iter_program_numbers(jax.make_jaxpr(program)(arrays).jaxpr))


def _iter_program_numbers(program: Any) -> Iterator[Any]:
    for equation in program.eqns:
        for given in equation.invars:
            if isinstance(given, core.Literal) and np.ndim(given.val) == 0:
                value = np.asarray(given.val).item()
                if isinstance(value, int | float):  # not complex, nor float0, whose item is a tuple
                    yield value
        for made in equation.outvars:
            yield from getattr(made.aval, "shape", ())
        if equation.primitive.name == "convert_element_type":
            came = getattr(equation.invars[0].aval, "dtype", np.dtype(bool))
            if np.issubdtype(came, np.integer) and (name := str(equation.params["new_dtype"])) in _EXACT_INTEGER_LIMITS:
                yield _EXACT_INTEGER_LIMITS[name]
        for value in equation.params.values():
            yield from _iter_parameter_numbers(value)


def _iter_parameter_numbers(value: Any) -> Iterator[Any]:
    """Yield the numbers in a parameter of an equation, also in nested jaxprs and in the block shapes of a kernel."""
    if hasattr(value, "eqns"):
        yield from _iter_program_numbers(value)
    elif hasattr(value, "jaxpr"):
        yield from _iter_parameter_numbers(value.jaxpr)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _iter_parameter_numbers(part)
    elif hasattr(value, "block_mappings"):
        for mapping in value.block_mappings:
            yield from (size for size in mapping.block_shape if isinstance(size, int))
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
