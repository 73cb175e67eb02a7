"""Install a system call filter (seccomp) that allows what JAX and Python need, and refuses everything else.

The filter is an allow-list (`system_calls.ALLOWED`). Sockets are not on the list, so nothing can be sent to another
process or machine. Also missing are io_uring, System V and POSIX IPC, priorities, other processes' memory, and mounts.
A few calls are allowed for some arguments:

- `clone` without new namespaces;
- `ioctl` for pipes and terminals; with an accelerator, for any device, but not for files, terminals and userfaultfd;
- `prlimit64` on the process itself;
- with an NVIDIA driver, the calls that serve a Unix socket, which the driver is believed to need. Connecting is
  forbidden.

Calls that set modes of files report success and do nothing. They cannot be allowed, since Landlock cannot confine them
to a folder. They must not fail, since programs make them to copy files.

Sources: docs.kernel.org/userspace-api/seccomp_filter.html, linux/filter.h, linux/audit.h, linux/fs.h.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import platform
from collections.abc import Iterable, Mapping

from conformance.sandbox import system_calls
from conformance.sandbox.system_calls import SystemCall

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
# Codes of classic BPF instructions: load a word, jump by a test of the word, mask the word, return.
_LOAD, _IF_EQUAL, _IF_GREATER, _IF_AT_LEAST, _IF_ANY_BIT, _MASK, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_RET_ALLOW, _RET_ERRNO = 0x7FFF0000, 0x00050000
# Offsets in `struct seccomp_data`: the number of the system call, the architecture, and the lower halves of the call's
# first two arguments.
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_X32_BIT = 0x4000_0000  # system call numbers from here on belong to the x32 ABI
_AUDIT_ARCH: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEW_NAMESPACES = 0x7E02_0000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_AF_UNIX = 1
# ioctl commands that are always allowed: TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, FIOASYNC,
# TCGETS2, FS_IOC_GETFLAGS
_HARMLESS_IOCTLS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x5452, 0x802C542A, 0x80086601)
# Types of ioctl commands of file systems (f, X, v, btrfs), terminals (T) and userfaultfd. Those of accelerators differ.
_REFUSED_TYPES = (0x66, 0x58, 0x76, 0x94, 0x54, 0xAA)


@dataclasses.dataclass(frozen=True)
class FilterOptions:
    """Options that allow more system calls than the common set."""

    accelerator: bool = False  # whether the process drives an accelerator by `ioctl`
    unix_server: bool = False  # whether the process may serve a Unix socket, for NVIDIA's driver


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


Step = tuple[int, int, int, int]
"""A BPF instruction: its code, the instructions to skip if its test holds, those to skip if not, and its operand."""


def install_filter(options: FilterOptions) -> str:
    """Install the filter in this thread, and in the threads and processes that it starts. Linux only.

    The thread must have set `PR_SET_NO_NEW_PRIVS`.

    Returns:
      Why the filter could not be installed; empty if it is installed.
    """
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        return f"no table of system calls for {machine}"
    steps = build_filter(machine, options, os.getpid())
    program = _Program(len(steps), (_Instruction * len(steps))(*(_Instruction(*step) for step in steps)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""


def build_filter(machine: str, options: FilterOptions, pid: int) -> list[Step]:
    """Return the instructions of the filter."""

    def numbers(calls: Iterable[SystemCall]) -> list[int]:
        return sorted(number for call in calls if (number := getattr(call, machine)) is not None)

    def number_of(name: str) -> int:
        (number,) = numbers(call for call in system_calls.CHECKED + system_calls.UNIX_SERVER if call.name == name)
        return number

    served = [call for call in system_calls.UNIX_SERVER if options.unix_server]
    open_served = [call for call in served if call.name != "socket"]
    forbidden = [*system_calls.FORBIDDEN, *(call for call in system_calls.UNIX_SERVER if call not in served)]
    steps: list[Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32_BIT),
        _refuse(errno.EPERM),
    ]
    steps += _return_for(numbers([*system_calls.ALLOWED, *open_served]), (_RETURN, 0, 0, _RET_ALLOW))
    steps += _return_for(numbers(system_calls.IGNORED), _refuse(0))
    steps += _return_for(numbers(system_calls.UNSUPPORTED), _refuse(errno.ENOTSUP))
    steps += _return_for(numbers(forbidden), _refuse(errno.EPERM))
    steps += _when(number_of("clone"), _check_clone())
    steps += _when(number_of("ioctl"), _check_ioctl(accelerator=options.accelerator))
    steps += _when(number_of("prlimit64"), _check_prlimit(pid))
    if options.unix_server:
        steps += _when(number_of("socket"), _check_socket())
    # All other calls fail with ENOSYS: `system_calls.FALLBACK`, and calls newer than the table. Then libc tries an
    # older call.
    return [*steps, _refuse(errno.ENOSYS)]


def _refuse(number: int) -> Step:
    """Return the instruction that makes a system call fail with error `number`; with zero it reports success."""
    return _RETURN, 0, 0, _RET_ERRNO | number


def _return_for(numbers: list[int], verdict: Step) -> list[Step]:
    """Return instructions that end with `verdict` for these system calls, tested by ranges of consecutive numbers."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return [step for low, high in ranges for step in ((_IF_AT_LEAST, 0, 2, low), (_IF_GREATER, 1, 0, high), verdict)]


def _when(number: int, steps: list[Step]) -> list[Step]:
    """Return instructions that run `steps` for the system call `number`. The last of `steps` must be a return."""
    return [(_IF_EQUAL, 0, len(steps), number), *steps]


def _check_clone() -> list[Step]:
    return [
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_IF_ANY_BIT, 1, 0, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _RET_ALLOW),
        _refuse(errno.EPERM),
    ]


def _check_ioctl(*, accelerator: bool) -> list[Step]:
    steps: list[Step] = [(_LOAD, 0, 0, _ARGUMENT_1)]
    for command in _HARMLESS_IOCTLS:
        steps += [(_IF_EQUAL, 0, 1, command), (_RETURN, 0, 0, _RET_ALLOW)]
    if not accelerator:
        return [*steps, _refuse(errno.ENOTTY)]
    steps += [(_MASK, 0, 0, 0xFF00)]
    for kind in _REFUSED_TYPES:
        steps += [(_IF_EQUAL, 0, 1, kind << 8), _refuse(errno.ENOTTY)]
    return [*steps, (_RETURN, 0, 0, _RET_ALLOW)]


def _check_prlimit(pid: int) -> list[Step]:
    return [
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_IF_EQUAL, 1, 0, 0),  # zero means the caller
        (_IF_EQUAL, 0, 1, pid),
        (_RETURN, 0, 0, _RET_ALLOW),
        _refuse(errno.EPERM),
    ]


def _check_socket() -> list[Step]:
    return [
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_IF_EQUAL, 0, 1, _AF_UNIX),
        (_RETURN, 0, 0, _RET_ALLOW),
        _refuse(errno.EPERM),
    ]
