"""Check, write and lock the files that a command writes: records, pages, summaries and tables.

Only files of this project are overwritten. A file is written whole or not at all. Only one run at a time writes a file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

_SCHEMA_PREFIX = "attention-conformance/"
_PAGE_TITLES = ("<title>Attention conformance", "<title>Attention side by side")
_SUMMARY_HEADING = "## Attention conformance"
_HEAD_LENGTH = 4096  # characters of a file that are read to recognise a page or a table
_MAX_COMMAND_LENGTH = 200


class OutputRefused(Exception):
    """An output file cannot be written, or must not be overwritten; the message is one line with the remedy."""


def _is_records(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline()
    if not line.endswith("\n") and line.startswith(f'{{"schema": "{_SCHEMA_PREFIX}run/'):
        return True  # a run record that is cut off: its process was killed while it wrote the first line
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and str(data.get("schema")).startswith(_SCHEMA_PREFIX)


def _read_head(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_HEAD_LENGTH).lstrip()


def _is_page(path: Path) -> bool:
    head = _read_head(path)
    return head.startswith("<!doctype html>") and any(title in head for title in _PAGE_TITLES)


def _is_table(path: Path) -> bool:
    head = _read_head(path)
    return head.startswith("{") and f'"schema": "{_SCHEMA_PREFIX}' in head


RECORDS = "file of records or measurements"
PAGE = "page of this project"
SUMMARY = "summary of this project"
TABLE = "table of this project"
_RECOGNIZERS: dict[str, Callable[[Path], bool]] = {
    RECORDS: _is_records,
    PAGE: _is_page,
    SUMMARY: lambda path: _read_head(path).startswith(_SUMMARY_HEADING),
    TABLE: _is_table,
}


def check_output(path: Path, kind: str | None) -> None:
    """Check that a file can be written, and that it is absent or an older output of the same kind.

    `kind` is `RECORDS`, `PAGE`, `SUMMARY` or `TABLE`, or None to append to any file. Raises `OutputRefused` if the
    check fails. The message has the reason and the remedy, and does not name the file.
    """
    try:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            with tempfile.TemporaryFile(dir=path.parent):
                return
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if (stat.S_ISFIFO(found.st_mode) or stat.S_ISSOCK(found.st_mode)) and path.parts[1:2] not in (
            ("dev",),
            ("proc",),
        ):
            # Opening a pipe blocks until it has a reader, and closing it ends what that reader reads.
            raise OutputRefused("is a named pipe: give a regular file, or /dev/stdout and pipe that")
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
        if kind and stat.S_ISREG(found.st_mode) and found.st_size and not _RECOGNIZERS[kind](path):
            raise OutputRefused(f"is no {kind}, and would be overwritten: give another name, or delete it first")
    except (OSError, ValueError) as error:  # a zero byte in a path raises ValueError
        raise OutputRefused(f"cannot be written: {getattr(error, 'strerror', None) or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a whole file or none: the old file stays until the new text is on the disk.

    A symbolic link stays a link. A path that is not a regular file, such as /dev/stdout, is written to directly.

    Raises:
      OSError: with the file's name, if it cannot be written.
    """
    data = text.encode("utf-8", "backslashreplace")
    try:
        place = path.resolve()
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        unfinished = place.with_name(f".attention-conformance-{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                unfinished.chmod(stat.S_IMODE(place.stat().st_mode))
            unfinished.replace(place)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def lock_file(descriptor: int, path: Path) -> None:
    """Lock an open file until this process ends, so that no other run writes it.

    Raises `OutputRefused`, with the file's name, if another process has locked the file or replaced it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputRefused(_describe_writer(path)) from error
    except OSError:  # a file system without locks
        return
    if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
        raise OutputRefused(_describe_writer(path))


def _describe_writer(path: Path) -> str:
    """Return a sentence that another run writes the file, with its command if the file's first line has it."""
    try:
        with path.open(encoding="utf-8") as file:
            command = str(json.loads(file.readline())["command"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        command = ""
    by = f": {command[:_MAX_COMMAND_LENGTH]}" if command.isprintable() and command else ""
    return f"{path} is written by another run that has not ended (give this one another file){by}"
