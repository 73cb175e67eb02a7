"""The tutorial's notebook is made from its page, and does what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.docs.page_blocks import build_environment, normalize, raise_time_limits
from website import notebook


def test_the_notebook_is_that_of_the_page() -> None:
    built = notebook.serialize_notebook(notebook.build_notebook(notebook.PAGE.read_text(encoding="utf-8")))
    assert notebook.NOTEBOOK.read_text(encoding="utf-8") == built, "run python -m website.notebook"


def test_the_notebook_is_valid() -> None:
    nbformat.validate(nbformat.read(notebook.NOTEBOOK, as_version=4))


# The tests of pages run the same blocks, and this one as Jupyter does.
@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    shown = nbformat.read(notebook.NOTEBOOK, as_version=4)
    executed = nbformat.read(notebook.NOTEBOOK, as_version=4)
    for cell in executed.cells:
        if cell.source.startswith("!"):
            cell.source = f"!{raise_time_limits(cell.source[1:])}"
    client = nbclient.NotebookClient(executed, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=build_environment())
    for page_cell, cell in zip(shown.cells, executed.cells, strict=True):
        if page_cell.cell_type == "code" and page_cell.outputs:
            printed = strip_terminal_codes("".join(output.get("text", "") for output in cell.outputs))
            # A command's standard error is among its output here, so lines may stand between those that are shown.
            lines = iter(normalize(printed).splitlines())
            wanted = [line for line in normalize(page_cell.outputs[0].text).splitlines() if line != "..."]
            missing = [line for line in wanted if line not in lines]
            assert missing == [], printed


def strip_terminal_codes(text: str) -> str:
    """Remove colours and movements of the cursor: a notebook runs commands in a terminal, which shows progress."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
