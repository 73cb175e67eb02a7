"""Find functions and modules of the judge that the kernel's repository has replaced.

The gate runs in pytest's process, and so does a `conftest.py` of the repository. If the `conftest.py` replaces a
function of this project, of NumPy or of JAX, verdicts depend on the replacement. Often this is an accident: a wrapper
that logs, or a stub that another test needs. Replaced names are found; changes inside objects are not.
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
_MAX_WRAPPERS = 3  # the most nested wrappers (methods, properties, partial functions) behind which a function is sought


def find_overrides(root: Path) -> list[str]:
    """Return the names of functions and modules of the judge that are defined in a file below `root`, sorted."""
    return sorted(called for called, file in _list_definitions() if _belongs_to_repository(root, file))


def _belongs_to_repository(root: Path, file: str | None) -> bool:
    """Tell whether a file lies below `root` and belongs neither to this project nor to an installed package."""
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
    """Return the file that defines a function, looking behind its wrappers; None if there is none.

    For a class or another callable object, it is the file of the first method that has one.
    """
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
    # The module of a class does not identify its file: several files may be called `conftest`, and `sys.modules` has
    # only the last of them. So use the files of its methods.
    written = (method.__code__.co_filename for method in vars(kind).values() if isinstance(method, FunctionType))
    return next((file for file in written if not file.startswith("<")), None)
