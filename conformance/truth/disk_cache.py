"""What a case alone decides, kept on disk: by how much wrong results would fail it.

Nothing of an implementation but what it declares enters these numbers. So every kernel of the same declarations, and
every later run on this machine, can have them from the first who asked. An entry is named after all that it was
computed from: the operands to the last bit, the declarations, and the code of this project and of NumPy. What other
code has computed is never found.

Exact results and their bounds are not kept. They are computed at 160 MB a second, about as fast as a disk reads them,
and those of one kernel at `quick` are 1.3 GB.

`CONFORMANCE_CACHE` names another folder, or nothing at all: `CONFORMANCE_CACHE=` keeps nothing.
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
import conformance

CACHE_VARIABLE = "CONFORMANCE_CACHE"
# The folder is brought back to so many entries, of 4 kB each, by whoever first adds to it: the oldest go.
_MAX_ENTRIES = 50_000

_IS_ENABLED = contextvars.ContextVar("keeps", default=True)


@contextlib.contextmanager
def disable_cache() -> Iterator[None]:
    """Within it nothing is kept or looked up: for cases that nobody will ask about again."""
    token = _IS_ENABLED.set(False)
    try:
        yield
    finally:
        _IS_ENABLED.reset(token)


def compute_cached(asked: Any, make: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """What `make` gives, in its order, if nobody has computed it before from what is `asked`.

    Raises:
      TypeError: if something that is asked cannot be told from others of its kind.
    """
    home = find_cache_folder()
    if home is None:
        return dict(make())
    name = _hash_request((_hash_code(), asked))
    path = home / f"{name}.json"
    if (found := _read_entry(path, name)) is not None:
        return found
    made = {key: float(x) for key, x in make().items()}
    _write_entry(path, {"name": name, "numbers": made})
    return made


def find_cache_folder() -> Path | None:
    """The folder in which this project keeps what it has computed, or None: then it keeps nothing."""
    if not _IS_ENABLED.get():
        return None
    named = os.environ.get(CACHE_VARIABLE)
    if named is None:
        return Path(platformdirs.user_cache_dir("attention-conformance"))
    return Path(named) if named else None


def _read_entry(path: Path, name: str) -> dict[str, float] | None:
    """None if there is none, or none that can be read: then it is computed anew."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        entry = json.loads(path.read_text())
        if entry["name"] == name:
            return {key: float(x) for key, x in entry["numbers"].items()}
    return None


def _write_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Whole or not at all; a disk that is full or read-only costs time, and nothing else."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_oldest(path.parent)
        unfinished.write_text(json.dumps(entry))
        unfinished.replace(path)


@functools.cache
def _remove_oldest(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process may be doing the same
        newest = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in newest[_MAX_ENTRIES:]:
            entry.unlink(missing_ok=True)


@functools.cache
def _hash_code() -> str:
    """The code that computes: of cases, of this package, and of NumPy."""
    found = hashlib.blake2b(np.__version__.encode(), digest_size=16)
    for package in (cases, conformance):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            found.update(source.read_bytes())
    return found.hexdigest()


def _hash_request(asked: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    _hash_value(found, asked)
    return found.hexdigest()


def _hash_value(found: hashlib.blake2b, value: Any) -> None:
    """Each kind of value with its name and its size, so that no two things that differ are written the same."""
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
        raise TypeError(f"what is kept must be known to the last bit, and {type(value).__name__} is not")


def _hash_header(found: hashlib.blake2b, kind: str, size: int) -> None:
    found.update(f"{kind} {size};".encode())
