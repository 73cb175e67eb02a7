"""Guard the standard streams, so that a failing write does not end a command with a traceback.

A character that the encoding lacks is escaped. If standard output accepts no more text, because the disk is full or its
pipe has no reader, `OutputFailed` ends the command with one line.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO

from conformance.session.failures import RunStopped


class OutputFailed(RunStopped):
    """A standard stream accepts no more text; the message names the stream and the reason."""


class _GuardedStream:
    """A text stream whose failed writes raise `OutputFailed`.

    With `drops`, meant for standard error, failures are ignored instead, except that of a pipe without a reader.
    """

    def __init__(self, stream: TextIO, name: str, *, drops: bool) -> None:
        self._stream, self._name, self._drops = stream, name, drops

    def write(self, text: str) -> int:
        """Write text. Raises `OutputFailed`."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream. Raises `OutputFailed`."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._fail(error)

    def _fail(self, error: OSError | ValueError) -> None:
        closed = isinstance(error, BrokenPipeError)
        if self._drops and not closed:
            return
        _discard_output(self._stream)
        if self._drops:
            raise OutputFailed(f"{self._name} is a pipe that nobody reads any more") from error
        why = "it is a pipe that nobody reads any more" if closed else getattr(error, "strerror", None) or error
        raise OutputFailed(f"{self._name} cannot be written: {why}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_closed_streams() -> None:
    """Open stdin, stdout and stderr if they are closed. Raises `OSError` if the process cannot open any file.

    The next opened files would otherwise get the descriptors 0, 1 and 2. Text for the streams would then be written to
    a file of records, for example, or to the socket of the fork server.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(opened, True)
    os.close(opened)


def guard_streams() -> None:
    """Replace `sys.stdout` and `sys.stderr` by guarded streams."""
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            stream = open(os.devnull, "w")  # noqa: SIM115 -- it stays open until the process ends
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if not isinstance(stream, _GuardedStream):
            setattr(sys, name, _GuardedStream(stream, title, drops=name == "stderr"))


def print_error(line: str) -> None:
    """Print a line on standard error, if it can be written."""
    with contextlib.suppress(OutputFailed, OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _discard_output(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that Python's flush at the end of the process does not fail."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def describe_os_error(error: OSError) -> str:
    """Return a line with the error of the system and the file that it concerns."""
    place = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    words = f"{place}{error.strerror or error}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        words += " (see `ulimit -n`)"
    return words
