"""Try what a kernel must not do: `python attempts.py FOLDER NVIDIA_DRIVER`. Print the outcomes as JSON.

FOLDER has `tree`, a source tree, and `scratch`; the process is confined to these. NVIDIA_DRIVER is a file that stands
for the driver's device. An attempt that raises nothing is `done`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance import environment
from conformance.sandbox import confinement, policy

libc = ctypes.CDLL(None, use_errno=True)
# Numbers of system calls on x86-64 and AArch64.
NUMBERS = {
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "pidfd_open": (434, 434),
    "process_vm_readv": (310, 270),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "mount": (165, 40),
    "unshare": (272, 97),
    "ptrace": (101, 117),
    "inotify_init1": (294, 26),
    "setxattr": (188, 5),
    "io_uring_setup": (425, 425),
    "clone": (56, 220),
}
# Devices that no kernel needs.
DEVICES = ("userfaultfd", "kvm", "net/tun", "ptmx", "loop-control", "cpu_dma_latency", "vsock", "tty", "mem", "kmsg")
ON_AARCH64 = os.uname().machine == "aarch64"


def system_call(name: str, *arguments: Any) -> None:
    """Make a system call by its number. Raises `OSError` if it fails."""
    if libc.syscall(NUMBERS[name][ON_AARCH64], *arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _open_device(name: str) -> None:
    os.close(os.open(f"/dev/{name}", os.O_RDWR))


def _touch(file: Path) -> None:
    file.touch()
    file.unlink()


def attempts(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the attempts by name."""
    tree, scratch, inside = folder / "tree", folder / "scratch", folder / "scratch" / "made"
    zeros = ctypes.create_string_buffer(4096)
    return {
        # What a kernel needs.
        "read a module": (tree / "helper.py").read_text,
        "read a data file": (tree / "data" / "table.txt").read_text,
        "list the tree": lambda: os.listdir(tree),
        "read the library": Path(json.__file__).read_text,
        "write to scratch": lambda: inside.write_text("x"),
        "make a file in scratch": lambda: _touch(scratch / "touched"),
        "copy in scratch": lambda: shutil.copy(inside, scratch / "copied"),
        "rename in scratch": lambda: inside.rename(scratch / "renamed"),
        "a child": lambda: subprocess.run([sys.executable, "-S", "-c", "pass"], check=True, capture_output=True),
        "a thread": lambda: threading.Thread(target=int).start(),
        "shared memory of its own": lambda: mmap.mmap(-1, 2**16),
        "the machine's processors": Path("/proc/cpuinfo").read_text,
        "its own limits": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        "signal itself": lambda: os.kill(os.getpid(), 0),
        "write to /dev/null": lambda: Path("/dev/null").write_text("x"),
        "read /dev/urandom": lambda: os.close(os.open("/dev/urandom", os.O_RDONLY)),
        # Devices.
        **{
            f"open /dev/{name}": functools.partial(_open_device, name)
            for name in DEVICES
            if Path("/dev", name).exists()
        },
        # Files.
        "read a neighbour": (folder / "neighbour.txt").read_text,
        "read by a link": (tree / "link.txt").read_text,
        "read .git": (tree / ".git" / "config").read_text,
        "read .env": (tree / ".env").read_text,
        "read .env by a link": (tree / "alias.txt").read_text,
        "read .env farther down": (tree / "data" / ".env").read_text,
        "read records": (tree / "records.jsonl").read_text,
        "read what the command writes": (tree / "out" / "page.html").read_text,
        "list a neighbour": lambda: os.listdir(folder / "other"),
        "write to the tree": lambda: (tree / "made").write_text("x"),
        "write beside": lambda: (folder / "made").write_text("x"),
        "link in from outside": lambda: os.link(folder / "neighbour.txt", scratch / "linked"),
        "truncate": lambda: os.truncate(folder / "neighbour.txt", 0),
        "read a password": Path("/etc/shadow").read_text,
        # Other processes.
        "read a command line": Path(f"/proc/{os.getppid()}/cmdline").read_bytes,
        "read an environment": Path(f"/proc/{os.getppid()}/environ").read_bytes,
        "list processes": lambda: os.listdir("/proc"),
        "signal the parent": lambda: os.kill(os.getppid(), 0),
        "a lower priority of the parent": lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 5),
        "a limit of the parent": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)),
        # Calls.
        "shmget": lambda: system_call("shmget", 7, 4096, 0o1600),
        "msgget": lambda: system_call("msgget", 7, 0o1600),
        "semget": lambda: system_call("semget", 7, 1, 0o1600),
        "mq_open": lambda: system_call("mq_open", b"left", os.O_CREAT | os.O_RDWR, 0o600, None),
        "add_key": lambda: system_call("add_key", b"user", b"left", b"x", 1, -3),
        "keyctl": lambda: system_call("keyctl", 0, -3, 1),
        "sched_setaffinity": lambda: system_call("sched_setaffinity", 0, 128, zeros),
        "sched_setscheduler": lambda: system_call("sched_setscheduler", 0, 3, zeros),
        "setpriority": lambda: system_call("setpriority", 0, 0, 5),
        "ioprio_set": lambda: system_call("ioprio_set", 1, 0, 3 << 13),
        "pidfd_open": lambda: system_call("pidfd_open", os.getppid(), 0),
        "process_vm_readv": lambda: system_call("process_vm_readv", os.getppid(), zeros, 1, zeros, 1, 0),
        "userfaultfd": lambda: system_call("userfaultfd", 0),
        "perf_event_open": lambda: system_call("perf_event_open", zeros, 0, -1, -1, 0),
        "bpf": lambda: system_call("bpf", 0, zeros, 72),
        "mount": lambda: system_call("mount", b"none", b"/mnt", b"tmpfs", 0, None),
        "unshare": lambda: system_call("unshare", 0x10000000),
        "ptrace": lambda: system_call("ptrace", 16, os.getppid(), 0, 0),
        "inotify_init1": lambda: system_call("inotify_init1", 0),
        "setxattr": lambda: system_call("setxattr", os.fsencode(scratch), b"user.left", b"x", 1, 0),
        "io_uring_setup": lambda: system_call("io_uring_setup", 4, zeros),
        "clone": lambda: system_call("clone", 0x1000_0011, 0, 0, 0, 0),  # in a user namespace of its own
        "inode flags": lambda: fcntl.ioctl(os.open(tree / "helper.py", os.O_RDONLY), 0x40086602, bytes(8)),
        # Calls that are ignored: the test looks at the files.
        "change a mode": lambda: os.chmod(folder / "neighbour.txt", 0),
        "change a time": lambda: os.utime(folder / "neighbour.txt", (1, 1)),
        # What an NVIDIA driver needs.
        "name a thread": lambda: Path("/proc/self/task", str(threading.get_native_id()), "comm").write_text("named"),
    }


def main(folder: str, driver: str) -> None:
    """Confine this process and try everything."""
    environment.NVIDIA_DRIVER = driver
    root = Path(folder)
    readable = list(policy.find_readable_sources(root / "tree", [root / "tree" / "out" / "page.html"]))
    found = {"sentence": confinement.confine_process([root / "scratch"], readable, [root / "tree"])}
    signal.alarm(60)
    for name, attempt in attempts(root).items():
        try:
            attempt()
            found[name] = "done"
        except (OSError, subprocess.SubprocessError, PermissionError) as error:
            found[name] = errno.errorcode.get(getattr(error, "errno", None) or 0, repr(error))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
