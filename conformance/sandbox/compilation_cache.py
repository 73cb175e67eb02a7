"""Compiled programs of kernels, kept on disk: who judges the same kernel again does not wait for the compiler again.

Compiling takes a third of a run. What a kernel's process compiles is kept when the process ends, in a folder of its
own for each kernel, by its name, its source and the machine. The next run's processes may read what is there
(`conformance.program_cache`). They do not write there, and nothing is theirs that was kept since this run began. So no
process of a kernel finds what another kernel's, or another process of the same run, has left.

Programs for accelerators are not kept: nobody has seen yet that they are the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import time
from pathlib import Path

from conformance.calling import registry, sources
from conformance.truth import kept

_BEGAN = time.time()  # of this run: workers and kernels are forked from a process that has loaded this
_LENT = "programs"
_NAME = re.compile(r"[\w.-]{1,150}-[0-9a-f]{64}-cache")  # as JAX calls the file of a program
# `quick` leaves 300 to 600 programs of 9 to 17 kB. What is more than this, of one kernel and of all, is not kept.
_LARGEST = 2**24
_MOST = 6_000
_MOST_KERNELS = 12
_SETTLED = 1.0  # seconds: what was written to later than that before the process ended may be half a program


def find_cache_folder(name: str) -> Path | None:
    """The folder of the kernel that goes by `name`; None if nothing is kept, or its source is not known."""
    folder = kept.folder()
    if folder is None or registry.is_ours(name):
        return None
    package, source = sources.origin(name)
    if not package and not source:
        return None
    digest = hashlib.blake2b(repr((name, package, source, _machine())).encode(), digest_size=16).hexdigest()
    return folder / _LENT / digest


@functools.cache
def _machine() -> str:
    """What programs are compiled for that JAX does not name them after: a folder may be shared by unlike machines."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = (line for line in lines if line.startswith(("flags", "Features")))
        return f"{platform.machine()} {next(found, '')}"
    return f"{platform.machine()} {platform.node()}"


def link_programs(shelf: Path | None, scratch: str) -> None:
    """Have a kernel's process find in its scratch folder what was on the shelf before this run.

    Without a shelf it finds an empty folder: what it compiles ends with it.
    """
    lent = Path(scratch, _LENT)
    lent.mkdir()
    if shelf is None:
        return
    with contextlib.suppress(OSError):
        for program in os.scandir(shelf):
            if _NAME.fullmatch(program.name) and program.stat(follow_symlinks=False).st_mtime < _BEGAN:
                (lent / program.name).symlink_to(program.path)


def find_linked_programs(scratch: str) -> Path | None:
    """The folder in which a kernel's process finds programs and leaves them, if it was lent one."""
    folder = Path(scratch, _LENT)
    return folder if folder.is_dir() else None


def store_programs(shelf: Path | None, scratch: str) -> None:
    """Keep what a process has compiled that is gone; a disk that is full or read-only costs time, and nothing else."""
    left = Path(scratch, _LENT)
    if shelf is None or left.is_symlink():
        return
    with contextlib.suppress(OSError):
        found = [program for program in os.scandir(left) if _NAME.fullmatch(program.name)]
        last = time.time() - _SETTLED
        new = [one for one in found if not one.is_symlink() and one.stat(follow_symlinks=False).st_mtime < last]
        if not new:
            return
        if not shelf.is_dir():
            shelf.mkdir(parents=True)
            _make_room(shelf.parent, _MOST_KERNELS)
        for program in new[:_MOST]:
            _put(program.path, shelf / program.name)
        _make_room(shelf, _MOST)


def _put(left: str, place: Path) -> None:
    """Whole or not at all, and only what is a file: a kernel leaves what it likes."""
    unfinished = place.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        opened = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(opened, "rb") as program:
            about = os.fstat(program.fileno())
            if stat.S_ISREG(about.st_mode) and about.st_size <= _LARGEST and not place.exists():
                unfinished.write_bytes(program.read(_LARGEST))
                unfinished.replace(place)


def _make_room(folder: Path, most: int) -> None:
    """Remove the oldest entries of a folder."""
    newest = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True)
    for old in newest[most:]:
        with contextlib.suppress(OSError):  # another process may be doing the same
            shutil.rmtree(old) if old.is_dir() else old.unlink()
