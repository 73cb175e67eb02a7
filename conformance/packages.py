"""Make `cases`, `impls` and `reports` mean this project's packages in a process that judges.

These are top-level packages with everyday names. A user may well have a module `cases` in the folder that they judge
from, or a package `reports` in their repository, and Python looks there first. There are two cases:

- The user's module is not loaded yet. `claim_names` loads our packages from where they are, before anything asks for
  them by name. The user's module is hidden from then on. A kernel that imports it gets an error that names both, by an
  import finder and by `__getattr__` of our packages; without these, Python would only say that a name is missing.
- The user's module is loaded already. Then nothing can be judged, and `NameTaken` says which module to rename.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).resolve().parent.parent
_EVERYDAY_NAMES = ("cases", "impls", "reports")
NAMES = (*_EVERYDAY_NAMES, "conformance")
# Modules that Python loads without being asked.
_LOADED_BY_PYTHON = frozenset({"sitecustomize", "usercustomize", *sys.stdlib_module_names})


class NameTaken(ImportError):  # noqa: N818 -- a statement, as the message is
    """A user's module has the name of one of our packages, and was loaded first."""


def claim_names(*, alone: bool = False) -> None:
    """Make `cases`, `impls` and `reports` mean ours in this process, before anything imports them.

    Args:
      alone: whether this process runs nothing but this project; then a customization module of this folder ends it.

    Raises:
      NameTaken: with one line that names the module which was loaded first.
    """
    if alone:
        exit_if_customized()
    for name in _EVERYDAY_NAMES:
        if name not in sys.modules:
            with prefer_own_packages():
                package = importlib.import_module(name)
            vars(package)["__getattr__"] = functools.partial(_raise_missing_attribute, name)
        elif _find_folder(place := _find_location(sys.modules[name].__spec__)) != HOME / name:
            raise NameTaken(
                f"{name!r} is {place or 'another module'} in this process, and attention-conformance has a package of "
                f"that name: rename yours, or judge from a folder where nothing imports it first"
            )
    if _HiddenModuleFinder not in sys.meta_path:
        sys.meta_path.append(_HiddenModuleFinder)


def exit_if_customized() -> None:
    """End the process if Python loaded a customization module, such as `sitecustomize`, from this folder.

    A `sitecustomize.py` beside a kernel runs in every process that finds it, the judge's too. It may have registered
    functions for the end of the process, so the process ends here without calling them.
    """
    if (place := _find_customization()) is None:
        return
    why = "judge from another folder, or leave this one out of PYTHONPATH"
    os.write(2, f"error: {place} is loaded into the process that judges, before anything of ours: {why}\n".encode())
    os._exit(2)


def _find_customization() -> str | None:
    """Find the file of a module that Python loads by itself, if it lies in the current folder or below."""
    here, python = Path.cwd(), [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name not in _LOADED_BY_PYTHON:
            continue
        path = Path(file).absolute()
        inside = "site-packages" in path.parts or any(map(path.is_relative_to, python))
        if path.is_relative_to(here) and not inside:
            return str(path.relative_to(here))
    return None


@contextlib.contextmanager
def prefer_own_packages() -> Iterator[None]:
    """Have imports look in the folder of our packages first, also in processes that are started in the block."""
    sys.path.insert(0, str(HOME))
    try:
        yield
    finally:
        sys.path.remove(str(HOME))


def format_missing_attribute(package: str, name: str) -> str:
    """Say that a package of ours has no such attribute, and which module of the user it hides, if any."""
    message = f"module {package!r} has no attribute {name!r}"
    return f"{message}: {why}" if (why := find_hidden_module(package)) else message


def find_hidden_module(name: str) -> str | None:
    """Say in one line which module of the user our package hides, for a name in it; None if it hides none."""
    package = name.partition(".")[0]
    if package not in NAMES:
        return None
    # A user does not mean a copy of this project, neither this one nor another that is installed too.
    elsewhere = [entry for entry in sys.path if not os.path.isfile(Path(entry, "conformance", "contract.py"))]
    place = _find_location(PathFinder.find_spec(package, elsewhere))
    return place and f"{package!r} is a package of attention-conformance here, and hides {place}: rename that one"


class _HiddenModuleFinder:
    """An import finder that finds nothing: it comes last, and names the hidden module that was meant."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing. Raises `ImportError` if one of our packages hides a module of the user."""
        if why := find_hidden_module(name):
            raise ImportError(f"no module {name!r}: {why}", name=name)


def _raise_missing_attribute(package: str, name: str) -> object:
    raise AttributeError(format_missing_attribute(package, name))


def _find_location(spec: ModuleSpec | None) -> str | None:
    """Return the file of a module, or the folder of a package without `__init__.py`."""
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _find_folder(place: str | None) -> Path | None:
    return None if place is None else Path(place).resolve().parent
