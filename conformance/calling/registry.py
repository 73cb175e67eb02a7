"""Finding implementations by name: ours, installed ones (entry points), `module:attribute` or `file.py:attribute`."""

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
from conformance.calling import mishaps
from conformance.calling.plain import NotAnAttentionFunction, from_function
from conformance.calling.problems import from_workload
from conformance.contract import Implementation, Products
from conformance.records import printable

ENTRY_POINT_GROUP = "attention_conformance.implementations"

# Where this project lists its own. Imported by name, since nothing in this package depends on an implementation.
_CATALOGUE = "impls.catalogue"


class ImplementationNotFound(Exception):  # noqa: N818 -- a statement, as the message is
    """No implementation goes by that name; the message says what was tried and what would work."""


def names() -> list[str]:
    """All registered names, ours first."""
    ours = _ours()
    return [*ours, *(point.name for point in _entry_points() if point.name not in ours)]


def find(name: str, *, products: Products | None = None, problem: str | None = None) -> Implementation:
    """The implementation called `name`.

    Args:
      name: a registered name, `module:attribute`, or `file.py:attribute`; the attribute is an `Implementation` or a
        plain attention function.
      products: for plain functions, how they multiply f32 operands.
      problem: the named problem (`cases.problems`) whose operands the function takes, none for those of attention.

    Raises:
      ImplementationNotFound: with one line that says why.
    """
    if not name.isprintable():
        raise ImplementationNotFound(f"{printable(name)}: a name must be text that shows as it is")
    if name in (ours := _ours()):
        if problem is not None:
            raise ImplementationNotFound(f"{name} is no function of the operands of {problem}: give yours by its name")
        return _registered(name, ours[name])
    for point in _entry_points():
        if point.name == name:
            return _as_implementation(_load(point), name, products, problem)
    if "," in name and ":" not in name:
        raise ImplementationNotFound(f"{name!r} is several names: give --impl once for each")
    if ":" not in name:
        raise ImplementationNotFound(
            f"unknown implementation {name!r}: registered are {', '.join(names())}; "
            f"your own is named module:attribute or file.py:attribute"
        )
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise ImplementationNotFound(f"{name!r} is incomplete: write module:attribute or file.py:attribute")
    module = _from_file(source) if source.endswith(".py") else _import(source)
    if not hasattr(module, attribute):
        raise ImplementationNotFound(packages.hidden(source) or f"{source} has no attribute {attribute!r}")
    return _as_implementation(getattr(module, attribute), name, products, problem)


def is_ours(name: str) -> bool:
    """Whether this project has an implementation of this name."""
    return name in _ours()


def may_be_found(name: str) -> bool:
    """Whether an implementation could go by this name: a module or file with an attribute, or an installed one."""
    return ":" in name or any(point.name == name for point in _entry_points())


def entry_point(name: str) -> importlib.metadata.EntryPoint | None:
    """The entry point by which an implementation of this name is installed; none for ours and for those by path."""
    if name in _ours():
        return None
    return next((point for point in _entry_points() if point.name == name), None)


def _ours() -> Mapping[str, str]:
    """This project's names, each with the module that has it."""
    found: Mapping[str, str] = importlib.import_module(_CATALOGUE).MODULES
    return found


def _registered(name: str, module: str) -> Implementation:
    for implementation in importlib.import_module(module).IMPLEMENTATIONS:
        if implementation.name == name:
            found: Implementation = implementation
            return found
    raise ImplementationNotFound(f"{module} does not define {name!r}")


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    """What is installed, but for what has a name that is another's: a colon is of modules and files."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted((point for point in found if ":" not in point.name), key=lambda point: point.name)


def _load(point: importlib.metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a third party's import raises, the user needs one line
        reason = mishaps.told(error)
        raise ImplementationNotFound(f"entry point {point.name} = {point.value} does not load: {reason}") from error


def _import(name: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above
        raise ImplementationNotFound(f"cannot import {name}: {mishaps.told(error)}") from error


def _look_in(folder: Path) -> None:
    if (place := str(folder)) not in sys.path:
        sys.path.insert(0, place)


def _from_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise ImplementationNotFound(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    _look_in(file.resolve().parent)  # for the modules beside it, as when Python runs the file
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as above
        way = "; a module of a package goes by its name: PACKAGE.MODULE:NAME" if "relative import" in str(error) else ""
        raise ImplementationNotFound(f"{path} does not import: {mishaps.told(error)}{way}") from error
    return module


def _as_implementation(found: Any, name: str, products: Products | None, problem: str | None) -> Implementation:
    if isinstance(found, Implementation) and problem is None:
        # It goes by the name that it is found by: in other processes, and in the command that repeats a judgement.
        return dataclasses.replace(found, name=name)
    try:
        if problem is not None:
            return from_workload(found, name, problem, products=products)
        return from_function(found, name, products=products)
    except NotAnAttentionFunction as error:
        raise ImplementationNotFound(printable(str(error))) from error
    except Exception as error:  # what it declares is wrong, or its signature is code that raises
        raise ImplementationNotFound(f"{name} cannot be judged: {mishaps.told(error)}") from error
