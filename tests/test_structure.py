"""Imports run one way, between packages and between the rooms of one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("cases", "conformance", "impls", "reports")

# What each package may import of ours; a module name stands for that module alone.
ALLOWED = {
    "cases": {"cases"},
    "impls": {"impls", "cases", "conformance.contract", "conformance.tunable"},
    "reports": {"reports", "conformance.records", "conformance.bench.measurements"},
    "conformance": {"conformance", "cases"},
}
# Only the command line and the pytest plugin see everything.
SEE_EVERYTHING = {"conformance/commands", "conformance/pytest_plugin.py"}


def imports(path: Path) -> set[str]:
    """Modules of ours that the file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return {name for name in found if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if not any(str(path.relative_to(ROOT)).startswith(seeing) for seeing in SEE_EVERYTHING)
        for name in sorted(imports(path))
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED[package])
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["cases", "reports"])
def test_no_jax_outside_what_computes(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        assert "import jax" not in path.read_text(), path


def test_no_module_outgrows_its_room() -> None:
    long = {str(p): n for folder in PACKAGES for p in (ROOT / folder).rglob("*.py") if (n := lines(p)) > 400}
    assert long == {}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_rooms_import_what_stands_above_them() -> None:
    diagram = (ROOT / "docs" / "architecture.md").read_text().partition("## The rooms")[2].partition("## Rules")[0]
    order = re.findall(r"^ {4,6}([a-z_.]+) {2,}", diagram, re.MULTILINE)
    folder = ROOT / "conformance"
    rooms = {place.stem for place in folder.iterdir() if place.is_dir() or place.suffix == ".py"}
    without_place = {"__init__", "__main__", "__pycache__", "test_gate"}
    assert rooms - without_place == {name.partition(".")[2] for name in order if "." in name}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        if path.parent != folder or path.stem in rooms - without_place
        for name in sorted(imports(path))
        if order.index(room(name, order)) > order.index(room(dotted(path), order))
    ]
    assert wrong == []


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room(name: str, order: list[str]) -> str:
    return next(place for place in order if name == place or name.startswith(f"{place}."))
