"""Write a function to files from which a sandboxed process loads it.

A function of a module is imported there by its name, or loaded from its file. Any other, such as a closure or one of a
notebook, is pickled by value with cloudpickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from conformance.temporary_folders import use_temporary_folder

_ATTRIBUTE = "function"
_LOADER = '''"""Loads a function that `conformance.check` judges in a sandbox."""

import sys

sys.path[len(sys.path):] = [entry for entry in {path!r} if entry not in sys.path]
{load}
{declare}'''
_PICKLED = """
import pickle
from pathlib import Path

{attribute} = pickle.loads(Path(__file__).with_name("function.pickle").read_bytes())
"""
_LOADED = """
import importlib.util
import operator

spec = importlib.util.spec_from_file_location({module!r}, {file!r})
sys.modules[{module!r}] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
{attribute} = operator.attrgetter({qualname!r})(module)
"""
_IMPORTED = """
import importlib
import operator

{attribute} = operator.attrgetter({qualname!r})(importlib.import_module({module!r}))
"""
_DECLARED = """
from impls.contract.declarations import redeclare

{attribute} = redeclare({attribute}, {declarations!r})
"""


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """The files from which a sandboxed process loads a function."""

    name: str  # of the function, as `--impl` takes it
    readable: tuple[str, ...]


@contextlib.contextmanager
def export_function(
    function: Callable[..., Any], label: str, declarations: Mapping[str, Any]
) -> Iterator[ExportedFunction]:
    """Write the files from which a sandboxed process loads a function; they are removed as the block ends.

    Raises:
      ImportError: if the function must be pickled, and cloudpickle is not installed.
      TypeError: if it cannot be pickled; the message names the object that cannot be.
    """
    with use_temporary_folder("function") as temporary:
        folder = temporary.path
        readable: tuple[str, ...] = ()
        if _is_attribute_of_module(function):
            module, qualname = function.__module__, _get_qualname(function)
            if (root := _find_import_root(module)) is not None:
                load = _IMPORTED.format(attribute=_ATTRIBUTE, module=module, qualname=qualname)
                readable = (root,)
            else:  # such as a test file of a project with `--import-mode=importlib`
                file = str(Path(sys.modules[module].__file__ or "").resolve())
                load = _LOADED.format(attribute=_ATTRIBUTE, module=module, qualname=qualname, file=file)
                readable = (str(Path(file).parent),)
        else:
            Path(folder, "function.pickle").write_bytes(_pickle_by_value(function, label))
            load = _PICKLED.format(attribute=_ATTRIBUTE)
        declare = _DECLARED.format(attribute=_ATTRIBUTE, declarations=dict(declarations)) if declarations else ""
        path = [str(Path(entry).absolute()) for entry in sys.path]
        loader = Path(folder, "loader.py")
        loader.write_text(_LOADER.format(path=path, load=load, declare=declare), encoding="utf-8")
        yield ExportedFunction(f"{loader}:{_ATTRIBUTE}", readable)


def _get_qualname(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", ""))


def _is_attribute_of_module(function: Callable[..., Any]) -> bool:
    """Return whether a module that was loaded from a file has the function under its own name."""
    name, qualname = getattr(function, "__module__", None), _get_qualname(function)
    found: Any = sys.modules.get(name or "")
    if name == "__main__" or not qualname or "<" in qualname or not getattr(found, "__file__", None):
        return False
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found is function


def _find_import_root(module: str) -> str | None:
    """Return the folder from which another process can import a loaded module; None if it cannot."""
    spec, path = None, None
    for depth in range(module.count(".") + 1):
        name = module.rsplit(".", module.count(".") - depth)[0]
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        if (spec := next((one for one in found if one is not None), None)) is None:
            return None
        path = spec.submodule_search_locations
    if spec is None or spec.origin is None or spec.origin != getattr(sys.modules[module], "__file__", None):
        return None
    origin = Path(spec.origin)
    return str(origin.resolve().parents[module.count(".") + (origin.name == "__init__.py")])


def _pickle_by_value(function: Callable[..., Any], label: str) -> bytes:
    """Pickle a function and what it refers to, also what its own module defines."""
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            f"sandbox=True sends {label} to another process by cloudpickle, which is not installed: "
            "pip install cloudpickle, or move the function to a module that can be imported"
        ) from error
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = sys.modules.get(getattr(inner, "__module__", "") or "")
    registered = module is not None and module.__name__ != "__main__" and not _is_installed(module.__name__)
    if registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(function)
    except Exception as error:  # objects raise anything when they are pickled
        culprit = _find_culprit(inner, cloudpickle.dumps)
        raise TypeError(
            f"{label} cannot be sent to a sandbox: {culprit or 'it'} cannot be pickled ({error}). Create it inside "
            "the function, move the function to a module, or leave sandbox=True out"
        ) from error
    finally:
        if registered:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _is_installed(module: str) -> bool:
    """Return whether a module belongs to an installed library, which the sandbox can import too."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in Path(file).parts


def _find_culprit(function: Any, dumps: Callable[[Any], bytes]) -> str:
    """Return which object that a function refers to cannot be pickled, in words; empty if none is found."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=True)
    known = [(f"its closure variable {name!r}", cell.cell_contents) for name, cell in cells]
    scope = getattr(function, "__globals__", {})
    known += [(f"its global variable {name!r}", scope[name]) for name in code.co_names if name in scope]
    known += [("a default value", value) for value in getattr(function, "__defaults__", None) or ()]
    for words, value in known:
        try:
            dumps(value)
        except Exception:  # whatever it is, this is the object
            return f"{words}, a {type(value).__name__},"
    return ""
