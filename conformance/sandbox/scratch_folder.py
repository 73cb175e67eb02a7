"""Scratch folders: where a kernel's process may write. They end with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_PREFIX = "conformance-kernel-"


def create_scratch_folder() -> str:
    """A new folder. Those that judges left which were killed are removed."""
    remove_abandoned_folders()
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")


def remove_abandoned_folders() -> None:
    """Remove the folders of judges that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        judge = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if judge.isdecimal() and not Path(f"/proc/{judge}").exists() and Path("/proc/self").exists():
            remove_scratch_folder(str(folder))


def remove_scratch_folder(folder: str) -> None:
    """Remove a folder in which a kernel wrote what it liked."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # thousands of folders within each other
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["rm", "-rf", "--", folder], check=False, capture_output=True, timeout=60)
