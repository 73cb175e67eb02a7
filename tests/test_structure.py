"""Imports run one way, between packages and between the rooms of one."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("cases", "conformance", "impls", "reports")

# What each package may import of ours; a module name stands for that module alone.
ALLOWED = {
    "cases": {"cases"},
    "impls": {"impls", "cases", "conformance.contract", "conformance.tunable"},
    "reports": {
        "reports",
        "cases.operand_registry",
        "cases.storage_forms.form_registry",
        "conformance.records",
        "conformance.output_files",
        "conformance.error_maps",
        "conformance.measurements",
    },
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


# Loads nothing but `packages` until somebody asks for a public name; for type checkers it imports all of them.
PUBLIC_FACE = "__init__"
# The rooms of `conformance`, from the ground up: a room may import what stands on a lower floor, and nothing else.
FLOORS = (
    {"output_files", "packages", "error_maps", "environment", "interrupts", "program_cache"},
    {"tunable", "record_schema"},
    {"records", "accelerators", "fork_server"},
    {"runs"},
    {"contract"},
    {"truth", "calling"},
    {"reference"},
    {"bench", "driving"},
    {"sandbox"},
    {PUBLIC_FACE, "asking"},
    {"checks"},
    {"judging"},
    {"sensitivity", "test_gate"},
    {"commands"},
    {"pytest_plugin"},
    {"cli"},
    {"__main__"},
)


def room(path: Path) -> str:
    """The room of `conformance` that the file is in."""
    return path.relative_to(ROOT / "conformance").parts[0].removesuffix(".py")


def test_the_rooms_of_conformance_stand_on_their_floors() -> None:
    floor_of = {name: number for number, names in enumerate(FLOORS) for name in names}
    files = sorted((ROOT / "conformance").rglob("*.py"))
    assert {room(path) for path in files} == set(floor_of)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imports(path))
        if name.startswith("conformance.") and room(path) != (imported := name.split(".")[1])
        if floor_of[imported] >= floor_of[room(path)]
    ]
    assert wrong == []


def test_the_architecture_page_draws_the_rooms_from_the_ground_up() -> None:
    floor_of = {name: number for number, names in enumerate(FLOORS) for name in names}
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.findall(r"^ {4}conformance\.(\w+) {2,}", page, re.MULTILINE)
    assert sorted(drawn) == sorted(set(floor_of) - {"__main__", PUBLIC_FACE})
    assert [floor_of[name] for name in drawn] == sorted(floor_of[name] for name in drawn)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_in_a_circle(package: str) -> None:
    arrows = {module: set[str]() for module in modules(package)}
    for module, path in modules(package).items():
        for name in imports(path):
            imported = name if name in arrows else name.rpartition(".")[0]
            if imported in arrows and imported != module:
                arrows[module].add(imported)
    graphlib.TopologicalSorter(arrows).prepare()  # raises `CycleError`, which names the circle


def modules(package: str) -> dict[str, Path]:
    """The modules of a package by name; a package itself is its `__init__`."""
    found = sorted((ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in found}


def test_help_loads_no_jax() -> None:
    asked = "import sys, conformance.cli as cli; cli.parser().format_help(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("package", ["cases", "reports"])
def test_no_jax_outside_what_computes(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        assert "import jax" not in path.read_text(), path
