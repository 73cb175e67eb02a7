"""Confine a kernel's process: restrict the files, connections and system calls that it may use.

Linux has two mechanisms for this, and neither needs privileges. Landlock restricts files, seccomp restricts system
calls. `confine_process` returns a sentence that says whether both are in force.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from conformance import environment
from conformance.sandbox import landlock, policy, seccomp
from conformance.sandbox.landlock import READ, WRITE, Access

CONFINED = "confined"
"""The first word of the sentence that `confine_process` returns if both mechanisms are in force."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SIGKILL = 9
# From linux/capability.h: the version of the system calls, and the capabilities that are kept, to read any file and to
# lock memory, which drivers need.
_CAPABILITIES_VERSION = 0x20080522
_KEPT_CAPABILITIES = 1 << 1 | 1 << 2 | 1 << 14
_DEVICES = Path("/dev")
# Entries of /dev that a kernel may use. Others are terminals, disks, memory, virtual machines and parts of the system.
_COMMON_DEVICES = ("null", "zero", "random", "urandom")
_ACCELERATORS = ("nvidia*", "accel*", "vfio*", "kfd", "dri")
# Places where NVIDIA's driver writes: it creates files in shared memory and names its threads. If that is forbidden,
# the driver does not start.
_NVIDIA_WRITES = (Path("/dev/shm"), Path("/proc/self/task"))


def confine_process(
    writable: Iterable[Path],
    readable: Iterable[Path],
    listable: Iterable[Path] = (),
    open_files: Collection[int] = (),
) -> str:
    """Confine this process, and return a sentence that says whether it is confined and what it may still do.

    Only the calling thread is confined. So it must be the process's only thread, and no code of the kernel may have
    run. On systems other than Linux, nothing is confined.

    Args:
      writable: folders where the process may read, write, create and remove files: its scratch folder.
      readable: files and folders that the process may read besides the interpreter, libraries and devices.
      listable: folders that the process may list, with all folders below, without reading their files. Python finds no
        module in a folder that it cannot list.
      open_files: descriptors that stay open, besides standard input, output and error.

    Returns:
      A sentence that begins with `confined` if Landlock and seccomp both restrict the process.
    """
    if not sys.platform.startswith("linux"):
        return f"not confined: {sys.platform} has neither Landlock nor seccomp"
    _close_other_files(open_files)
    nvidia = os.path.exists(environment.NVIDIA_DRIVER)
    libc = ctypes.CDLL(None, use_errno=True)
    # Look for devices before Landlock forbids it: the options of seccomp depend on them.
    accelerator = any(find_devices(_ACCELERATORS))
    _drop_capabilities(libc)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return f"not confined: {os.strerror(ctypes.get_errno())}"
    version = landlock.query_version()
    without_landlock = "" if version else "this system has no Landlock, so that it may read and write the user's files"
    if version:
        try:
            _restrict_files(version, writable, readable, listable, nvidia=nvidia)
        except OSError as error:
            without_landlock = f"Landlock fails ({error.strerror}), so that it may read and write the user's files"
    without_seccomp = seccomp.install_filter(seccomp.FilterOptions(accelerator, unix_server=nvidia))
    if without_seccomp:
        without_seccomp += ", so that it may use sockets"
    if without_landlock or without_seccomp:
        return "not confined: " + "; ".join(filter(None, (without_landlock, without_seccomp)))
    left = ["write to shared memory and serve a Unix socket, for NVIDIA's driver"] if nvidia else []
    left += [action for since, action in landlock.MISSING_BEFORE.items() if version < since]
    return CONFINED + (f", but may {' and '.join(left)}" if left else "")


def is_confined(sentence: str) -> bool:
    """Tell whether a sentence of `confine_process` says that Landlock and seccomp are both in force."""
    return sentence.startswith(CONFINED)


def find_devices(
    patterns: Iterable[str] = (*_COMMON_DEVICES, *_ACCELERATORS), folder: Path = _DEVICES
) -> Iterator[Path]:
    """Yield the devices that a kernel may use, by default those that every kernel needs and those of accelerators."""
    for pattern in patterns:
        yield from (device for device in folder.glob(pattern) if not device.is_symlink())


def die_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def _restrict_files(
    version: int, writable: Iterable[Path], readable: Iterable[Path], listable: Iterable[Path], *, nvidia: bool
) -> None:
    with landlock.Ruleset(version) as ruleset:
        for folder in (_DEVICES, *listable):
            ruleset.allow(folder, Access.READ_DIR)
        for place in (*policy.find_system_paths(), *readable):
            ruleset.allow(place, READ)
        for device in find_devices():
            ruleset.allow(device, READ | WRITE | Access.IOCTL_DEVICE)
        for folder in writable:
            ruleset.allow(folder, landlock.EVERYTHING & ~Access.IOCTL_DEVICE)
        if nvidia:
            shared_memory, threads = _NVIDIA_WRITES
            ruleset.allow(shared_memory, landlock.EVERYTHING & ~Access.IOCTL_DEVICE)
            ruleset.allow(threads, READ | WRITE)
        ruleset.enter()


def _close_other_files(kept: Collection[int]) -> None:
    """Close inherited descriptors except `kept`. Seccomp would not stop the use of an inherited, connected socket."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # the descriptor that listed this folder is closed already
                os.close(descriptor)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities of root except those to read files and to lock memory."""
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    libc.capset(header, (ctypes.c_uint32 * 6)(*(one & _KEPT_CAPABILITIES for one in sets[:3])))
