"""Test that the pages of `docs/measurements` are what their generator writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "measurements"


def load_generator() -> ModuleType:
    """Load the script, which is in no package."""
    spec = importlib.util.spec_from_file_location("generate_measurements", ROOT / "docs" / "generate_measurements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    pages = load_generator().build_pages()
    assert isinstance(pages, dict)
    return pages


def test_pages_are_current(built: dict[str, str]) -> None:
    old = [name for name, text in built.items() if (PAGES / name).read_text(encoding="utf-8") != text]
    assert old == [], "run `python docs/generate_measurements.py`"


def test_every_page_is_generated(built: dict[str, str]) -> None:
    assert sorted(path.name for path in PAGES.glob("*.md")) == sorted(built)


def test_every_table_has_as_many_cells_as_columns(built: dict[str, str]) -> None:
    for name, text in built.items():
        for table in text.split("\n\n"):
            rows = [line.replace("\\|", "") for line in table.splitlines() if line.startswith("| ")]
            assert len({row.count("|") for row in rows}) <= 1, (name, rows[:1])
