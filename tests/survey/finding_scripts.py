"""Read the scripts of `findings`."""

from __future__ import annotations

import re
from pathlib import Path


def read_python(script: Path) -> str:
    """Return the Python of a script."""
    (python,) = re.findall(r"<<'PYTHON'\n(.*?)^PYTHON$", script.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return str(python)
