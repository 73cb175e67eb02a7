"""Rebuild an exception that a kernel raised in its process, in the judge."""

from __future__ import annotations

import builtins
import contextlib
from typing import Any


def rebuild_exception(name: str, kinds: list[Any], message: str) -> Exception:
    """Return an exception with the same name and built-in base type as the kernel's, without code of the kernel.

    Args:
      name: the name of the exception's type.
      kinds: the names of the type's built-in base types, most specific first.
      message: the exception's message.
    """
    known = (vars(builtins).get(kind) for kind in kinds if isinstance(kind, str))
    bases = [kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception)]
    for base in (*bases, RuntimeError):
        kind = base if base.__name__ == name else type(name[:80] if name.isidentifier() else "KernelError", (base,), {})
        with contextlib.suppress(TypeError):  # some exception types need more arguments than a message
            return kind(message)
    raise AssertionError("RuntimeError takes a message")
