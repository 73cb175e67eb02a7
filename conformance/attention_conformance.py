"""The public names of `conformance` under a name that no repository has, and the entry point of the pytest plugin.

An installation has this file at the top level. A user's repository may have a package `conformance` of its own, which
Python finds first. `import attention_conformance` finds ours all the same, and pytest leaves the name to the
repository until ours is asked for.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__path__: list[str] = []  # `attention_conformance.testing` is a module too: `conformance.testing`


def _find_home() -> str:
    """Return the folder that our package `conformance` is installed in."""
    for folder in (os.path.dirname(os.path.abspath(__file__)), *map(os.path.abspath, sys.path)):
        if os.path.isfile(os.path.join(folder, "conformance", "pytest_plugin.py")):
            return folder
    raise ImportError("the package `conformance` of attention-conformance is not installed")


def _load_module(name: str) -> ModuleType:
    """Import a module of our package, whatever else is called `conformance` here."""
    loaded, home = sys.modules.get("conformance"), _find_home()
    if loaded is not None and os.path.abspath(os.path.dirname(loaded.__file__ or "")) != os.path.join(
        home, "conformance"
    ):
        raise ImportError(
            f"'conformance' is {loaded.__file__ or 'another module'} in this process, and attention-conformance has a "
            "package of that name: rename yours, or import attention_conformance first"
        )
    sys.path.insert(0, home)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(home)


def __getattr__(name: str) -> Any:
    if name.startswith(("_", "pytest")):  # what Python and pytest look for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_load_module("conformance"), name)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugin, and leave the name `conformance` to the repository."""
    if not pluginmanager.hasplugin("conformance.pytest_plugin"):
        pluginmanager.register(_load_module("conformance.pytest_plugin"), "conformance.pytest_plugin")
        _load_module("conformance.packages").release_own_name()


class _Submodules(MetaPathFinder, Loader):
    """Find `attention_conformance.testing` and others: they are the modules of `conformance`."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        """Put our module in the place of the new one."""
        sys.modules[module.__name__] = _load_module(f"conformance.{module.__name__.partition('.')[2]}")


sys.meta_path.append(_Submodules())
