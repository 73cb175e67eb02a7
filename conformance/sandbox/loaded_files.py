"""Record the files that a kernel's processes have read, with digests that the judge computes.

A kernel's process reports paths (`conformance.sandbox.file_watcher`). The judge hashes a file whenever a process
reports it. All processes of a kernel must read the same content. If a file has changed, the process that reported it is
ended.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Mapping
from typing import Any

from conformance.execution import installed_packages
from reports.printable_text import make_printable

_DIGEST_DIGITS = 32  # hexadecimal digits, so 128 bits: nobody can find two files with the same digest
_MAX_HASHED_BYTES = 2**32  # a larger file is not read; its digest is computed from its size
_CHUNK_BYTES = 2**20
_MAX_NAMES = 10_000  # the most paths in one answer of a kernel's process
_PACKAGE_PREFIX = "package "
_SETTLE_SECONDS = 1.0  # a file that changed more recently may change again without a new timestamp


class FileChanged(Exception):
    """Raised when a file has changed since the kernel first read it; the message names the file."""


class LoadedFiles:
    """The files that one kernel has read, with digests: those until it was first loaded, and those read later."""

    def __init__(self, kernel: str, files_at_load: Mapping[str, str] | None = None) -> None:
        """Start a record, with the files that another process has recorded until the kernel was loaded, if any."""
        self._folder = _find_folder(kernel)
        self._at_load = files_at_load
        self._known = dict(files_at_load or {})
        self._new_files: dict[str, str] = {}

    @property
    def files_at_load(self) -> Mapping[str, str]:
        """Digests by name: of files read until the kernel was first loaded, and of packages that it imported.

        The first use of this property marks the end of loading. Files that are recorded afterwards count as later ones.
        """
        if self._at_load is None:
            self._at_load = dict(self._known)
            self._new_files = {}
        return self._at_load

    def record_reported(self, answer: Any) -> None:
        """Hash and record the files that an answer of a kernel's process reports.

        Raises `FileChanged` if a file has changed since it was recorded, `ValueError` if `answer` is no list of paths.
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
        """Return the files that were first read after loading and since the last call of this method, with digests."""
        found, self._new_files = self._new_files, {}
        return found

    def _digest_packages(self, modules: Iterable[str]) -> dict[str, str]:
        """Return digests of the packages of these modules, and of modules that differ from their package's RECORD."""
        found = {}
        folders = installed_packages.find_package_folders()
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
        """Shorten a path for a record: make it relative if it lies below the current folder or the kernel's folder."""
        here = os.getcwd()
        if any(path.startswith(f"{folder}{os.sep}") for folder in (here, self._folder) if folder):
            path = os.path.relpath(path, here)
        return make_printable(path)


def find_changed(files: Iterable[tuple[str, str]]) -> list[str]:
    """Return a sentence for each file whose recorded digests (pairs of name and digest) differ, or that has changed."""
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
    """Return the digest of a file as text; empty if it cannot be read or is no regular file."""
    content = _hash_file(path)
    return "" if content is None else _format_digest(content)


def _format_digest(content: bytes) -> str:
    return content.hex()[:_DIGEST_DIGITS]


_hash_cache: dict[tuple[int, ...], bytes] = {}  # digests of files, by device, inode, size and timestamps


def _hash_file(path: str) -> bytes | None:
    """Return the SHA-256 of a file; None if it cannot be read or is no regular file."""
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its writer.
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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
        # Timestamps are coarse: a file that was just written may be written again without a new timestamp.
        if time.time() - max(about.st_mtime, about.st_ctime) > _SETTLE_SECONDS:
            _hash_cache[key] = whole.digest()
        return whole.digest()
    except OSError:
        return None
    finally:
        os.close(opened)
