"""Find what a kernel has replaced of the code that its process is asked with: of JAX, NumPy, Python, and this project.

Gradients that a kernel's own `jax.vjp` made are not those of the kernel. This finds, in the modules that are watched:

- names that mean something else than before the kernel was imported;
- methods that a class of this project gained or lost;
- functions whose code or default arguments were exchanged;
- a `jit` that is switched off.

It runs in the kernel's process, as a private copy (`private_copy`), so replacing its functions by name does nothing.
What a kernel changes further inside a library, or in memory, is not found.
"""

from __future__ import annotations

import builtins
import dataclasses
import gc
import operator
import os
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import jax

_LIBRARIES_TEXT = """
jax jax.lax jax.numpy jax.tree jax.tree_util json json.encoder json.decoder numpy pickle struct ml_dtypes
operator dataclasses math io
"""
_LIBRARIES = frozenset(_LIBRARIES_TEXT.split())
_OURS = ("cases", "conformance")
_WATCHED_OS_NAMES = ("read", "write", "getpid", "_exit")
# Honest libraries replace some of these: to trace imports, or to draw progress.
_REPLACEABLE_BUILT_INS = (
    "__import__",
    "__build_class__",
    "print",
    "input",
    "open",
    "breakpoint",
    "help",
    "exit",
    "quit",
)
_SPECIAL_METHODS = (
    "__getattribute__",
    "__getattr__",
    "__setattr__",
    "__setstate__",
    "__reduce__",
    "__reduce_ex__",
    "__new__",
)
_MISSING = object()


@dataclasses.dataclass(frozen=True)
class NameSnapshot:
    """What the watched names mean. Plain tuples, since they are looked through after every call.

    Attributes:
      held: what something is called, the namespace that it is in, its name there, and its value.
      functions: what a function is called, the function, its code, its defaults and its keyword defaults.
      parts: all that these functions referred to when they were last found unaltered, code and defaults among it.
      jit_disabled: whether `jit` was switched off before, as `JAX_DISABLE_JIT` does.
    """

    bindings: tuple[tuple[str, Mapping[str, Any], str, Any], ...]
    functions: tuple[tuple[str, Any, Any, Any, Any], ...]
    referents: list[Any]
    jit_disabled: bool


def take_snapshot() -> NameSnapshot:
    """Record what the functions, classes and methods of the watched modules are."""
    bindings: list[tuple[str, Mapping[str, Any], str, Any]] = [
        (f"os.{name}", vars(os), name, vars(os)[name]) for name in _WATCHED_OS_NAMES
    ]
    bindings += [
        (f"builtins.{name}", vars(builtins), name, value)
        for name, value in vars(builtins).items()
        if callable(value) and name not in _REPLACEABLE_BUILT_INS
    ]
    functions: dict[int, tuple[str, Any, Any, Any, Any]] = {}
    for name, module in list(sys.modules.items()):
        ours = name.partition(".")[0] in _OURS
        if not (ours or name in _LIBRARIES):
            continue
        bindings.append((name, sys.modules, name, module))
        for inner, value in list(vars(module).items()):
            label = f"{name}.{inner}"
            if callable(value):
                bindings.append((label, vars(module), inner, value))
            candidates = {label: value}
            if ours and isinstance(value, type) and value.__module__ == name:
                bindings += _list_class_attributes(label, value)
                candidates = {f"{label}.{method}": x for method, x in vars(value).items()}
            for function_label, function in candidates.items():
                if isinstance(function, FunctionType):
                    code = (function.__code__, function.__defaults__, function.__kwdefaults__)
                    functions.setdefault(id(function), (function_label, function, *code))
    found = tuple(functions.values())
    referents = gc.get_referents(*(function for _, function, *_ in found))
    return NameSnapshot(tuple(bindings), found, referents, bool(jax.config.jax_disable_jit))  # type: ignore[attr-defined] # made as JAX is loaded


def _list_class_attributes(label: str, kind: type) -> Iterator[tuple[str, MappingProxyType[str, Any], str, Any]]:
    # Annotations and the like come into being when they are looked at, and nothing depends on them.
    for name in {*vars(kind), *getattr(kind, "__dataclass_fields__", ()), *_SPECIAL_METHODS}:
        yield f"{label}.{name}", vars(kind), name, vars(kind).get(name, _MISSING)


def find_replaced(before: NameSnapshot) -> list[str]:
    """Return the watched names that mean something else than in the snapshot, sorted."""
    found = [label for label, place, name, value in before.bindings if place.get(name, _MISSING) is not value]
    if jax.config.jax_disable_jit and not before.jit_disabled:  # type: ignore[attr-defined] # what `jit` would have traced is never seen
        found.append("jax.jit (jax_disable_jit)")
    # To read the code of a function is an event for audit hooks (`file_watcher`), and there are thousands of functions.
    # So all they refer to is compared first. It also differs when somebody sets an attribute, which is harmless.
    referents = gc.get_referents(*(function for _, function, *_ in before.functions))
    if len(referents) != len(before.referents) or not all(map(operator.is_, referents, before.referents)):
        altered = [
            f"{label}.__code__"
            for label, function, code, defaults, named in before.functions
            if function.__code__ is not code
            or function.__defaults__ is not defaults
            or function.__kwdefaults__ is not named
        ]
        if not altered:
            before.referents[:] = referents
        found += altered
    return sorted(found)
