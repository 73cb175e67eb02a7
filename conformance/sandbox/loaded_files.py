"""The files that a kernel's processes have read, with their digests, which the judge makes itself.

A process names the files (`conformance.sandbox.file_watcher`). The judge reads them as soon as it hears of them, and
each time that it hears of them again: all processes of a kernel, at all times, must have found the same in them.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Mapping
from typing import Any

from conformance.calling import installed_packages
from conformance.records import printable

_DIGITS = 32  # of a digest: nobody finds two files that have these in common
_LARGEST = 2**32  # bytes of a file that is read for its digest; a larger one goes by its size
_PART = 2**20
_MOST_NAMES = 10_000  # in one answer
_PACKAGE = "package "
_SETTLED = 1.0  # seconds after which a change of a file shows in its times


class FileChanged(Exception):  # noqa: N818 -- a statement, as the message is
    """A file is not what it was when the kernel first read it; the message names it."""


class LoadedFiles:
    """The files of one kernel: those that it read as it was first loaded, and those that it read later."""

    def __init__(self, kernel: str, at_load: Mapping[str, str] | None = None) -> None:
        """For the kernel that goes by this name; `at_load` is what another process of the judge's knows of it."""
        self._folder = _folder_of(kernel)
        self._at_load = at_load
        self._known = dict(at_load or {})
        self._later: dict[str, str] = {}

    @property
    def at_load(self) -> Mapping[str, str]:
        """Digests of the files that were read as the kernel was first loaded, and of the packages that it imported."""
        if self._at_load is None:
            self._at_load = dict(self._known)
            self._later = {}
        return self._at_load

    def note(self, answer: Any) -> None:
        """Read the files that an answer of a kernel's process names.

        Raises:
          FileChanged: if one of them is not what it was.
          ValueError: if what should be names is something else.
        """
        report = answer.get("files", {}) if isinstance(answer, dict) else {}
        if not isinstance(report, dict):
            raise ValueError("no list of files")
        found = {self._named(path): digest for path in _names(report.get("opened")) if (digest := _digest_of(path))}
        found |= self._of_packages(_names(report.get("installed")))
        for name, digest in found.items():
            if (before := self._known.get(name, digest)) != digest:
                raise FileChanged(f"{name} has changed since the kernel first read it: {before} was its digest")
            if name not in self._known:
                self._known[name] = self._later[name] = digest

    def take_later(self) -> dict[str, str]:
        """Return the files that were read after the kernel was first loaded, each of them once."""
        found, self._later = self._later, {}
        return found

    def _of_packages(self, modules: Iterable[str]) -> dict[str, str]:
        """Digests of the packages that modules belong to, and of modules that are not as their package's list says."""
        found = {}
        folders = installed_packages.package_folders()
        for module in modules:
            folder = next((folder for folder in folders if module.startswith(f"{folder}{os.sep}")), None)
            content = _content_of(module)
            if folder is None or content is None:
                continue
            package, listed = installed_packages.find_package(folder, os.path.relpath(module, folder))
            if package is not None:
                found[f"{_PACKAGE}{package.name}"] = f"{package.version} {package.digest}"
            if listed != base64.urlsafe_b64encode(content).rstrip(b"=").decode():
                found[self._named(module)] = _as_text(content)
        return found

    def _named(self, path: str) -> str:
        """The path, from the current folder if it is there or below the kernel's."""
        here = os.getcwd()
        if any(path.startswith(f"{folder}{os.sep}") for folder in (here, self._folder) if folder):
            path = os.path.relpath(path, here)
        return printable(path)


def find_changed(files: Iterable[tuple[str, str]]) -> list[str]:
    """Say which files are not what they were: of each a name and the digest that it had, once or several times."""
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, digest in files:
        if name.startswith(_PACKAGE):
            continue
        for other in (first.setdefault(name, digest), _digest_of(os.path.abspath(name)) or "that of no file"):
            if other != digest:
                found[name] = f"the digest of {name} was {digest}, and is {other}"
    return list(found.values())


def _names(found: Any) -> list[str]:
    if found is None:
        return []
    if not isinstance(found, list) or len(found) > _MOST_NAMES or not all(isinstance(name, str) for name in found):
        raise ValueError("no list of files")
    return [name for name in found if os.path.isabs(name) and "\0" not in name]


def _folder_of(kernel: str) -> str:
    file = kernel.rpartition(":")[0]
    return os.path.dirname(os.path.abspath(file)) if file.endswith(".py") else ""


def _digest_of(path: str) -> str:
    """The digest of a file; empty for what is not there, cannot be read, or is no file."""
    content = _content_of(path)
    return "" if content is None else _as_text(content)


def _as_text(content: bytes) -> str:
    return content.hex()[:_DIGITS]


_read: dict[tuple[int, ...], bytes] = {}  # by what the system says of a file, which changes with its content


def _content_of(path: str) -> bytes | None:
    """The SHA-256 of a file; none for what is not there, cannot be read, or is no file."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe does not stop this
    except OSError:
        return None
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode):
            return None
        key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        if key in _read:
            return _read[key]
        whole = hashlib.sha256()
        if about.st_size > _LARGEST:
            whole.update(f"{about.st_size} bytes".encode())
        else:
            while part := os.read(opened, _PART):
                whole.update(part)
        # Times are coarse: what was written a moment ago may be written again within the same tick.
        if time.time() - max(about.st_mtime, about.st_ctime) > _SETTLED:
            _read[key] = whole.digest()
        return whole.digest()
    except OSError:
        return None
    finally:
        os.close(opened)
