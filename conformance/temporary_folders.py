"""Create and remove temporary folders, such as the scratch folder of a kernel's process.

A process locks the folders that it uses. The system removes the locks when the process ends, even if it is killed. So a
folder without a lock was left by a killed process, and the next process that creates a folder removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conformance import interrupts

_PREFIX, _SUFFIX = "conformance-", ".tmp"
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TemporaryFolder:
    """A temporary folder that is locked while the descriptor `lock`, or a duplicate in another process, is open."""

    def __init__(self, purpose: str) -> None:
        """Create and lock the folder, and remove folders that killed processes have left."""
        remove_abandoned_folders()
        while True:
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", suffix=_SUFFIX)
            with contextlib.suppress(OSError):  # another process may remove the folder before it is locked
                self.lock = os.open(self.path, _OPEN_FOLDER)
                fcntl.flock(self.lock, fcntl.LOCK_SH)
                if os.path.samestat(os.stat(self.path), os.fstat(self.lock)):
                    return
                os.close(self.lock)

    def remove(self) -> None:
        """Rename the folder, so that no process creates entries in it, then remove it. Warn about entries that stay."""
        renamed = f"{self.path.removesuffix(_SUFFIX)}-removed{_SUFFIX}"
        with contextlib.suppress(OSError):
            os.rename(self.path, renamed)
            self.path = renamed
        report_remains(remove_folder(self.path))
        os.close(self.lock)


@contextlib.contextmanager
def use_temporary_folder(purpose: str) -> Iterator[TemporaryFolder]:
    """Create a temporary folder for the block, and remove it at the end. A stop signal interrupts neither."""
    with contextlib.ExitStack() as closing:
        with interrupts.delay_signals():
            folder = TemporaryFolder(purpose)
            closing.callback(_remove_undisturbed, folder)
        yield folder


def _remove_undisturbed(folder: TemporaryFolder) -> None:
    with interrupts.delay_signals():
        folder.remove()


def remove_abandoned_folders() -> None:
    """Remove the folders of processes that were killed, and warn about entries that cannot be removed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                _remove_abandoned_folder(str(path))


def remove_folder(folder: str) -> list[str]:
    """Remove a folder of any depth, whatever the modes and names of its entries.

    Nested folders are moved up into the top folder before they are emptied. So neither the length of a path, nor the
    number of open files, nor Python's stack limits the depth.

    Returns:
      The paths that could not be removed, each with the reason.
    """
    remains: list[str] = []
    try:
        top = _open_folder(folder, None)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{folder}: {error.strerror}"]
    try:
        kept: set[str] = set()
        while names := [name for name in os.listdir(top) if name not in kept]:
            for name in names:
                try:
                    _remove_entry(name, top)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    kept.add(name)
                    remains.append(f"{folder}/{name}: {error.strerror}")
    finally:
        os.close(top)
    if not remains:
        try:
            os.rmdir(folder)
        except FileNotFoundError:  # another process removes it at the same time
            pass
        except OSError as error:
            remains.append(f"{folder}: {error.strerror}")
    return remains


def report_remains(remains: list[str]) -> None:
    """Print a warning that names the first three files that could not be removed, and the number of others."""
    from reports.printable_text import make_printable  # pytest imports this module before our names are claimed

    for what in remains[:3]:
        print(f"warning: a temporary folder has what cannot be removed: {make_printable(what)}", file=sys.stderr)
    if len(remains) > 3:
        print(f"warning: and {len(remains) - 3} files more", file=sys.stderr)


def _remove_abandoned_folder(path: str) -> None:
    """Remove a folder unless a process has locked it.

    This process holds the lock meanwhile. So a process that has just created the folder, and waits for the lock, then
    notices that the folder is gone.
    """
    with _closing(_open_folder(path, None)) as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        report_remains(remove_folder(path))


def _open_folder(name: str, parent: int | None) -> int:
    """Open a folder so that its entries can be listed and removed. If its owner lacks the rights, grant them first."""
    about = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        _make_accessible(name, parent)
    return os.open(name, _OPEN_FOLDER, dir_fd=parent)


def _make_accessible(folder: str, parent: int | None) -> None:
    """Give the owner of a folder all rights to it. Links are not followed: a kernel may have put one in its place."""
    if not hasattr(os, "O_PATH"):
        os.chmod(folder, stat.S_IRWXU, dir_fd=parent)
        return
    with _closing(os.open(folder, os.O_PATH | _OPEN_FOLDER, dir_fd=parent)) as opened:
        os.chmod(f"/proc/self/fd/{opened}", stat.S_IRWXU)


def _remove_entry(name: str, top: int) -> None:
    """Remove an entry of the folder `top`. If the entry is a folder, the folders in it are moved up into `top`."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=top)
        return
    problem: OSError | None = None
    with _closing(_open_folder(name, top)) as folder:
        for inner in os.listdir(folder):
            try:
                about = os.stat(inner, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISDIR(about.st_mode):
                    os.unlink(inner, dir_fd=folder)
                    continue
                if about.st_mode & stat.S_IRWXU != stat.S_IRWXU:  # moving a folder needs the right to write to it
                    _make_accessible(inner, folder)
                os.rename(inner, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=top)
            except OSError as error:
                problem = error
    if problem is not None:
        raise problem
    os.rmdir(name, dir_fd=top)


@contextlib.contextmanager
def _closing(number: int) -> Iterator[int]:
    try:
        yield number
    finally:
        os.close(number)
