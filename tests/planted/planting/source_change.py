"""A copy of a package with one change to its source: a bug planted where a real one would be, in text.

The copy is a package of its own, so it shares no compiled function, cache or registered type with the correct one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from impls.contract.implementation import Implementation


@dataclasses.dataclass(frozen=True)
class Change:
    """One passage of one module, which must occur there exactly once, and what stands there instead."""

    module: str
    before: str
    after: str

    def applied(self, source: str) -> str:
        """The changed source. Raises `ValueError` if the passage is not there once."""
        if (times := source.count(self.before)) != 1:
            raise ValueError(f"{self.module} has the passage {self.before!r} {times} times, must have it once")
        return source.replace(self.before, self.after)


class _Copies(importlib.abc.MetaPathFinder):
    """Finds the modules of the copies."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, Path, Change]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, inner = fullname.partition(".")
        if top not in self.known:
            return None
        original, folder, change = self.known[top]
        file = _file_of(folder, inner)
        if not file.is_file():
            return None
        loader = _Loader(file, original, top, change if change.module == inner else None)
        return importlib.util.spec_from_loader(fullname, loader, is_package=file.name == "__init__.py")


def _file_of(folder: Path, module: str) -> Path:
    """Of a module of a package in `folder`, which may be a package within it."""
    inside = folder.joinpath(*module.split("."))
    return inside / "__init__.py" if inside.is_dir() else inside.with_suffix(".py")


class _Loader(importlib.abc.SourceLoader):
    """Loads a module of the package under the name of the copy, changed if it is the one to change."""

    def __init__(self, file: Path, original: str, copy: str, change: Change | None) -> None:
        self._file, self._original, self._copy, self._change = file, original, copy, change

    def get_filename(self, fullname: str) -> str:
        return str(self._file)

    def get_data(self, path: str) -> bytes:
        if path != str(self._file):
            raise OSError(f"{path}: nothing compiled is kept of a changed module")
        source = self._file.read_text()
        if self._change is not None:
            source = self._change.applied(source)
        return source.replace(f"from {self._original}", f"from {self._copy}").encode()


_COPIES = _Copies()
sys.meta_path.insert(0, _COPIES)


@functools.cache
def changed(package: str, name: str, change: Change) -> ModuleType:
    """`package`, one that imports itself by `from`, with the change, as a package called `name`.

    Raises:
      ValueError: the passage to change is not there once, or the package has no such module.
    """
    folder = Path(str(importlib.import_module(package).__file__)).parent
    if not _file_of(folder, change.module).is_file():
        raise ValueError(f"{package} has no module {change.module}")
    _COPIES.known[name] = (package, folder, change)
    return importlib.import_module(name)


def build_changed(package: str, builder: str, name: str, change: Change, **options: Any) -> Implementation:
    """Call the function `builder` of `package` with the change, for a planted bug of this name."""
    copy = changed(package, f"planted_{name.replace('-', '_')}", change)
    found: Implementation = getattr(copy, builder)(name, **options)
    return found
