"""Keep exact results and their bounds on disk while a server runs (`python -m conformance serve`).

A user who edits a kernel and judges it again gets the same cases, so the same expectations. Files that were written
shortly before are usually read from memory. Without a server nothing is kept: at level `quick` the expectations of one
kernel take 1.3 GB.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance import served_run
from conformance.truth import disk_cache
from conformance.truth.rounding_bounds import Expectation

_FOLDER = "expectations"
MAX_BYTES = 2**31
"""The most bytes of expectations that a server keeps. Further ones are computed each time."""


def compute_kept(asked: Any, compute: Callable[[], Expectation]) -> Expectation:
    """Return the expectation that `compute` computes, from the server's folder if it has been kept there.

    Args:
      asked: everything that the expectation depends on, except the code (`disk_cache.hash_request`). A server runs only
        one version of the code.
    """
    folder = served_run.find_folder()
    if folder is None:
        return compute()
    path = folder / _FOLDER / disk_cache.hash_request(asked)
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError), open(path, "rb") as kept:
        # Only the judge's processes write to the folder, so it is safe to unpickle.
        found: Expectation = pickle.load(kept)
        return found
    computed = compute()
    _keep(path, computed)
    return computed


def _keep(path: Path, expectation: Expectation) -> None:
    """Write an expectation atomically; if the disk is full, or enough is kept, do nothing."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        if sum(entry.stat().st_size for entry in os.scandir(path.parent)) < MAX_BYTES:
            with open(unfinished, "wb") as file:
                pickle.dump(expectation, file, protocol=5)
            unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
