"""Confining a kernel's process, where Linux allows it without privileges: Landlock, from Linux 5.13 on, and seccomp.

It may compute, and read but for what other processes show of themselves (their arguments name the case). It may not
write outside a scratch folder, nor, where the system is recent enough, connect to anything or signal a process outside.
A process that is confined cannot look into one that is not.

Sources: docs.kernel.org/userspace-api/landlock.html, and the numbers of its system calls, the same on every platform.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance import environment
from conformance.sandbox import seccomp

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38
_DIE_WITH_PARENT = 1
# Of linux/capability.h: the version of the calls, and to read any file and lock memory, as drivers of devices do.
_CAPABILITIES = 0x20080522
_KEPT = 1 << 1 | 1 << 2 | 1 << 14
_KILL = 9
# Rights of files, by the first version that has them: writing, removing, making, then moving, cutting, and devices.
_WRITING = {
    1: 0b1_1111_1111_0010,  # all of version 1 but executing (1 << 0), reading files (1 << 2) and folders (1 << 3)
    2: 1 << 13,
    3: 1 << 14,
}
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_READING = _READ_FILE | _READ_FOLDER
_OF_FILES = 0b111 | 1 << 14  # all others are of folders
_NETWORK = 0b11  # binding and connecting, from version 4 on
_SCOPES = 0b11  # abstract sockets and signals, from version 6 on
# What JAX, NumPy and drivers read of the system; other processes are there too.
_PROC = Path("/proc")
_SYSTEM = ("self", "cpuinfo", "meminfo", "stat", "sys", "driver", "version", "filesystems", "devices", "modules")
# Devices are written to by everybody: /dev/null, GPUs. Memory that is shared by name lies among them, as files; and so
# do disks, memory, and terminals, in which a verdict is read.
_DEVICES, _SHARED_MEMORY = Path("/dev"), Path("/dev/shm")
_NO_DEVICES = ("shm", "mqueue", "hugepages", "pts", "console", "mem", "kmem", "port", "kmsg")
_TERMINALS = ("tty", "vcs")
# The driver of NVIDIA GPUs writes about its own threads there, and does not come up if it may not.
_THREADS = _PROC / "self" / "task"
_WRITE_FILE = 1 << 1 | 1 << 14  # and cut it


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def confine_process(writable: Sequence[Path]) -> str:
    """Confine this process to writing in the folders `writable`; what it can do still is said in a sentence."""
    if not sys.platform.startswith("linux"):
        return f"not confined: {sys.platform} has no Landlock"
    system = ctypes.CDLL(None, use_errno=True)
    version = int(system.syscall(_CREATE_RULESET, None, 0, _VERSION))
    if version < 1:
        return "not confined: this system has no Landlock"
    writing = sum(rights for since, rights in _WRITING.items() if version >= since)
    rules = _Ruleset(writing | _READING, _NETWORK if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    ruleset = int(system.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0))
    if ruleset < 0:
        return f"not confined: {os.strerror(ctypes.get_errno())}"
    nvidia = os.path.exists(environment.NVIDIA_DRIVER)
    shared = [_SHARED_MEMORY] if nvidia else []  # the driver makes files there
    try:
        _allow(system, ruleset, Path("/"), _READ_FOLDER)
        for place in (*(place for place in Path("/").iterdir() if place != _PROC), *(_PROC / one for one in _SYSTEM)):
            _allow(system, ruleset, place, _READING)
        for device in filter(_is_for_kernels, _DEVICES.iterdir()):
            _allow(system, ruleset, device, writing & _WRITE_FILE | _READING)
        for folder in (*writable, *shared):
            _allow(system, ruleset, folder, writing | _READING)
        if nvidia:
            _allow(system, ruleset, _THREADS, writing & _WRITE_FILE | _READING)
        _give_up_capabilities(system)
        if system.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or system.syscall(_RESTRICT_SELF, ruleset, 0):
            return f"not confined: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(ruleset)
    left = [] if seccomp.forbid() else ["connect to sockets and set the limits of other processes"]
    left += ["write to shared memory"] if shared else []
    left += [what for what, since in (("bind", 4), ("signal other processes", 6)) if version < since]
    return "confined" + (f", but may {' and '.join(left)}" if left else "")


def _is_for_kernels(device: Path) -> bool:
    return not (device.name in _NO_DEVICES or device.name.startswith(_TERMINALS) or device.is_block_device())


def _give_up_capabilities(system: ctypes.CDLL) -> None:
    """Keep nothing of what root can do but reading files and locking memory: no look into others, no setting clocks."""
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    system.capget(header, sets)
    system.capset(header, (ctypes.c_uint32 * 6)(*(one & _KEPT for one in sets[:3])))


def _allow(system: ctypes.CDLL, ruleset: int, place: Path, rights: int) -> None:
    try:
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no rule
    try:
        rule = _PathBeneath(rights if place.is_dir() else rights & _OF_FILES, opened)
        system.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(opened)


def die_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, _KILL, 0, 0, 0)
