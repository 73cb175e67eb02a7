"""Read requests of the judge and send answers, in a kernel's process.

`kernel_server` runs a private copy of this module, so that the kernel cannot replace the functions that read and write.
Each answer lists the functions of JAX, NumPy or this project that the kernel has replaced; a private copy of
`tamper_check` finds them.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from os import _exit, getpid, read, write
from struct import Struct
from typing import Any

from conformance.execution.kernel_errors import describe_kernel_error
from conformance.sandbox.private_copy import load_private_copy

protocol = load_private_copy("conformance.sandbox.protocol")
tamper_check = load_private_copy("conformance.sandbox.tamper_check")
file_watcher = load_private_copy("conformance.sandbox.file_watcher")
_LENGTH = Struct("<Q")
_MAX_MESSAGE = 100_000  # the most characters of an exception's message that are sent
_MAX_CAUSES = 10
_EXCEPTIONS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}


def read_request(requests: int) -> Any:
    """Read the next request; return None at the end of the pipe."""
    head = _read_exactly(requests, _LENGTH.size)
    body = _read_exactly(requests, _LENGTH.unpack(head)[0]) if head else b""
    return protocol.unpack_request(body) if body else None


def send_value(answers: int, value: Any) -> None:
    """Send plain data without a tamper check, before any code of the kernel has run."""
    _send(answers, protocol.pack_answer(value))


def send_error(answers: int, error: BaseException) -> None:
    """Send an exception to the judge, as plain data."""
    _send(answers, protocol.pack_answer({"raised": describe_error(error)}))


def answer_requests(requests: int, answers: int, run: Callable[[Any], Any], snapshot: Any, files: Any) -> None:
    """Answer one request after another, until the judge closes the pipe.

    Args:
      snapshot: the result of `tamper_check.take_snapshot` from before the kernel was imported.
      files: the `file_watcher.FileWatcher` that lists the files that the kernel reads.
    """
    process = getpid()
    while True:
        try:
            request = read_request(requests)
            if request is None:
                return
            returned = run(request)
            replaced, opened = tamper_check.find_replaced(snapshot), {"opened": files.report()}
            answer = protocol.pack_answer({"returned": returned, "replaced": replaced, "files": opened})
        except BaseException as error:  # a kernel may raise anything, SystemExit and KeyboardInterrupt too
            answer = protocol.pack_answer({"raised": describe_error(error), "files": {"opened": files.report()}})
        if getpid() != process:
            _exit(1)  # this is a child that the kernel forked: only the kernel's process itself may answer
        _send(answers, answer)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain data: its type, base types and message, and the file or module that it lacks."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if _EXCEPTIONS.get(kind.__name__) is kind]
    try:
        message = str(error)
    except BaseException as broken:  # the exception's own code may raise anything
        message = f"(no message: {type(broken).__name__})"
    denied = [cause for cause in _find_causes(error) if isinstance(cause, PermissionError | ModuleNotFoundError)]
    named = (cause.filename if isinstance(cause, PermissionError) else cause.name for cause in denied)
    return {
        "type": type(error).__name__,
        "kinds": kinds,
        "message": message[:_MAX_MESSAGE],
        "told": describe_kernel_error(error),
        "causes": ["PermissionError" for cause in denied if isinstance(cause, PermissionError)],
        "missing": next((name[:_MAX_MESSAGE] for name in named if isinstance(name, str)), ""),
    }


def _find_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the chain of errors that caused it (`__cause__` or `__context__`)."""
    for _ in range(_MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _send(answers: int, answer: bytes) -> None:
    rest = memoryview(answer)
    while rest:
        rest = rest[write(answers, rest) :]


def _read_exactly(pipe: int, count: int) -> bytes:
    """Read exactly `count` bytes; return empty bytes if the pipe ends before."""
    parts, left = [], count
    while left:
        part = read(pipe, min(left, 2**20))
        if not part:
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
