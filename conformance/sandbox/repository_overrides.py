"""Whether what judges is what it was: no function of it has come from the folder of the kernel's own repository.

The gate runs in pytest's process, and so does a `conftest.py`. What that puts in the place of a function of this
project, of NumPy or of JAX decides about verdicts, and often nobody meant it to: a wrapper that logs, a stub that
another test needs. What is replaced by name is found; what is changed further inside is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_LIBRARIES = ("jax", "jax.lax", "jax.numpy", "json", "numpy")
_OURS = ("cases", "conformance", "impls", "reports")
_OUR_FOLDER = Path(__file__).parents[2]
_MAX_WRAPPERS = 3  # wrappers that are looked through


def find_overrides(root: Path) -> list[str]:
    """What functions and modules are called that judging uses and that a file under `root` has put there."""
    return sorted(called for called, file in _list_definitions() if _belongs_to_repository(root, file))


def _belongs_to_repository(root: Path, file: str | None) -> bool:
    """Whether a file is the repository's own: neither ours nor installed in an environment within it."""
    if not file:
        return False
    path = Path(file)
    ours = path.is_relative_to(_OUR_FOLDER) and path.relative_to(_OUR_FOLDER).parts[0] in _OURS
    return path.is_relative_to(root) and not ours and "site-packages" not in path.parts


def _list_definitions() -> Iterator[tuple[str, str | None]]:
    for name, module in list(sys.modules.items()):
        if not (name in _LIBRARIES or name.partition(".")[0] in _OURS) or not isinstance(module, ModuleType):
            continue
        yield name, getattr(module, "__file__", None)
        for inner, value in list(vars(module).items()):
            yield f"{name}.{inner}", _find_source_file(value)
            if isinstance(value, type) and value.__module__ == name:
                for method, function in list(vars(value).items()):
                    yield f"{name}.{inner}.{method}", _find_source_file(function)


def _find_source_file(value: Any) -> str | None:
    """The file that a function was written in, behind what wraps it; of a class or an object, that of a method."""
    for _ in range(_MAX_WRAPPERS):
        if isinstance(value, FunctionType):
            return value.__code__.co_filename
        inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None)
        if not callable(inner):
            break
        value = inner
    if isinstance(value, ModuleType) or not callable(value):
        return None
    kind = value if isinstance(value, type) else type(value)
    # By its methods: more than one file may be called `conftest`, and the name of a module says which is the last.
    written = (method.__code__.co_filename for method in vars(kind).values() if isinstance(method, FunctionType))
    return next((file for file in written if not file.startswith("<")), None)
