"""Make the tutorial's notebook from its page: `python -m website.notebook` writes `docs/tutorial.ipynb`.

A cell writes each file that the page shows, runs each command, or executes each Python block. The output that the page
shows is the cell's output.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from website.fences import Fence, find_fences, split_console

_ROOT = Path(__file__).parent.parent
PAGE, NOTEBOOK = _ROOT / "docs" / "tutorial.md", _ROOT / "docs" / "tutorial.ipynb"
_FILE_NAME = re.compile(r"# ([\w./-]+)\n")


def build_notebook(page: str) -> dict[str, Any]:
    """Return the notebook of a page, in Jupyter's format 4.5.

    Args:
      page: the page's Markdown text, whose links are relative to `docs`.
    """
    cells: list[dict[str, Any]] = []
    end = 0
    for fence in find_fences(page):
        _add_prose(cells, page[end : fence.start])
        end = fence.end
        if "output" in fence.classes:
            cells[-1]["outputs"] = [_format_output(fence.text)]
        else:
            cells += _build_cells(fence)
    _add_prose(cells, page[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def serialize_notebook(notebook: dict[str, Any]) -> str:
    """Serialize a notebook as Jupyter writes it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _add_prose(cells: list[dict[str, Any]], text: str) -> None:
    # The link to the notebook itself is of no use in it.
    text = re.sub(r"^\[[^\]]*\]\(tutorial\.ipynb\)\.\n", "", text, flags=re.MULTILINE).strip()
    if text:
        cells.append({"cell_type": "markdown", "metadata": {}, "source": text})


def _build_cells(fence: Fence) -> list[dict[str, Any]]:
    name = _FILE_NAME.match(fence.text)
    if "not-run" in fence.classes or fence.language not in ("python", "yaml", "sh", "console"):
        return [{"cell_type": "markdown", "metadata": {}, "source": f"```{fence.language}\n{fence.text.rstrip()}\n```"}]
    if fence.language == "console":
        return [_build_code_cell(f"!{command}", shown) for command, shown in split_console(fence.text)]
    if fence.language == "sh":
        return [_build_code_cell(f"%%bash\n{fence.text.rstrip()}")]
    if name:
        # A cell cannot make the folder of a file, and only a file of the current folder is needed later.
        folder = f"!mkdir -p {Path(name[1]).parent}\n" if "/" in name[1] else ""
        cells = [_build_code_cell(folder.rstrip())] if folder else []
        return [*cells, _build_code_cell(f"%%writefile {name[1]}\n{fence.text.rstrip()}")]
    return [_build_code_cell(fence.text.rstrip())]


def _build_code_cell(source: str, shown: str = "") -> dict[str, Any]:
    outputs = [_format_output(shown)] if shown.strip() else []
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": source}


def _format_output(text: str) -> dict[str, Any]:
    return {"name": "stdout", "output_type": "stream", "text": text}


if __name__ == "__main__":
    NOTEBOOK.write_text(serialize_notebook(build_notebook(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
