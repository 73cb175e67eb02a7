"""Measure the memory, files and processes of a kernel on Linux.

The supervisor, the parent of the kernel's process, measures by reading /proc. There is a quick check and a thorough
one:

- Quick: resident memory of each descendant (statm), and open files without a name, such as memfd.
- Thorough: also all pages of shared memory, even those that no process has touched lately, and the files of the scratch
  folder. If the sum exceeds the limit, proportional memory (smaps_rollup) is measured, where shared pages count once.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator

MAX_PROCESSES = 256
MAX_FILES = 100_000
MAX_DEPTH = 64
# One check in so many is thorough. Measured on a process with JAX: listing the children of one thread takes 0.02 ms,
# those of all threads 1 ms, listing the memory mappings 2 ms, and reading smaps_rollup 6 ms.
CHECKS_PER_THOROUGH = 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A line of /proc/<pid>/maps for a shared mapping of a removed file: addresses, rights, offset, device, inode, name.
_SHARED_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) [r-][w-][x-]s ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) +/.*\(deleted\)$", re.MULTILINE
)


class OverLimit(Exception):
    """Raised when a kernel's processes hold more memory, files or processes than they may. The message says which."""


def list_children(process: int, *, of_all_threads: bool = True) -> list[int]:
    """Return the process ids of the children of a process, oldest first; empty if the system does not list them.

    `of_all_threads` includes children that were started by threads other than the main one.
    """
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{process}/task") if of_all_threads else [process]:
            with contextlib.suppress(OSError):
                found += map(int, _read_file(f"/proc/{process}/task/{thread}/children").split())
    return found


def list_descendants(process: int, *, of_all_threads: bool = True) -> list[int]:
    """Return the ids of all descendants of a process. Raises `OverLimit` beyond `MAX_PROCESSES`."""
    found: list[int] = []
    waiting = [process]
    while waiting:
        below = list_children(waiting.pop(), of_all_threads=of_all_threads)
        found += below
        waiting += below
        if len(found) > MAX_PROCESSES:
            raise OverLimit(f"the kernel's process started more than {MAX_PROCESSES} processes")
    return found


class UsageMonitor:
    """Check the memory, files and processes that the descendants of a process hold.

    The supervisor calls `check` ten times a second, so most checks are quick. Every tenth check is thorough, unless no
    process has run since the last thorough one.
    """

    def __init__(self, process: int, scratch: str, memory: int) -> None:
        """Prepare to limit memory and files of the supervisor's descendants to `memory` bytes; zero for no limit."""
        self._process, self._scratch, self._memory = process, scratch, memory
        # The descendants in the last thorough check, including those that other threads than the main one started.
        self._descendants: list[int] = []
        self._processor_times: dict[int, bytes] = {}
        self._checks = 0

    def check(self) -> None:
        """Measure the usage, quickly or thoroughly. Raises `OverLimit` if the processes hold too much."""
        self._checks += 1
        is_due = self._checks % CHECKS_PER_THOROUGH == 0 and self._has_any_run()
        processes = list_descendants(self._process, of_all_threads=is_due)
        if is_due:
            self._descendants = processes
        else:
            processes = list({*processes, *self._descendants})
        if not self._memory:
            return
        held = sum(map(_measure_resident, processes))
        inodes: dict[tuple[int, int], int] = {}
        for process in processes:
            inodes |= _list_unnamed_files(process)
        if is_due or held + sum(inodes.values()) > self._memory:
            self._check_thoroughly(processes, held, inodes)

    def _has_any_run(self) -> bool:
        """Tell whether a process has used processor time since the last call."""
        known = {*self._descendants, *list_descendants(self._process, of_all_threads=False)}
        times = {process: _read_processor_time(process) for process in known}
        before, self._processor_times = self._processor_times, times
        return times != before

    def _check_thoroughly(self, processes: list[int], resident: int, inodes: dict[tuple[int, int], int]) -> None:
        for process in processes:
            for inode, size in _list_shared_mappings(process):
                inodes[inode] = max(size, inodes.get(inode, 0))
        shared, files = sum(inodes.values()), _measure_folder(self._scratch)
        if resident + shared + files <= self._memory:
            return
        held = sum(map(_measure_proportional, processes)) + shared + files
        if held > self._memory:
            of_it = f" ({files / 2**30:.1f} GiB of it in files)" if files > 0.05 * held else ""
            allowed = f"{self._memory / 2**30:.1f} GiB are allowed (--memory)"
            raise OverLimit(f"the kernel's process took {held / 2**30:.1f} GiB{of_it}, {allowed}")


def _read_file(path: str) -> bytes:
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(opened, 2**16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(opened)


def _measure_resident(process: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(_read_file(f"/proc/{process}/statm").split()[1]) * _PAGE_BYTES
    return 0


def _read_processor_time(process: int) -> bytes:
    """Return the processor times of a process and of its ended children, as the fields of /proc/<pid>/stat."""
    with contextlib.suppress(OSError):  # fields follow the program's name in brackets, which may contain any character
        return b" ".join(_read_file(f"/proc/{process}/stat").rpartition(b")")[2].split()[11:15])
    return b""


def _measure_proportional(process: int) -> int:
    """Return a process's proportional set size in bytes (its share of mapped pages), without `Pss_Shmem`."""
    try:
        fields = dict(
            line.split()[:2]
            for line in _read_file(f"/proc/{process}/smaps_rollup").splitlines()
            if line.startswith(b"Pss_")
        )
        return 1024 * sum(int(fields[name]) for name in (b"Pss_Anon:", b"Pss_File:"))
    except (OSError, KeyError, ValueError):
        return _measure_resident(process)


def _list_unnamed_files(process: int) -> dict[tuple[int, int], int]:
    """Return bytes of open unnamed files (memfd, removed) by device and inode; raise `OverLimit` if they are hidden."""
    found = {}
    folder = f"/proc/{process}/fd"
    try:
        names = os.listdir(folder)
    except PermissionError:
        raise OverLimit("the kernel's process hid its memory and files (PR_SET_DUMPABLE)") from None
    except OSError:  # the process has ended
        return {}
    for name in names:
        with contextlib.suppress(OSError):
            about = os.stat(f"{folder}/{name}")
            if about.st_nlink == 0 and stat.S_ISREG(about.st_mode):
                found[about.st_dev, about.st_ino] = about.st_blocks * 512
    return found


def _list_shared_mappings(process: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the device and inode of each mapped piece of shared memory, and its size in bytes.

    To root, the system shows the size of all its pages. Otherwise the size of the mapping is used.
    """
    try:
        maps = _read_file(f"/proc/{process}/maps")
    except OSError:
        return
    for first, last, offset, major, minor, inode in _SHARED_MAPPING.findall(maps):
        start, end = int(first, 16), int(last, 16)
        try:
            size = os.stat(f"/proc/{process}/map_files/{start:x}-{end:x}").st_blocks * 512
        except OSError:
            size = int(offset, 16) + end - start
        yield (os.makedev(int(major, 16), int(minor, 16)), int(inode)), size


def _measure_folder(folder: str) -> int:
    """Return the bytes of a folder's files; raise `OverLimit` if there are too many, or they cannot be measured."""
    inodes: dict[tuple[int, int], int] = {}
    entries, waiting = 0, [(folder, 0)]
    while waiting:
        place, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise OverLimit(f"the kernel's process nested more than {MAX_DEPTH} folders in its scratch folder")
        try:
            with os.scandir(place) as found:
                for entry in found:
                    entries += 1
                    if entries > MAX_FILES:
                        raise OverLimit(f"the kernel's process made more than {MAX_FILES:,} files")
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
                    elif not entry.is_symlink():  # links take almost no space, and a cache has hundreds of them
                        with contextlib.suppress(FileNotFoundError):
                            about = entry.stat(follow_symlinks=False)
                            inodes[about.st_dev, about.st_ino] = about.st_blocks * 512
        except (FileNotFoundError, NotADirectoryError):  # the kernel has removed the entry meanwhile
            continue
        except OSError as error:
            raise OverLimit(f"the kernel's scratch folder cannot be measured: {error.strerror}") from error
    return sum(inodes.values())
