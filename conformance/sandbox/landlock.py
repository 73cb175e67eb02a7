"""Restrict the files, connections and signals of this process by Landlock (Linux 5.13 and later).

Landlock needs no privileges. A process that enters a ruleset cannot leave it. Neither can the processes that it starts.

Sources: docs.kernel.org/userspace-api/landlock.html, linux/landlock.h. The numbers of the system calls are the same on
every machine.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_QUERY_VERSION = 1
_PATH_BENEATH = 1


class Access(enum.IntFlag):
    """Rights to files and folders: the bits `LANDLOCK_ACCESS_FS_*` of Linux."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_AND_MAKE = 0b1_1111_1111_0000
    MOVE = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEVICE = 1 << 15


READ = Access.EXECUTE | Access.READ_FILE | Access.READ_DIR
WRITE = Access.WRITE_FILE | Access.TRUNCATE
EVERYTHING = READ | WRITE | Access.REMOVE_AND_MAKE | Access.MOVE | Access.IOCTL_DEVICE
_FILE_RIGHTS = Access.EXECUTE | Access.READ_FILE | WRITE | Access.IOCTL_DEVICE
"""Rights that a rule for a single file may have; all others need a folder."""
_FIRST_VERSIONS: Mapping[Access, int] = {Access.MOVE: 2, Access.TRUNCATE: 3, Access.IOCTL_DEVICE: 5}
_TCP = 0b11  # rights to bind and to connect TCP sockets, from version 4 of Landlock on
_SCOPES = 0b11  # restrictions of abstract Unix sockets and of signals, from version 6 of Landlock on
MISSING_BEFORE: Mapping[int, str] = {3: "truncate files", 5: "send commands to devices", 6: "signal other processes"}
"""Actions that a system with a version of Landlock older than the key cannot forbid. Seccomp may still forbid them."""


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def query_version() -> int:
    """Return the version of Landlock's interface on this system; zero if the system has no Landlock."""
    if not sys.platform.startswith("linux"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE_RULESET, None, 0, _QUERY_VERSION)))


class Ruleset:
    """A set of rules that forbids all files, connections and signals that are not allowed explicitly.

    Use it as a context manager; it closes its descriptor at the end.
    """

    def __init__(self, version: int) -> None:
        """Create a ruleset for a version of the interface, at least 1. Raises `OSError` if the system refuses."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._handled = EVERYTHING
        for right, since in _FIRST_VERSIONS.items():
            if version < since:
                self._handled &= ~right
        attributes = _RulesetAttributes(self._handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
        descriptor = self._libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
        self._descriptor = int(descriptor)
        if self._descriptor < 0:
            raise _last_error()

    def __enter__(self) -> Ruleset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def allow(self, place: Path, rights: Access) -> None:
        """Grant rights to a file, or to a folder and everything below it. Ignore a path that does not exist."""
        try:
            opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        try:
            allowed = rights & self._handled & (EVERYTHING if place.is_dir() else _FILE_RIGHTS)
            rule = _PathBeneath(allowed, opened)
            if allowed and self._libc.syscall(_ADD_RULE, self._descriptor, _PATH_BENEATH, ctypes.byref(rule), 0):
                raise _last_error()
        finally:
            os.close(opened)

    def enter(self) -> None:
        """Restrict this thread and what it starts; `PR_SET_NO_NEW_PRIVS` must be set. Raises `OSError` if refused."""
        if self._libc.syscall(_RESTRICT_SELF, self._descriptor, 0):
            raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
