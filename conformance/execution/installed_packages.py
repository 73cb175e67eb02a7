"""Find the installed package of a file, and the file's hash in the package's list of files (`RECORD`).

A run records by these what code a kernel loaded.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import os
import site
import sys
import sysconfig
from pathlib import Path

from conformance import packages

_DIGITS = 32  # the number of hexadecimal digits of a digest
_SHA256 = "sha256="
# System folders, whose files a kernel's author does not change. `/usr` as a whole is not trusted: people keep their own
# programs in it.
_SYSTEM_FOLDERS = (
    *("/dev", "/etc", "/proc", "/sys"),
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share"),
)
_OWN_PACKAGES = ("cases", "conformance", "impls", "reports")


@dataclasses.dataclass(frozen=True)
class Package:
    """An installed package: its name, its version, and a digest of its list of files."""

    name: str
    version: str
    digest: str


@functools.cache
def find_package_folders() -> tuple[str, ...]:
    """Return the folders into which packages are installed, each also with symbolic links resolved."""
    named = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    return _add_real_paths([*named, *site.getsitepackages(), site.getusersitepackages()])


@functools.cache
def find_trusted_folders() -> tuple[str, ...]:
    """Return the folders of the interpreter, of installed packages, of this project's packages and of the system."""
    named = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")]
    named += [os.path.join(sys.base_prefix, folder) for folder in ("lib", sys.platlibdir)]
    ours = [str(packages.HOME / name) for name in _OWN_PACKAGES]
    return (*find_package_folders(), *_add_real_paths([*named, *ours]), *_SYSTEM_FOLDERS)


def find_package(folder: str, place: str) -> tuple[Package | None, str]:
    """Find the package, or None, that lists an installed file; also return the SHA-256 that is listed, or "" if none.

    `folder` is one of `find_package_folders`, and `place` is the path of the file below `folder`, with slashes.
    """
    return _load_file_lists(folder, place.partition("/")[0]).get(place, (None, ""))


@functools.cache
def _load_file_lists(folder: str, top: str) -> dict[str, tuple[Package, str]]:
    """Load the file lists of the packages with a top-level module or folder of this name."""
    found: dict[str, tuple[Package, str]] = {}
    for listed in sorted(Path(folder).glob("*.dist-info/RECORD")):
        try:
            text = listed.read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
        if f"\n{top}" not in f"\n{text}":
            continue
        name, _, version = listed.parent.name.removesuffix(".dist-info").partition("-")
        package = Package(name, version, hashlib.sha256(text.encode()).hexdigest()[:_DIGITS])
        for row in csv.reader(text.splitlines()):
            if len(row) == 3:
                found[row[0]] = package, row[1].removeprefix(_SHA256) if row[1].startswith(_SHA256) else ""
    return found


def _add_real_paths(folders: list[str]) -> tuple[str, ...]:
    named = (os.path.abspath(folder) for folder in folders)
    return tuple(dict.fromkeys(place for folder in named for place in (folder, os.path.realpath(folder))))
