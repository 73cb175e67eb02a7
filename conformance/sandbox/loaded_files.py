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

_DIGEST_DIGITS = 32  # of a digest: nobody finds two files that have these in common
_MAX_HASHED_BYTES = 2**32  # bytes of a file that is read for its digest; a larger one goes by its size
_CHUNK_BYTES = 2**20
_MAX_NAMES = 10_000  # in one answer
_PACKAGE_PREFIX = "package "
_SETTLE_SECONDS = 1.0  # seconds after which a change of a file shows in its times


class FileChanged(Exception):  # noqa: N818 -- a statement, as the message is
    """A file is not what it was when the kernel first read it; the message names it."""


class LoadedFiles:
    """The files of one kernel: those that it read as it was first loaded, and those that it read later."""

    def __init__(self, kernel: str, files_at_load: Mapping[str, str] | None = None) -> None:
        """For the kernel that goes by this name; `at_load` is what another process of the judge's knows of it."""
        self._folder = _find_folder(kernel)
        self._at_load = files_at_load
        self._known = dict(files_at_load or {})
        self._new_files: dict[str, str] = {}

    @property
    def files_at_load(self) -> Mapping[str, str]:
        """Digests of the files that were read as the kernel was first loaded, and of the packages that it imported."""
        if self._at_load is None:
            self._at_load = dict(self._known)
            self._new_files = {}
        return self._at_load

    def record_reported(self, answer: Any) -> None:
        """Read the files that an answer of a kernel's process names.

        Raises:
          FileChanged: if one of them is not what it was.
          ValueError: if what should be names is something else.
        """
        report = answer.get("files", {}) if isinstance(answer, dict) else {}
        if not isinstance(report, dict):
            raise ValueError("no list of files")
        found = {
            self._shorten_path(path): digest
            for path in _parse_names(report.get("opened"))
            if (digest := _digest_file(path))
        }
        found |= self._digest_packages(_parse_names(report.get("installed")))
        for name, digest in found.items():
            if (before := self._known.get(name, digest)) != digest:
                raise FileChanged(f"{name} has changed since the kernel first read it: {before} was its digest")
            if name not in self._known:
                self._known[name] = self._new_files[name] = digest

    def pop_later(self) -> dict[str, str]:
        """Return the files that were read after the kernel was first loaded, each of them once."""
        found, self._new_files = self._new_files, {}
        return found

    def _digest_packages(self, modules: Iterable[str]) -> dict[str, str]:
        """Digests of the packages that modules belong to, and of modules that are not as their package's list says."""
        found = {}
        folders = installed_packages.package_folders()
        for module in modules:
            folder = next((folder for folder in folders if module.startswith(f"{folder}{os.sep}")), None)
            content = _hash_file(module)
            if folder is None or content is None:
                continue
            package, listed = installed_packages.find_package(folder, os.path.relpath(module, folder))
            if package is not None:
                found[f"{_PACKAGE_PREFIX}{package.name}"] = f"{package.version} {package.digest}"
            if listed != base64.urlsafe_b64encode(content).rstrip(b"=").decode():
                found[self._shorten_path(module)] = _format_digest(content)
        return found

    def _shorten_path(self, path: str) -> str:
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
        if name.startswith(_PACKAGE_PREFIX):
            continue
        for other in (first.setdefault(name, digest), _digest_file(os.path.abspath(name)) or "that of no file"):
            if other != digest:
                found[name] = f"the digest of {name} was {digest}, and is {other}"
    return list(found.values())


def _parse_names(found: Any) -> list[str]:
    if found is None:
        return []
    if not isinstance(found, list) or len(found) > _MAX_NAMES or not all(isinstance(name, str) for name in found):
        raise ValueError("no list of files")
    return [name for name in found if os.path.isabs(name) and "\0" not in name]


def _find_folder(kernel: str) -> str:
    file = kernel.rpartition(":")[0]
    return os.path.dirname(os.path.abspath(file)) if file.endswith(".py") else ""


def _digest_file(path: str) -> str:
    """The digest of a file; empty for what is not there, cannot be read, or is no file."""
    content = _hash_file(path)
    return "" if content is None else _format_digest(content)


def _format_digest(content: bytes) -> str:
    return content.hex()[:_DIGEST_DIGITS]


_hash_cache: dict[tuple[int, ...], bytes] = {}  # by what the system says of a file, which changes with its content


def _hash_file(path: str) -> bytes | None:
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
        if key in _hash_cache:
            return _hash_cache[key]
        whole = hashlib.sha256()
        if about.st_size > _MAX_HASHED_BYTES:
            whole.update(f"{about.st_size} bytes".encode())
        else:
            while part := os.read(opened, _CHUNK_BYTES):
                whole.update(part)
        # Times are coarse: what was written a moment ago may be written again within the same tick.
        if time.time() - max(about.st_mtime, about.st_ctime) > _SETTLE_SECONDS:
            _hash_cache[key] = whole.digest()
        return whole.digest()
    except OSError:
        return None
    finally:
        os.close(opened)
