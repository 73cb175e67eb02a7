"""Load one module of an installed package by its path, where importing the package needs much else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from unittest import mock


def load_module(package: str, path: str, stubs: Mapping[str, ModuleType | mock.Mock] | None = None) -> ModuleType:
    """Load the file `path` of a top-level package, without importing the package.

    While the file loads, `stubs` replace modules that it imports. Raises `ImportError` if package or file is missing.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed")
    file = Path(next(iter(spec.submodule_search_locations))) / path
    name = f"_{package}_{file.stem}"
    own = importlib.util.spec_from_file_location(name, file)
    if own is None or own.loader is None or not file.is_file():
        raise ImportError(f"{package} has no file {path}")
    module = importlib.util.module_from_spec(own)
    with mock.patch.dict(sys.modules, dict(stubs or {})):
        own.loader.exec_module(module)
    return module
