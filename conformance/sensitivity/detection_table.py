"""Load the detection table: which checks see each planted bug, and the smallest errors that checks see.

`python -m tests.bank --save`, in a clone of this project, measures the table and writes it to `detection_table.json`.
Reports show it, so that a reader knows what a pass means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = "attention-conformance/detection/1"
FILE = Path(__file__).with_name("detection_table.json")


def load_table(path: Path = FILE) -> dict[str, Any] | None:
    """Load the detection table; None if the file does not exist. Raises `ValueError` if the file has another schema."""
    if not path.is_file():
        return None
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {table.get('schema')!r}, must be {SCHEMA!r}")
    return table
