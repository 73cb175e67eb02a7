"""Our packages have everyday names, and a user may have modules of the same names.

`cases`, `impls` and `reports` are top-level packages. A user may well have a module `cases` in the folder that they
judge from, or a package `reports` in their repository, and Python looks there first. Hence a process that judges loads
ours by where they are, before anything asks for them by name. The user's module is hidden from then on; whoever asks
for something in it is told so.
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
_LOADED_BY_PYTHON = frozenset({"sitecustomize", "usercustomize", *sys.stdlib_module_names})


class NameTaken(ImportError):  # noqa: N818 -- a statement, as the message is
    """A user's module has the name of one of our packages, and was loaded first."""


def claim_names(*, alone: bool = False) -> None:
    """Make `cases`, `impls` and `reports` mean ours in this process. Call it before anything imports them.

    Args:
      alone: whether nothing but this project has a part in this process, so that files of this folder end it.

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
    """End the process where a file of this folder is a module that Python loads by itself.

    Whoever puts `sitecustomize.py` beside a kernel has it run in any process that finds it, so in the judge's too. What
    it wants done at the end would come after whatever is said here, so that the end is now.
    """
    if (place := _find_customization()) is None:
        return
    why = "judge from another folder, or leave this one out of PYTHONPATH"
    os.write(2, f"error: {place} is loaded into the process that judges, before anything of ours: {why}\n".encode())
    os._exit(2)


def _find_customization() -> str | None:
    """The file of a module that Python loads by itself, where that lies in the current folder or below; none if not."""
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
    """Within it, imports look in the folder of our packages first; so do processes that are started within it."""
    sys.path.insert(0, str(HOME))
    try:
        yield
    finally:
        sys.path.remove(str(HOME))


def format_missing_attribute(package: str, name: str) -> str:
    """What to say to someone who asks a package of ours for a name that it does not have."""
    message = f"module {package!r} has no attribute {name!r}"
    return f"{message}: {why}" if (why := find_hidden_module(package)) else message


def find_hidden_module(name: str) -> str | None:
    """Which module of the user's is hidden by our package that `name` is in: one line, or None if none is."""
    package = name.partition(".")[0]
    if package not in NAMES:
        return None
    # No copy of this project is what a user means, be it this one or another that is installed as well.
    elsewhere = [entry for entry in sys.path if not os.path.isfile(Path(entry, "conformance", "contract.py"))]
    place = _find_location(PathFinder.find_spec(package, elsewhere))
    return place and f"{package!r} is a package of attention-conformance here, and hides {place}: rename that one"


class _HiddenModuleFinder:
    """The last finder of modules. It is asked for what the others did not find, and says which module was meant."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Finds nothing. Raises `ImportError` where a user's module is hidden."""
        if why := find_hidden_module(name):
            raise ImportError(f"no module {name!r}: {why}", name=name)


def _raise_missing_attribute(package: str, name: str) -> object:
    raise AttributeError(format_missing_attribute(package, name))


def _find_location(spec: ModuleSpec | None) -> str | None:
    """The file of a module, or the folder of a package without `__init__.py`."""
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _find_folder(place: str | None) -> Path | None:
    return None if place is None else Path(place).resolve().parent
