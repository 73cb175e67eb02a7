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
_CLAIMED = ("cases", "impls", "reports")
NAMES = (*_CLAIMED, "conformance")
_BY_ITSELF = frozenset({"sitecustomize", "usercustomize", *sys.stdlib_module_names})


class NameTaken(ImportError):  # noqa: N818 -- a statement, as the message is
    """A user's module has the name of one of our packages, and was loaded first."""


def claim(*, alone: bool = False) -> None:
    """Make `cases`, `impls` and `reports` mean ours in this process. Call it before anything imports them.

    Args:
      alone: whether nothing but this project has a part in this process, so that files of this folder end it.

    Raises:
      NameTaken: with one line that names the module which was loaded first.
    """
    if alone:
        leave_where_customised()
    for name in _CLAIMED:
        if name not in sys.modules:
            with first_on_path():
                package = importlib.import_module(name)
            vars(package)["__getattr__"] = functools.partial(_no_attribute, name)
        elif _folder(place := _place(sys.modules[name].__spec__)) != HOME / name:
            raise NameTaken(
                f"{name!r} is {place or 'another module'} in this process, and attention-conformance has a package of "
                f"that name: rename yours, or judge from a folder where nothing imports it first"
            )
    if _Refusal not in sys.meta_path:
        sys.meta_path.append(_Refusal)


def leave_where_customised() -> None:
    """End the process where a file of this folder is a module that Python loads by itself.

    Whoever puts `sitecustomize.py` beside a kernel has it run in any process that finds it, so in the judge's too. What
    it wants done at the end would come after whatever is said here, so that the end is now.
    """
    if (place := _of_this_folder()) is None:
        return
    why = "judge from another folder, or leave this one out of PYTHONPATH"
    os.write(2, f"error: {place} is loaded into the process that judges, before anything of ours: {why}\n".encode())
    os._exit(2)


def _of_this_folder() -> str | None:
    """The file of a module that Python loads by itself, where that lies in the current folder or below; none if not."""
    here, python = Path.cwd(), [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name not in _BY_ITSELF:
            continue
        path = Path(file).absolute()
        inside = "site-packages" in path.parts or any(map(path.is_relative_to, python))
        if path.is_relative_to(here) and not inside:
            return str(path.relative_to(here))
    return None


@contextlib.contextmanager
def first_on_path() -> Iterator[None]:
    """Within it, imports look in the folder of our packages first; so do processes that are started within it."""
    sys.path.insert(0, str(HOME))
    try:
        yield
    finally:
        sys.path.remove(str(HOME))


def no_attribute(package: str, name: str) -> str:
    """What to say to someone who asks a package of ours for a name that it does not have."""
    message = f"module {package!r} has no attribute {name!r}"
    return f"{message}: {why}" if (why := hidden(package)) else message


def hidden(name: str) -> str | None:
    """Which module of the user's is hidden by our package that `name` is in: one line, or None if none is."""
    package = name.partition(".")[0]
    if package not in NAMES:
        return None
    # No copy of this project is what a user means, be it this one or another that is installed as well.
    elsewhere = [entry for entry in sys.path if not os.path.isfile(Path(entry, "conformance", "contract.py"))]
    place = _place(PathFinder.find_spec(package, elsewhere))
    return place and f"{package!r} is a package of attention-conformance here, and hides {place}: rename that one"


class _Refusal:
    """The last finder of modules. It is asked for what the others did not find, and says which module was meant."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Finds nothing. Raises `ImportError` where a user's module is hidden."""
        if why := hidden(name):
            raise ImportError(f"no module {name!r}: {why}", name=name)


def _no_attribute(package: str, name: str) -> object:
    raise AttributeError(no_attribute(package, name))


def _place(spec: ModuleSpec | None) -> str | None:
    """The file of a module, or the folder of a package without `__init__.py`."""
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _folder(place: str | None) -> Path | None:
    return None if place is None else Path(place).resolve().parent
