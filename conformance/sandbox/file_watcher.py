"""List the files that a kernel's process reads: opened by Python, mapped into memory, or imported from packages.

The judge records them, so that a run says which sources were judged, and notices files that change during a run. The
watcher runs in the kernel's process and starts before the kernel is imported. It reports paths only; the judge computes
the digests (`conformance.sandbox.loaded_files`).

Files of the interpreter, of installed packages, of this project and of the system are not listed. Files of the scratch
folder are not listed either, since only the kernel itself writes there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from conformance.execution import installed_packages

_BYTE_CODE = ".pyc"
_DELETED = " (deleted)"  # the system adds this to the name of a mapped file that was removed


class FileWatcher:
    """Record the files that this process reads, by an audit hook of Python, which cannot be removed."""

    def __init__(self, scratch: str) -> None:
        """Start to record. `scratch` is the folder that the process may write to."""
        folders = (*installed_packages.find_trusted_folders(), os.path.abspath(scratch), os.path.realpath(scratch))
        self._ignored_folders = tuple(f"{folder}{os.sep}" for folder in folders)
        self._package_folders = tuple(f"{folder}{os.sep}" for folder in installed_packages.find_package_folders())
        self._modules_before = frozenset(sys.modules)
        self._mapped_before = _list_mapped_files()
        self._may_have_mapped = True  # whether files may have been mapped since the last report
        self._opened: dict[str, None] = {}
        sys.addaudithook(self._audit)

    def report(self) -> list[str]:
        """Return the paths of files that were read since the last report."""
        opened, self._opened = self._opened, {}
        if self._may_have_mapped:
            self._may_have_mapped = False
            opened |= dict.fromkeys(filter(self._is_reported, sorted(_list_mapped_files() - self._mapped_before)))
        return list(opened)

    def list_installed_modules(self) -> list[str]:
        """Return the paths of modules of installed packages that were imported since the watcher started."""
        new = (module for name, module in sorted(sys.modules.items()) if name not in self._modules_before)
        # A module may stand for one that is not installed, and raise for each attribute that it does not hold.
        files = (getattr(module, "__dict__", {}).get("__file__") for module in new)
        return [file for file in files if isinstance(file, str) and file.startswith(self._package_folders)]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            name, _, flags = arguments
            if not isinstance(name, int) and flags & os.O_ACCMODE != os.O_WRONLY:
                self._record_open(name)
        elif event == "import":
            if arguments[1] is not None:  # the path of an extension module, which is mapped into memory
                self._may_have_mapped = True
                self._record_open(arguments[1])
        elif event == "ctypes.dlopen":
            self._may_have_mapped = True

    def _record_open(self, name: Any) -> None:
        try:
            path = os.path.abspath(os.fsdecode(name))
        except (TypeError, ValueError, OSError):  # no valid path, or no current folder: opening it fails too
            return
        if not self._is_reported(path):
            return
        if path.endswith(_BYTE_CODE):
            # Python's import ignores an `OSError` here, and loads the source file if there is one.
            raise OSError(
                f"{path}: byte code is loaded from the interpreter's and installed packages' folders alone, since "
                f"nobody can read it: give the source, {Path(path).stem.partition('.')[0]}.py"
            )
        self._opened[path] = None

    def _is_reported(self, path: str) -> bool:
        return not path.startswith(self._ignored_folders)


def _list_mapped_files() -> frozenset[str]:
    """Return the paths of files that this process has mapped into memory; empty on systems without /proc."""
    found = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as lines:
        for line in lines:
            _, _, name = line.rstrip("\n").partition("/")
            if name and not name.endswith(_DELETED):
                found.add(f"/{name}")
    return frozenset(found)
