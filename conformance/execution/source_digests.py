"""Find the package of a kernel and compute a digest of its source, without importing the kernel.

A run records them, so that a reader can tell which version of a kernel was judged.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import importlib.metadata
import sys
import sysconfig
import threading
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from conformance.execution import implementation_registry

_DIGITS = 12  # the number of hexadecimal digits of a digest: enough to distinguish sources
_MAX_FILE_SIZE = 2**26  # bytes; a larger file holds weights, not source
_PARSING = threading.Lock()  # one thread at a time stops the collection of garbage


def describe_source(name: str) -> tuple[str, str]:
    """Return the package and version of the implementation `name`, and a digest of source that is not installed.

    Each is "" if there is none. Modules are found on Python's search path and are not imported.
    """
    if (point := implementation_registry.find_entry_point(name)) is not None:
        dist = point.dist
        return (f"{dist.name} {dist.version}" if dist is not None else ""), compute_digest(
            _list_package_files(point.module)
        )
    if ":" not in name:
        return "", ""  # built-in: the project's own version and digest identify it
    if (module := implementation_registry.find_library_module(name)) is not None:
        return _find_installed_package(module), ""  # the adapter is this project's own
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return "", compute_digest(_find_imported_files(Path(place)))
    return _find_installed_package(place), compute_digest(_list_package_files(place))


def _find_imported_files(file: Path) -> list[Path]:
    """Return a file and, recursively, the files of its folder that it imports or names by path in its strings."""
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        if (path := waiting.pop()) in found or not _is_file(path):
            continue
        found[path] = None
        imported, texts = _find_references(path) if path.suffix == ".py" else (set(), set())
        for name in sorted(imported):
            waiting += [file.parent / f"{name}.py", *sorted((file.parent / name).rglob("*.py"))]
        waiting += [file.parent / text for text in sorted(texts)]
    return list(found)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= _MAX_FILE_SIZE
    except (OSError, ValueError):  # the string is no path
        return False


def _find_references(file: Path) -> tuple[set[str], set[str]]:
    """Return the top-level modules that a file imports, and the strings in it that may be paths relative to it."""
    try:
        nodes = list(ast.walk(parse_source(file.read_bytes())))
    except (SyntaxError, ValueError):
        return set(), set()
    modules = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    beside = {text for text in texts if text and not text.startswith(("/", "."))}
    return {module.partition(".")[0] for module in modules}, beside | {f"{text}.py" for text in beside}


def parse_source(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    """Parse source into a syntax tree, also while other threads parse.

    CPython 3.11 before 3.11.8 raises SystemError if another thread parses in the middle of it (python/cpython#106905).
    Threads change there only if garbage is collected, since JAX adds a callback to that.

    Raises:
        SyntaxError: The source is not Python.
        ValueError: The source has null bytes.
    """
    with _PARSING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(source, name)
        finally:
            if was_enabled:
                gc.enable()


@functools.cache
def _find_installed_package(module: str) -> str:
    names = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in dict.fromkeys(names))


@functools.cache
def _list_package_files(module: str) -> tuple[Path, ...]:
    """Return the files of a module's top-level package; () if it is installed, since its version identifies it."""
    top = module.partition(".")[0]
    spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    if spec is None:
        return ()
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))] or [Path(spec.origin or "")]
    libraries = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
    return () if libraries & set(files[0].resolve().parents) else tuple(files)


def compute_digest(files: Iterable[Path]) -> str:
    """Compute a digest of the names and contents of files; "" if no file can be read."""
    found = hashlib.sha256()
    count = 0
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        count += 1
        found.update(f"{file.name} {len(content)} ".encode() + content)
    return found.hexdigest()[:_DIGITS] if count else ""
