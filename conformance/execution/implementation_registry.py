"""Find and load implementations by name, as users type it after `--impl=`.

A name is that of a built-in implementation or of an entry point, `library:function` for a published function
(`impls.libraries`), `module:attribute`, or `file.py:attribute`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from cases.name_suggestions import suggest_name
from conformance import packages
from conformance.execution import kernel_errors
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.execution.workload_adapters import build_workload_implementation
from impls.contract.declarations import Products
from impls.contract.implementation import Accelerator, Implementation
from reports.printable_text import make_printable

ENTRY_POINT_GROUP = "attention_conformance.implementations"

# The module that lists the built-in implementations. It is imported by name, since this package must not depend on
# any implementation.
_CATALOGUE = "impls.catalogue"
_LIBRARIES = "impls.libraries.library_specs"
_LIBRARY = "library"

# Settings of JAX that change no result: those of caches, logs, dumps and tracebacks.
_HARMLESS_SETTING = re.compile("cache|log|dump|traceback|debug_info|pprint|explain")
_settings_before = dict(jax.config.values)


class ImplementationNotFound(Exception):
    """No implementation of the requested name can be loaded; the message says why, and what name would work."""


def list_implementations() -> list[str]:
    """List the names of all built-in implementations, then those of all entry points."""
    ours = _load_catalogue()
    return [*ours, *(point.name for point in _list_entry_points() if point.name not in ours)]


def find_implementation(name: str, *, products: Products | None = None, problem: str | None = None) -> Implementation:
    """Find the implementation of this name.

    Args:
      name: a registered name, `module:attribute`, or `file.py:attribute`; the attribute is an `Implementation` or a
        plain attention function.
      products: for a plain function, the precision of its products of f32 operands, as in `declare`.
      problem: the named problem (`cases.named_problems`) whose operands the function takes; None for the canonical
        operands of attention.

    Returns:
      The implementation. Its `conventions` name the settings of JAX that importing it changed.

    Raises:
      ImplementationNotFound: if there is none or it does not load; the message is one line.
    """
    found = _find_implementation(name, products, problem)
    changed = tuple(
        f"{setting}={value!r}"
        for setting, value in jax.config.values.items()
        if value != _settings_before.get(setting) and not _HARMLESS_SETTING.search(setting)
    )
    return dataclasses.replace(found, conventions=(*found.conventions, *changed)) if changed else found


def _find_implementation(name: str, products: Products | None, problem: str | None) -> Implementation:
    """Find the implementation of this name, as `find_implementation` does."""
    if not name.isprintable():
        raise ImplementationNotFound(f"{make_printable(name)}: a name must be text that shows as it is")
    if name in (ours := _load_catalogue()):
        if problem is not None:
            raise ImplementationNotFound(
                f"{name} is no function of the operands of {problem}, but a built-in one: name your own function"
            )
        return _load_builtin(name, ours[name])
    for point in _list_entry_points():
        if point.name == name:
            return _build_implementation(_load_entry_point(point), name, products, problem)
    if "," in name and ":" not in name:
        raise ImplementationNotFound(f"{name!r} is several names: give --impl once for each")
    if ":" not in name:
        raise ImplementationNotFound(
            f"unknown implementation {name!r}: registered are {', '.join(list_implementations())}; "
            f"your own is named module:attribute or file.py:attribute{suggest_name(name, list_implementations())}"
        )
    if name.startswith(f"{_LIBRARY}:"):
        return _load_library_function(name, products, problem)
    return _build_implementation(load_attribute(name), name, products, problem)


def load_attribute(name: str) -> Any:
    """Load what `module:attribute` or `file.py:attribute` names; an attribute may have dots.

    Raises:
      ImplementationNotFound: if there is none, or its module does not load.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ImplementationNotFound(f"{name!r} is incomplete: write module:attribute or file.py:attribute")
    module = _load_file(source) if source.endswith(".py") else _import_users_module(source)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            missing = f"{source} has no attribute {attribute!r}{suggest_name(part, dir(found))}"
            raise ImplementationNotFound(packages.find_hidden_module(source) or missing)
        found = getattr(found, part)
    return found


def is_builtin(name: str) -> bool:
    """Return whether this project has an implementation of this name."""
    return name in _load_catalogue()


def may_exist(name: str) -> bool:
    """Return whether a name has a colon, as in `module:attribute`, or an entry point has it. Nothing is loaded."""
    return ":" in name or any(point.name == name for point in _list_entry_points())


def find_entry_point(name: str) -> importlib.metadata.EntryPoint | None:
    """Return the entry point of this name; None for built-in implementations and for those of a module or file."""
    if name in _load_catalogue():
        return None
    return next((point for point in _list_entry_points() if point.name == name), None)


def _load_catalogue() -> Mapping[str, str]:
    """Load the names of built-in implementations, each with the name of its module."""
    found: Mapping[str, str] = importlib.import_module(_CATALOGUE).MODULES
    return found


def _load_builtin(name: str, module: str) -> Implementation:
    for implementation in importlib.import_module(module).IMPLEMENTATIONS:
        if implementation.name == name:
            found: Implementation = implementation
            return found
    raise ImplementationNotFound(f"{module} does not define {name!r}")


def list_library_functions() -> list[str]:
    """List the names of the published functions that have an adapter here, as `library:function`."""
    libraries = importlib.import_module(_LIBRARIES).load_libraries().values()
    return [f"{_LIBRARY}:{function}" for library in libraries for function in library.functions]


def find_library_module(name: str) -> str | None:
    """Return the module that holds the published function `library:function`; None for other names."""
    found = importlib.import_module(_LIBRARIES).find_function(name) if name.startswith(f"{_LIBRARY}:") else None
    return None if found is None else str(found[0].imports)


def _load_library_function(name: str, products: Products | None, problem: str | None) -> Implementation:
    """Load the adapter of a published function; it is absent if its library is not installed."""
    specs = importlib.import_module(_LIBRARIES)
    found = specs.find_function(name)
    if found is None:
        known = list_library_functions()
        raise ImplementationNotFound(f"no adapter {name!r} of a published function{suggest_name(name, known)}")
    library, attribute = found
    if not specs.is_installed(library):
        absent = (
            f"{library.package} is not installed: pip install {library.package}, or judge it in an environment of its "
            f"own by python -m conformance survey --library={name.removeprefix(specs.PREFIX)}"
        )
        return Implementation(name=name, call=_refuse_call, accelerator=Accelerator(absent=absent))
    return _build_implementation(getattr(_import_module(library.module), attribute), name, products, problem)


def _refuse_call(*operands: Any, **options: Any) -> Any:
    del operands, options
    raise NotImplementedError("the library of this function is not installed")


def _list_entry_points() -> list[importlib.metadata.EntryPoint]:
    """List the entry points of implementations by name, except names with a colon, which would mean an attribute."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted((point for point in found if ":" not in point.name), key=lambda point: point.name)


def _load_entry_point(point: importlib.metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a third party's import raises, the user needs one line
        reason = kernel_errors.describe_kernel_error(error)
        raise ImplementationNotFound(f"entry point {point.name} = {point.value} does not load: {reason}") from error


def _import_users_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    return _import_module(name)


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's module raises, the user needs one line
        raise ImplementationNotFound(f"cannot import {name}: {kernel_errors.describe_kernel_error(error)}") from error


def _add_to_path(folder: Path) -> None:
    if (place := str(folder)) not in sys.path:
        sys.path.insert(0, place)


def _load_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise ImplementationNotFound(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    _add_to_path(file.resolve().parent)  # so that the file can import modules of its folder, as a script can
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's file raises, the user needs one line
        way = "; a module of a package goes by its name: PACKAGE.MODULE:NAME" if "relative import" in str(error) else ""
        raise ImplementationNotFound(
            f"{path} does not import: {kernel_errors.describe_kernel_error(error)}{way}"
        ) from error
    return module


def _build_implementation(found: Any, name: str, products: Products | None, problem: str | None) -> Implementation:
    if isinstance(found, Implementation) and problem is None:
        # Other processes, and the printed command that repeats a judgement, find the implementation by this name.
        return dataclasses.replace(found, name=name)
    try:
        if problem is not None:
            return build_workload_implementation(found, name, problem, products=products)
        return build_implementation(found, name, products=products)
    except NotAnAttentionFunction as error:
        raise ImplementationNotFound(make_printable(str(error))) from error
    except Exception as error:  # its declarations are wrong, or reading its signature runs code that raises
        raise ImplementationNotFound(
            f"{name} cannot be judged: {kernel_errors.describe_kernel_error(error)}"
        ) from error
