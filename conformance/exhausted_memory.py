"""Recognize that an error means that the process gets no more memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator

_LOADER_WORDS = ("failed to map segment", "cannot allocate memory")
"""Messages of the loader of shared libraries, whose errors have no number."""


def describe_exhausted_memory(error: BaseException) -> str:
    """Return a sentence that memory ran out if an error, or one that it came from, says so; empty if none does."""
    for one in reversed(list(_iter_causes(error))):  # the innermost says it in the fewest words
        text = str(one)
        is_of_loader = isinstance(one, ImportError) and any(words in text.lower() for words in _LOADER_WORDS)
        if isinstance(one, MemoryError) or is_of_loader or getattr(one, "errno", None) == errno.ENOMEM:
            line = f"{type(one).__name__}: {text}" if text else type(one).__name__
            return f"memory ran out ({line}): end other programs, or raise the limit (see `ulimit -v`)"
    return ""


def _iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it came from, the innermost last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
