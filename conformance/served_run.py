"""Find the folder of the server that a command runs in, if it runs in one (`python -m conformance serve`).

Environment variables carry this from the process of a command to its workers. A kernel's process does not get them.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

FOLDER_VARIABLE = "CONFORMANCE_SERVED"
"""Names the variable with the folder in which the server keeps data for the next command."""
START_VARIABLE = "CONFORMANCE_RUN_START"
"""Names the variable with the time at which the command began, in seconds since the epoch."""

_IMPORT_TIME = time.time()  # processes that the fork server forks inherit this from it


def find_folder() -> Path | None:
    """Return the folder in which the server keeps data; None for a command that runs in no server.

    None also after the end of the server, which removes the folder. Another user may then create one of the same name.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    with contextlib.suppress(OSError):
        if named and os.lstat(named).st_uid == os.getuid():
            return Path(named)
    return None


def get_run_start() -> float:
    """Return when the command began, in seconds since the epoch. Workers of a command get the same number."""
    try:
        return float(os.environ[START_VARIABLE])
    except (KeyError, ValueError):
        return _IMPORT_TIME
