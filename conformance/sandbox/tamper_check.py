"""Whether a kernel has replaced what its process is asked with: functions of JAX, of NumPy, of this project.

Gradients that a kernel's own `jax.vjp` has made are not those of the kernel. This finds what is replaced by name, in
the modules that anybody replaces something in, what our classes have got or lost, functions that are left in their
place with other code, and a `jit` that is switched off. It runs in the kernel's process, so that it cannot find
everything.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import jax

_LIBRARIES = ("jax", "jax.lax", "jax.numpy", "jax.tree", "jax.tree_util", "json", "numpy", "pickle", "struct")
_OURS = ("cases", "conformance")
_ASKED = ("__getattribute__", "__getattr__", "__setattr__", "__setstate__", "__reduce__", "__reduce_ex__", "__new__")
_NOTHING = object()


@dataclasses.dataclass(frozen=True)
class NameSnapshot:
    """What is where, found once and looked at after every call: so these are plain tuples, and no objects.

    Attributes:
      held: what something is called, the namespace that it is in, its name there, and what it is.
      functions: what a function is called, the function, its code and its defaults.
      memory: that of each of these functions, which has the addresses of its code and defaults.
      seen: what was in all of it, one behind the other, when the functions were last found unaltered.
      disabled: whether `jit` was switched off before, as `JAX_DISABLE_JIT` does.
    """

    held: tuple[tuple[str, Mapping[str, Any], str, Any], ...]
    functions: tuple[tuple[str, Any, Any, Any, Any], ...]
    memory: tuple[ctypes.Array[ctypes.c_byte], ...]
    seen: bytearray
    disabled: bool


def take_snapshot() -> NameSnapshot:
    """The functions and classes of the modules that are watched, what our classes have, and the code of functions."""
    held: list[tuple[str, Mapping[str, Any], str, Any]] = []
    functions: dict[int, tuple[str, Any, Any, Any, Any]] = {}
    for name, module in list(sys.modules.items()):
        ours = name.partition(".")[0] in _OURS
        if not (ours or name in _LIBRARIES):
            continue
        held.append((name, sys.modules, name, module))
        for inner, value in list(vars(module).items()):
            called = f"{name}.{inner}"
            if callable(value):
                held.append((called, vars(module), inner, value))
            within = {called: value}
            if ours and isinstance(value, type) and value.__module__ == name:
                held += _of_class(called, value)
                within = {f"{called}.{method}": x for method, x in vars(value).items()}
            for called_so, function in within.items():
                if isinstance(function, FunctionType):
                    code = (function.__code__, function.__defaults__, function.__kwdefaults__)
                    functions.setdefault(id(function), (called_so, function, *code))
    found = tuple(functions.values())
    memory = tuple(_memory_of(function) for _, function, *_ in found)
    return NameSnapshot(tuple(held), found, memory, bytearray().join(memory), bool(jax.config.jax_disable_jit))  # type: ignore[attr-defined] # made as JAX is loaded


def _of_class(called: str, kind: type) -> Iterator[tuple[str, MappingProxyType[str, Any], str, Any]]:
    # Annotations and the like come into being as they are looked at, and nothing goes by them.
    for name in {*vars(kind), *getattr(kind, "__dataclass_fields__", ()), *_ASKED}:
        yield f"{called}.{name}", vars(kind), name, vars(kind).get(name, _NOTHING)


def _memory_of(function: FunctionType) -> ctypes.Array[ctypes.c_byte]:
    """A view of what CPython has in memory of a function, behind what every object has; the function must live on."""
    begin = object.__basicsize__
    return (ctypes.c_byte * (FunctionType.__basicsize__ - begin)).from_address(id(function) + begin)


def find_replaced(before: NameSnapshot) -> list[str]:
    """Which of these names mean something else by now."""
    found = [called for called, place, name, value in before.held if place.get(name, _NOTHING) is not value]
    if jax.config.jax_disable_jit and not before.disabled:  # type: ignore[attr-defined] # what `jit` would have traced is never seen
        found.append("jax.jit (jax_disable_jit)")
    # To read the code of a function is an event for audit hooks (`file_watcher`), and there are thousands of functions.
    # So their memory is compared first. It may differ otherwise too: by an attribute, or since the function was called.
    if (memory := bytearray().join(before.memory)) != before.seen:
        altered = [
            f"{called}.__code__"
            for called, function, code, defaults, named in before.functions
            if function.__code__ is not code
            or function.__defaults__ is not defaults
            or function.__kwdefaults__ is not named
        ]
        found += altered
        if not altered:
            before.seen[:] = memory
    return sorted(found)
