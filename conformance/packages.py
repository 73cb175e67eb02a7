"""Make `cases`, `impls` and `reports` mean this project's packages in a process that judges.

These top-level packages have everyday names. A user may have a module `cases` in the current folder, or a package
`reports` in their repository, and Python looks there first. There are two situations:

- The user's module is not loaded yet. `claim_names` loads our packages from where they are, before anything asks for
  them by name. The user's module is hidden from then on. A kernel that imports it gets an error that names both
  modules. An import finder and `__getattr__` of our packages raise that error; Python by itself would only say that a
  name is missing.
- The user's module is loaded already. Then nothing can be judged, and `NameTaken` says which module to rename.

`conformance` itself is ours in such a process. Only pytest, which loads our plugin in every repository, leaves the name
to the user until something is judged (`release_own_name`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).resolve().parent.parent
_EVERYDAY_NAMES = ("cases", "impls", "reports")
NAMES = (*_EVERYDAY_NAMES, "conformance")
# Modules that Python loads by itself when it starts.
_LOADED_BY_PYTHON = frozenset({"sitecustomize", "usercustomize", *sys.stdlib_module_names})


_released: dict[str, ModuleType] = {}
"""Our modules while `import conformance` may find a package of the user."""


class NameTaken(ImportError):
    """A user's module has the name of one of our packages, and was loaded first."""


def claim_names(*, alone: bool = False) -> None:
    """Load our packages `cases`, `impls` and `reports` in this process, before anything imports modules of these names.

    Args:
      alone: whether this process runs only this project. Then a customization module from the current folder ends the
        process (`exit_if_customized`).

    Raises:
      NameTaken: with one line that names the module which was loaded first.
    """
    if alone:
        exit_if_customized()
    reclaim_own_name()
    for name in _EVERYDAY_NAMES:
        if name not in sys.modules:
            with prefer_own_packages():
                package = importlib.import_module(name)
            vars(package)["__getattr__"] = functools.partial(_raise_missing_attribute, name)
        elif _find_folder(place := _find_location(sys.modules[name].__spec__)) != HOME / name:
            raise NameTaken(
                f"{name!r} is loaded from {place or 'another module'}, and attention-conformance has a package of "
                f"that name: rename yours, or judge from a folder where nothing imports yours first"
            )
    if _HiddenModuleFinder not in sys.meta_path:
        sys.meta_path.append(_HiddenModuleFinder)


def release_own_name() -> None:
    """Let `import conformance` find a package of the user, until ours is imported or `reclaim_own_name` is called.

    Every run of pytest loads our plugin, also in repositories that have a package `conformance` and judge nothing.
    """
    _released.update({name: module for name, module in sys.modules.items() if name.partition(".")[0] == "conformance"})
    for name in _released:
        del sys.modules[name]
    sys.meta_path.insert(0, _ReleasedFinder())


def reclaim_own_name() -> None:
    """Make `import conformance` find our package again. Raises `NameTaken` if a user's is loaded."""
    if not _released:
        return
    if "conformance" in sys.modules:
        place = _find_location(sys.modules["conformance"].__spec__) or "another module"
        raise NameTaken(
            f"'conformance' is {place} in this process, and attention-conformance has a package of that name: rename "
            f"yours, or judge from a folder where nothing imports it first"
        )
    sys.modules.update(_released)
    _released.clear()


class _ReleasedFinder(MetaPathFinder, Loader):
    """Import finder that puts our released modules back when an import of `conformance` means ours."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return None unless Python would find our package."""
        if name != "conformance" or not _released:
            return None
        place = _find_location(PathFinder.find_spec(name, path))
        return ModuleSpec(name, self) if _find_folder(place) == HOME / name else None

    def exec_module(self, module: ModuleType) -> None:
        """Put our modules in the place of the new one."""
        del sys.modules["conformance"]
        reclaim_own_name()


def exit_if_customized() -> None:
    """End the process if Python loaded a customization module, such as `sitecustomize`, from the current folder.

    Python runs a `sitecustomize.py` in a kernel's folder in every process that finds it, the judge's process included.
    It may have registered functions with `atexit`, so the process ends here without calling them.
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
    """Make imports look in the folder of our packages first, also in processes that are started in the block."""
    sys.path.insert(0, str(HOME))
    try:
        yield
    finally:
        sys.path.remove(str(HOME))


def format_missing_attribute(package: str, name: str) -> str:
    """Return the message that our package has no such attribute, with the user's module that it hides, if any."""
    message = f"module {package!r} has no attribute {name!r}"
    return f"{message}: {why}" if (why := find_hidden_module(package)) else message


def find_hidden_module(name: str) -> str | None:
    """Return a line that names the user's module hidden by our package; None if no module is hidden."""
    package = name.partition(".")[0]
    if package not in NAMES:
        return None
    # Skip copies of this project, this one and any other installed one: their packages are not the user's.
    elsewhere = [entry for entry in sys.path if not os.path.isfile(Path(entry, "conformance", "packages.py"))]
    place = _find_location(PathFinder.find_spec(package, elsewhere))
    return place and f"{package!r} is a package of attention-conformance here, and hides {place}: rename that one"


class _HiddenModuleFinder:
    """Import finder that explains failed imports: it comes last, finds nothing, and names the hidden module."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Return None, or raise `ImportError` if one of our packages hides a module of the user."""
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
