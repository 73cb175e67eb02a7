"""Cache compiled programs of kernels on disk, so that judging the same kernel again skips compilation.

Compiling takes a third of a run. When a kernel's process ends, the judge stores the programs that the process compiled.
Each kernel has a cache folder of its own, named by a digest of the kernel's name, its source and the machine. While a
server runs (`python -m conformance serve`), versions of one kernel share a folder, which ends with the server.

Kernels' processes of later runs read the programs (`conformance.program_cache`) and cannot write to the cache folder. A
run does not see programs that were stored after it began. So a process finds no data that another kernel, or another
process of the same run, has left.

The folders are limited in bytes and in number of files; the oldest programs are removed. Programs for accelerators are
not cached, since nothing verifies that cached and newly compiled ones are the same.
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

from conformance import served_run
from conformance.execution import implementation_registry, source_digests
from conformance.truth import disk_cache

_FOLDER = "programs"
_NAME = re.compile(r"[\w.-]{1,150}-[0-9a-f]{64}-cache")  # JAX's file name for a compiled program
# Limits of the cache. For comparison: a run at level `quick` compiles 300 to 600 programs of 9 to 17 kB.
MAX_PROGRAM_BYTES = 2**24
MAX_KERNEL_BYTES = 2**26
MAX_ALL_BYTES = 2**29
MAX_PROGRAMS = 6_000
MAX_KERNELS = 12
_SETTLE_SECONDS = 1.0  # a program that was written to more recently may be incomplete


def find_cache_folder(name: str) -> Path | None:
    """Return the cache folder for a kernel's programs; None for our own or unknown source, or if caching is off."""
    folder = disk_cache.find_cache_folder()
    if folder is None or implementation_registry.is_builtin(name):
        return None
    package, source = source_digests.describe_source(name)
    if not package and not source:
        return None
    server_folder = served_run.find_folder()
    version = (package, source) if server_folder is None else (os.getcwd(),)
    digest = hashlib.blake2b(repr((name, *version, _describe_machine())).encode(), digest_size=16).hexdigest()
    return (folder if server_folder is None else server_folder) / _FOLDER / digest


@functools.cache
def _describe_machine() -> str:
    """Describe the processor for the name of a shared cache folder: JAX's program names do not identify it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = (line for line in lines if line.startswith(("flags", "Features")))
        return f"{platform.machine()} {next(found, '')}"
    return f"{platform.machine()} {platform.node()}"


def link_programs(cache_folder: Path | None, scratch: str) -> None:
    """Link programs stored before this run into a kernel's scratch folder, which is empty without a cache folder."""
    linked = Path(scratch, _FOLDER)
    linked.mkdir()
    if cache_folder is None:
        return
    start = served_run.get_run_start()
    with contextlib.suppress(OSError):
        for program in os.scandir(cache_folder):
            if _NAME.fullmatch(program.name) and program.stat(follow_symlinks=False).st_mtime < start:
                (linked / program.name).symlink_to(program.path)


def find_linked_programs(scratch: str) -> Path | None:
    """Return the folder in `scratch` where a kernel's process reads and writes programs; None if there is none."""
    folder = Path(scratch, _FOLDER)
    return folder if folder.is_dir() else None


def store_programs(cache_folder: Path | None, scratch: str) -> None:
    """Copy the new programs of a process that has ended to the cache. If the disk is full or read-only, copy none."""
    linked = Path(scratch, _FOLDER)
    if cache_folder is None or linked.is_symlink():
        return
    with contextlib.suppress(OSError):
        new = _find_new_programs(linked)
        if not new:
            return
        # The folder of a server that has ended meanwhile is not created again.
        cache_folder.parent.mkdir(parents=served_run.FOLDER_VARIABLE not in os.environ, exist_ok=True)
        cache_folder.mkdir(exist_ok=True)
        _evict_oldest(cache_folder.parent, MAX_KERNELS, MAX_ALL_BYTES - MAX_KERNEL_BYTES, spared=cache_folder)
        room = MAX_KERNEL_BYTES
        for program in new[:MAX_PROGRAMS]:
            room -= _store_program(program, cache_folder / Path(program).name, room)
        _evict_oldest(cache_folder, MAX_PROGRAMS, MAX_KERNEL_BYTES)


def _find_new_programs(linked: Path) -> list[str]:
    """Return the paths of new programs that were written long enough ago to be complete."""
    last = time.time() - _SETTLE_SECONDS
    found = [program for program in os.scandir(linked) if _NAME.fullmatch(program.name) and not program.is_symlink()]
    return [program.path for program in found if program.stat(follow_symlinks=False).st_mtime < last]


def _store_program(path: str, target: Path, room: int) -> int:
    """Copy a program if it is a regular file of at most `room` bytes; return the number of copied bytes.

    The kernel controls the folder of `path`, so `path` may be a link, a pipe or anything else.
    """
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(opened, "rb") as program:
            about = os.fstat(program.fileno())
            if not stat.S_ISREG(about.st_mode) or target.exists():
                return 0
            if about.st_size <= min(room, MAX_PROGRAM_BYTES):
                unfinished.write_bytes(program.read(about.st_size))
                unfinished.replace(target)
                return about.st_size
    return 0


def _evict_oldest(folder: Path, max_entries: int, max_bytes: int, spared: Path | None = None) -> None:
    """Remove the oldest entries of a folder until at most so many entries and bytes are left. `spared` is kept."""
    entries = [(entry.stat(follow_symlinks=False).st_mtime, entry) for entry in folder.iterdir() if entry != spared]
    left = max_bytes
    for number, (_, entry) in enumerate(sorted(entries, reverse=True)):
        left -= _count_bytes(entry)
        if number >= max_entries - (spared is not None) or left < 0:
            with contextlib.suppress(OSError):  # another process may remove it at the same time
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _count_bytes(entry: Path) -> int:
    with contextlib.suppress(OSError):
        files = os.scandir(entry) if entry.is_dir() else [entry]
        return sum(file.stat().st_size for file in files)
    return 0
