"""Test that the descriptions of libraries, their adapters, their known failures and the reports on them agree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from conformance.execution import implementation_registry
from conformance.survey.upstream_findings import parse_finding
from impls import catalogue
from impls.libraries import library_specs
from impls.libraries.library_specs import FOLDER, InvalidLibrary, Library, parse_library
from tests.survey.finding_scripts import read_python

LIBRARIES = library_specs.load_libraries()
UPSTREAM = Path(__file__).resolve().parents[2] / "docs" / "upstream"
REPORTS = sorted(path for path in UPSTREAM.glob("*.md") if path.stem != "index")
KNOWN = sorted((FOLDER / "expected_failures").glob("*.toml"))
MAX_LINES = 25


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=lambda library: library.name)
def test_a_library_and_its_adapters_agree(library: Library) -> None:
    versions = [Version(version) for version in library.versions]
    assert versions == sorted(versions, reverse=True), "the newest comes first"
    for version in library.versions:
        described = library.build_environment(version)
        needs = [Requirement(text) for text in (*described.requirements, *described.without_dependencies)]
        assert any(one.name == Requirement(library.package).name for one in needs)
    module = FOLDER / f"{library.name}.py"
    defined = set()
    for node in ast.parse(module.read_text()).body if module.is_file() else ():
        if isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
    assert set(library.functions.values()) <= defined
    assert set(library.implementations) <= set(catalogue.MODULES)
    assert library.implementation_names


def test_no_two_functions_have_one_name() -> None:
    names = implementation_registry.list_library_functions()
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"pakage": '"x"'}, "pakage"),
        ({"package": None}, "package"),
        ({"versions": "[]"}, "lists no version"),
        ({"resolved": '"soon"'}, "resolved"),
        ({"version": '{"9.9" = {python = "3.12"}}'}, "9.9"),
        ({"version": '{"1.0" = {pyton = "3.12"}}'}, "pyton"),
    ],
    ids=["unknown", "missing", "no-version", "no-date", "unlisted-version", "unknown-in-version"],
)
def test_a_wrong_description_is_an_error_that_names_the_key(
    tmp_path: Path, change: dict[str, str | None], about: str
) -> None:
    fields: dict[str, str | None] = {
        "package": '"x"',
        "imports": '"x"',
        "documentation": '"https://example.org"',
        "python": '"3.12"',
        "resolved": "2026-01-01",
        "versions": '["1.0"]',
    }
    text = "\n".join(f"{key} = {value}" for key, value in (fields | change).items() if value is not None)
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(InvalidLibrary, match=re.escape(about)):
        parse_library(tmp_path / "x.toml")


def test_a_version_may_need_another_environment(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(
        'package = "x"\nimports = "x"\ndocumentation = ""\npython = "3.12"\nresolved = 2026-01-01\n'
        'versions = ["2.0", "1.0"]\nrequirements = ["jax==0.12.0.1"]\n'
        '[version."1.0"]\npython = "3.11"\nrequirements = ["jax==0.10.2"]\nwithout_dependencies = ["x", "y==3"]\n'
    )
    library = parse_library(tmp_path / "x.toml")
    assert library.build_environment("2.0").requirements == ("x==2.0", "jax==0.12.0.1")
    old = library.build_environment("1.0")
    assert (old.python, old.requirements, old.without_dependencies) == ("3.11", ("jax==0.10.2",), ("x==1.0", "y==3"))


def list_findings() -> dict[str, set[str]]:
    """Return the names of findings that known failures name, by library."""
    found: dict[str, set[str]] = {}
    for path in KNOWN:
        entries = tomllib.loads(path.read_text())["expected_failures"]
        found[path.stem] = {entry["finding"] for entry in entries if "finding" in entry}
    return found


def test_each_finding_has_a_report_and_each_report_a_known_failure() -> None:
    named = set().union(*list_findings().values())
    found = [parse_finding(path) for path in REPORTS]
    assert named == {one.name for one in found if not one.not_judged}


def read_script(path: Path) -> str:
    """Return the Python script that shows a fault: from `findings`, or from the page of a fault of a GPU."""
    text = path.read_text(encoding="utf-8")
    if parse_finding(path).platform != "cpu":
        (script,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        return str(script)
    assert f"`findings/{path.stem}.sh`" in text
    assert "```python" not in text
    return read_python(UPSTREAM.parents[1] / "findings" / f"{path.stem}.sh")


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_has_a_short_script_and_the_versions_it_was_seen_in(path: Path) -> None:
    finding, script = parse_finding(path), read_script(path)
    assert finding.versions
    assert finding.library in LIBRARIES
    assert len(script.strip().splitlines()) <= MAX_LINES
    assert "conformance" not in script
    compile(script, str(path), "exec")
    assert "\n## Upstream\n" in path.read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.parametrize("path", [x for x in REPORTS if parse_finding(x).platform != "cpu"], ids=lambda path: path.stem)
def test_the_script_of_a_report_on_an_accelerator_still_shows_the_fault(path: Path, tmp_path: Path) -> None:
    platform = parse_finding(path).platform
    if jax.default_backend() != platform:
        pytest.skip(f"the fault shows on a {platform} alone")
    command = [sys.executable, "-c", read_script(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 1, f"{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
