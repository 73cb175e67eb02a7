"""Find functions of JAX, NumPy, Python and this project that a kernel has replaced in its own process.

The judge's requests are executed with these functions. So a kernel that replaces `jax.vjp` could return gradients that
it does not compute. The check finds, in watched modules:

- names that refer to another object than before the kernel was imported;
- methods that a class of this project gained or lost;
- functions whose code or default arguments were replaced;
- a `jit` that is switched off.

The check runs in the kernel's process as a private copy (`private_copy`), so a kernel that replaces the check's own
functions by name has no effect. Changes deeper inside a library, or in memory, are not found.
"""

from __future__ import annotations

import builtins
import dataclasses
import gc
import itertools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

import jax

_LIBRARIES_TEXT = """
jax jax.lax jax.numpy jax.tree jax.tree_util json json.encoder json.decoder numpy pickle struct ml_dtypes
operator dataclasses math io
"""
_LIBRARIES = frozenset(_LIBRARIES_TEXT.split())
_OURS = ("cases.", "conformance.", "impls.contract.", "reports.")
_WATCHED_OS_NAMES = ("read", "write", "getpid", "_exit")
# Built-in functions that are not watched: libraries replace some of them legitimately, for example to trace imports or
# to show progress.
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
class WatchedNamespace:
    """The watched names of one namespace. Comparing them together is faster than one by one."""

    namespace: Mapping[str, Any]  # the variables of a module, the attributes of a class, or `sys.modules`
    # Returns the objects that the names refer to. It takes the namespace, and raises `KeyError` if a name is missing.
    get_objects: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    objects: tuple[Any, ...]  # the objects before the kernel was imported
    absent: frozenset[str]  # names that must not appear

    def is_unchanged(self) -> bool:
        """Tell whether every name refers to the same object as before."""
        try:
            objects = self.get_objects(self.namespace)
        except KeyError:
            return False
        return all(map(operator.is_, objects, self.objects)) and (
            not self.absent or self.namespace.keys().isdisjoint(self.absent)
        )


@dataclasses.dataclass(frozen=True)
class NameSnapshot:
    """The objects that watched names referred to before the kernel was imported.

    Plain tuples are used for speed, since all names are compared after each call.
    """

    # For each watched name a label, the namespace, the name in the namespace, and the object.
    bindings: tuple[tuple[str, Mapping[str, Any], str, Any], ...]
    namespaces: tuple[WatchedNamespace, ...]  # the same bindings, grouped by namespace
    # For each watched function a label, the function, its code, its defaults and its keyword defaults.
    functions: tuple[tuple[str, Any, Any, Any, Any], ...]
    referents: list[Any]  # all objects that the watched functions referred to when they were last found unchanged
    # Whether `jit` was switched off before the kernel was imported, for example by `JAX_DISABLE_JIT`.
    jit_disabled: bool


def take_snapshot() -> NameSnapshot:
    """Record the functions, classes and methods of the watched modules."""
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
        ours = f"{name}.".startswith(_OURS)
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
    namespaces = tuple(_group_by_namespace(bindings))
    return NameSnapshot(tuple(bindings), namespaces, found, referents, bool(jax.config.jax_disable_jit))  # type: ignore[attr-defined] # made as JAX is loaded


def _list_class_attributes(label: str, kind: type) -> Iterator[tuple[str, MappingProxyType[str, Any], str, Any]]:
    # Other attributes that a class gains later are not watched: Python adds some, such as annotations, on first use.
    attributes = vars(kind)  # each call makes a new object
    for name in {*attributes, *getattr(kind, "__dataclass_fields__", ()), *_SPECIAL_METHODS}:
        yield f"{label}.{name}", attributes, name, attributes.get(name, _MISSING)


def _group_by_namespace(bindings: list[tuple[str, Mapping[str, Any], str, Any]]) -> Iterator[WatchedNamespace]:
    for _, group in itertools.groupby(sorted(bindings, key=_identify_namespace), key=_identify_namespace):
        found = list(group)
        present = [(name, value) for _, _, name, value in found if value is not _MISSING]
        absent = frozenset(name for _, _, name, value in found if value is _MISSING)
        # Watch at least two names: for a single one, `itemgetter` returns no tuple.
        present = [*present, *present] if len(present) == 1 else present
        names, objects = zip(*present, strict=True) if present else ((), ())
        get_objects = operator.itemgetter(*names) if names else lambda namespace: ()
        yield WatchedNamespace(found[0][1], get_objects, objects, absent)


def _identify_namespace(binding: tuple[str, Mapping[str, Any], str, Any]) -> int:
    return id(binding[1])


def find_replaced(before: NameSnapshot) -> list[str]:
    """Return the labels of watched names and functions that differ from the snapshot, sorted."""
    found: list[str] = []
    if not all(namespace.is_unchanged() for namespace in before.namespaces):
        found += (label for label, place, name, value in before.bindings if place.get(name, _MISSING) is not value)
    if jax.config.jax_disable_jit and not before.jit_disabled:  # type: ignore[attr-defined] # without `jit`, nothing is traced
        found.append("jax.jit (jax_disable_jit)")
    # Reading `__code__` of a function raises an audit event, which is slow for thousands of functions (`file_watcher`
    # has an audit hook). So first compare the objects that the functions refer to. These also differ if an attribute of
    # a function was set, which is harmless.
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
