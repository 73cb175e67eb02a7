"""System calls that a kernel's process may not make, by a filter that needs no privileges (seccomp, Linux).

Landlock lets a process connect to sockets that have a place among the files: those of other programs of the same user,
which do what they are told there, and are not confined. Neither does it keep a process from setting the limits of
another, such as how large a file may be.

Sources: docs.kernel.org/userspace-api/seccomp_filter.html; the numbers are those of Linux's tables of system calls.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import platform
from collections.abc import Mapping

_SET_SECCOMP, _FILTER = 22, 2
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
# Where a filter finds the number of the call, the architecture, and the lower half of the first argument.
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16
_IO_URING_SETUP = 425  # the same everywhere; what goes through such a ring no filter sees
_FOREIGN = 0x4000_0000  # from here on, numbers on x86-64 are those of another set of calls


@dataclasses.dataclass(frozen=True)
class _Machine:
    architecture: int
    connect: int
    prlimit: int


_MACHINES: Mapping[str, _Machine] = {
    "x86_64": _Machine(0xC000003E, 42, 302),
    "aarch64": _Machine(0xC00000B7, 203, 261),
}


class _Step(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step)))


def forbid() -> bool:
    """Forbid this thread, and what it starts, to connect and to set the limits of others. Whether that is so.

    It has to have given up new privileges before.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    refused, not_permitted = _REFUSE | errno.EACCES, _REFUSE | errno.EPERM
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, machine.architecture),
        (_RETURN, 0, 0, not_permitted),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _FOREIGN),
        (_RETURN, 0, 0, not_permitted),
        (_IF_EQUAL, 0, 1, machine.connect),
        (_RETURN, 0, 0, refused),
        (_IF_EQUAL, 0, 1, _IO_URING_SETUP),
        (_RETURN, 0, 0, not_permitted),
        (_IF_EQUAL, 1, 0, machine.prlimit),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST),
        (_IF_EQUAL, 1, 0, 0),  # the process itself
        (_IF_EQUAL, 0, 1, os.getpid()),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, not_permitted),
    ]
    program = _Program(len(steps), (_Step * len(steps))(*(_Step(*step) for step in steps)))
    return not ctypes.CDLL(None).prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)
