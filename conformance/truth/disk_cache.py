"""Cache numbers on disk that depend only on a case and the declarations, such as the ratio with which zeros fail it.

Every kernel with the same declarations, and every later run on this machine, reuses these numbers. An entry is named by
a hash of everything that it was computed from: the operands to the last bit, the declarations, the code of this
project, and the version of NumPy. So an entry that other code computed is never found.

Exact results and their bounds are not cached. Computing them runs at 160 MB a second, about as fast as reading a disk.
For one kernel at level `quick` they take 1.3 GB.

The environment variable `CONFORMANCE_CACHE` names another folder for the cache. If it is the empty string, nothing is
cached.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

import cases

CACHE_VARIABLE = "CONFORMANCE_CACHE"
# Most entries that the cache holds, of 4 kB each. Each process removes the oldest entries beyond this number once,
# before it writes its first entry.
_MAX_ENTRIES = 50_000

_IS_ENABLED = contextvars.ContextVar("keeps", default=True)


@contextlib.contextmanager
def disable_cache() -> Iterator[None]:
    """Turn the cache off within this context, for cases that will not occur again."""
    token = _IS_ENABLED.set(False)
    try:
        yield
    finally:
        _IS_ENABLED.reset(token)


def compute_cached(asked: Any, make: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Return the numbers that `make` computes, from the cache if it has them.

    `asked` is everything that the numbers depend on, except the code. Raises `TypeError` if `asked` holds anything but
    dataclasses, arrays, mappings, sequences and scalars, since the value of other objects cannot be hashed.
    """
    home = find_cache_folder()
    if home is None:
        return dict(make())
    name = hash_request((_hash_code(), asked))
    path = home / f"{name}.json"
    if (found := _read_entry(path, name)) is not None:
        return found
    made = {key: float(x) for key, x in make().items()}
    _write_entry(path, {"name": name, "numbers": made})
    return made


def find_cache_folder() -> Path | None:
    """Return the folder of the cache, or None if caching is off."""
    if not _IS_ENABLED.get():
        return None
    named = os.environ.get(CACHE_VARIABLE)
    if named is None:
        return Path(platformdirs.user_cache_dir("attention-conformance"))
    return Path(named) if named else None


def _read_entry(path: Path, name: str) -> dict[str, float] | None:
    """Read an entry; None if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        entry = json.loads(path.read_text())
        if entry["name"] == name:
            return {key: float(x) for key, x in entry["numbers"].items()}
    return None


def _write_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Write an entry atomically; a full or read-only disk is ignored, since the cache only saves time."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_oldest(path.parent)
        unfinished.write_text(json.dumps(entry))
        unfinished.replace(path)


@functools.cache
def _remove_oldest(folder: Path) -> None:
    """Remove the oldest entries beyond `_MAX_ENTRIES`, once in a process."""
    with contextlib.suppress(OSError):  # another process may be doing the same
        newest = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in newest[_MAX_ENTRIES:]:
            entry.unlink(missing_ok=True)


@functools.cache
def _hash_code() -> str:
    """Hash the code that computes cached numbers: the sources of `cases` and `conformance`, and NumPy's version."""
    found = hashlib.blake2b(np.__version__.encode(), digest_size=16)
    for package in (Path(cases.__path__[0]), Path(__file__).parents[1]):
        for source in sorted(package.rglob("*.py")):
            found.update(source.read_bytes())
    return found.hexdigest()


def hash_request(asked: Any) -> str:
    """Hash the content of dataclasses, arrays, mappings, sequences and scalars. Raises `TypeError` for other types."""
    found = hashlib.blake2b(digest_size=16)
    _hash_value(found, asked)
    return found.hexdigest()


def _hash_value(found: hashlib.blake2b, value: Any) -> None:
    """Feed a value to the hash, after its type and size to tell values apart. Raises `TypeError` for unknown types."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        _hash_header(found, type(value).__qualname__, len(names))
        for name in names:
            _hash_value(found, getattr(value, name))
    elif isinstance(value, np.ndarray):
        _hash_header(found, f"{value.dtype} {value.shape}", value.nbytes)
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        _hash_value(found, tuple(value.items()))
    elif isinstance(value, tuple | list):
        _hash_header(found, "sequence", len(value))
        for item in value:
            _hash_value(found, item)
    elif value is None or isinstance(value, bool | int | float | str | np.generic):
        written = f"{type(value).__name__} {value!r}"
        _hash_header(found, written, len(written))
    else:
        raise TypeError(f"a value of type {type(value).__name__} cannot be hashed for the cache")


def _hash_header(found: hashlib.blake2b, kind: str, size: int) -> None:
    """Feed the type and the size of a value to the hash."""
    found.update(f"{kind} {size};".encode())
