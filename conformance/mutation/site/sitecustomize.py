"""Python imports this when it starts, in every process of a suite that `mutants` runs; it replaces the function.

The folder is put in front of the path for that, so the `sitecustomize` that it hides is run as well.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from typing import Any


class _Replacing(importlib.abc.MetaPathFinder):
    """Finds the module of the function as Python would, and replaces the function after the module has run."""

    def __init__(self, module: str, settings: dict[str, Any]) -> None:
        self.module, self.settings = module, settings

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the module's own spec, with a loader that replaces the function."""
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run, settings = spec.loader.exec_module, self.settings

        def exec_module(module: Any) -> None:
            run(module)
            from conformance.mutation.substitution import replace_function

            replace_function(module, settings)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign] # of this object alone
        return spec


if "CONFORMANCE_MUTANTS" in os.environ:
    with open(os.environ["CONFORMANCE_MUTANTS"], encoding="utf-8") as _file:
        _settings = json.load(_file)
    _module = _settings["replace"].partition(":")[0]
    if _module in sys.modules:  # a part of JAX, in the fork of a process that has loaded it
        from conformance.mutation.substitution import replace_function

        replace_function(sys.modules[_module], _settings)
    else:
        sys.meta_path.insert(0, _Replacing(_module, _settings))

_here = os.path.dirname(os.path.abspath(__file__))
_hidden = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [one for one in sys.path if os.path.abspath(one) != _here]
)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
