"""Find implementations by name: built-in, an entry point, `module:attribute` or `file.py:attribute`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import packages
from conformance.contract import Implementation, Products
from conformance.execution import kernel_errors
from conformance.execution.plain_functions import NotAnAttentionFunction, build_implementation
from conformance.execution.workload_adapters import build_workload_implementation
from conformance.records import make_printable

ENTRY_POINT_GROUP = "attention_conformance.implementations"

# The catalogue of built-in implementations. It is imported by name, since this package depends on none of them.
_CATALOGUE = "impls.catalogue"


class ImplementationNotFound(Exception):  # noqa: N818 -- a statement, as the message is
    """There is no implementation of that name; the message says what was tried and what would work."""


def list_implementations() -> list[str]:
    """Return all registered names, built-in ones first."""
    ours = _load_catalogue()
    return [*ours, *(point.name for point in _list_entry_points() if point.name not in ours)]


def find_implementation(name: str, *, products: Products | None = None, problem: str | None = None) -> Implementation:
    """Find the implementation of this name.

    Args:
      name: a registered name, `module:attribute`, or `file.py:attribute`; the attribute is an `Implementation` or a
        plain attention function.
      products: for plain functions, how they multiply f32 operands.
      problem: the named problem (`cases.named_problems`) whose operands the function takes; None for attention.

    Raises:
      ImplementationNotFound: with one line that says why.
    """
    if not name.isprintable():
        raise ImplementationNotFound(f"{make_printable(name)}: a name must be text that shows as it is")
    if name in (ours := _load_catalogue()):
        if problem is not None:
            raise ImplementationNotFound(f"{name} is no function of the operands of {problem}: give yours by its name")
        return _load_builtin(name, ours[name])
    for point in _list_entry_points():
        if point.name == name:
            return _build_implementation(_load_entry_point(point), name, products, problem)
    if "," in name and ":" not in name:
        raise ImplementationNotFound(f"{name!r} is several names: give --impl once for each")
    if ":" not in name:
        raise ImplementationNotFound(
            f"unknown implementation {name!r}: registered are {', '.join(list_implementations())}; "
            f"your own is named module:attribute or file.py:attribute"
        )
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ImplementationNotFound(f"{name!r} is incomplete: write module:attribute or file.py:attribute")
    module = _load_file(source) if source.endswith(".py") else _import_module(source)
    if not hasattr(module, attribute):
        raise ImplementationNotFound(packages.find_hidden_module(source) or f"{source} has no attribute {attribute!r}")
    return _build_implementation(getattr(module, attribute), name, products, problem)


def is_builtin(name: str) -> bool:
    """Return whether this project has an implementation of this name."""
    return name in _load_catalogue()


def may_exist(name: str) -> bool:
    """Return whether an implementation may have this name: one of a module, of a file, or of an entry point."""
    return ":" in name or any(point.name == name for point in _list_entry_points())


def find_entry_point(name: str) -> importlib.metadata.EntryPoint | None:
    """Return the entry point of this name; None for built-in implementations and for those of a module or file."""
    if name in _load_catalogue():
        return None
    return next((point for point in _list_entry_points() if point.name == name), None)


def _load_catalogue() -> Mapping[str, str]:
    """Load the built-in names, each with its module."""
    found: Mapping[str, str] = importlib.import_module(_CATALOGUE).MODULES
    return found


def _load_builtin(name: str, module: str) -> Implementation:
    for implementation in importlib.import_module(module).IMPLEMENTATIONS:
        if implementation.name == name:
            found: Implementation = implementation
            return found
    raise ImplementationNotFound(f"{module} does not define {name!r}")


def _list_entry_points() -> list[importlib.metadata.EntryPoint]:
    """Return the entry points of implementations; names with a colon belong to modules and files."""
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


def _import_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above
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
    _add_to_path(file.resolve().parent)  # for the modules beside it, as when Python runs the file
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above
        way = "; a module of a package goes by its name: PACKAGE.MODULE:NAME" if "relative import" in str(error) else ""
        raise ImplementationNotFound(
            f"{path} does not import: {kernel_errors.describe_kernel_error(error)}{way}"
        ) from error
    return module


def _build_implementation(found: Any, name: str, products: Products | None, problem: str | None) -> Implementation:
    if isinstance(found, Implementation) and problem is None:
        # Other processes and the command that repeats a judgement find it by this name.
        return dataclasses.replace(found, name=name)
    try:
        if problem is not None:
            return build_workload_implementation(found, name, problem, products=products)
        return build_implementation(found, name, products=products)
    except NotAnAttentionFunction as error:
        raise ImplementationNotFound(make_printable(str(error))) from error
    except Exception as error:  # what it declares is wrong, or its signature is code that raises
        raise ImplementationNotFound(
            f"{name} cannot be judged: {kernel_errors.describe_kernel_error(error)}"
        ) from error
