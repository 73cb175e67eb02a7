"""Load copies of modules that a kernel cannot reach by name.

A kernel shares its process with the code that answers the judge's requests. It can replace `os.write`, or any function
of a module that it imports. A private copy of a module is not in `sys.modules`, and has its own dictionary of built-in
functions. So a kernel that replaces names in other modules does not change the copy.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
from types import ModuleType


def load_private_copy(name: str) -> ModuleType:
    """Execute the source of a module again, in its own namespace. Raises `ImportError` if no module has the name."""
    importlib.import_module(name)  # needed by dataclasses, which look up the module of a class by its name
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module named {name!r}")
    module = importlib.util.module_from_spec(spec)
    vars(module)["__builtins__"] = dict(vars(builtins))
    spec.loader.exec_module(module)
    return module
