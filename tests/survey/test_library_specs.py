"""Test that the descriptions of libraries, their adapters, their known failures and the reports on them agree."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from conformance.execution import implementation_registry
from conformance.survey import environments
from conformance.survey.upstream_findings import parse_finding
from impls import catalogue
from impls.libraries import library_specs
from impls.libraries.library_specs import FOLDER, InvalidLibrary, Library, parse_library

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


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_has_a_short_script_its_output_and_the_versions_it_was_seen_in(path: Path) -> None:
    finding = parse_finding(path)
    assert finding.versions
    assert finding.library in LIBRARIES
    assert len(finding.script.strip().splitlines()) <= MAX_LINES
    assert "sys.exit(" in finding.script
    assert "conformance" not in finding.script
    compile(finding.script, str(path), "exec")
    text = path.read_text(encoding="utf-8")
    assert "```text\n" in text
    assert "\n## Upstream\n" in text


@pytest.mark.nightly
@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_script_of_a_report_still_shows_the_fault(path: Path, tmp_path: Path) -> None:
    finding = parse_finding(path)
    if finding.platform != "cpu" and jax.default_backend() != finding.platform:
        pytest.skip(f"the fault shows on a {finding.platform} alone")
    described = LIBRARIES[finding.library].build_environment(finding.versions[0])
    made = environments.create_environment(described, tmp_path / "environment")
    done = subprocess.run(
        [str(made.python), "-c", finding.script], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1, f"the fault does not show in {finding.versions[0]}:\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("page", "about"),
    [
        ("# A title\n", "---"),
        ("---\nlibrary: x\n---\n# A title\n", "versions"),
        ('---\nlibrary: x\nversions: ["1"]\n---\n', "title"),
        ('---\nlibrary: x\nversions: ["1"]\n---\n# A title\n', "script"),
    ],
    ids=["front", "versions", "title", "script"],
)
def test_a_report_that_lacks_a_part_is_an_error_that_names_it(tmp_path: Path, page: str, about: str) -> None:
    (tmp_path / "x.md").write_text(page)
    with pytest.raises(ValueError, match=about):
        parse_finding(tmp_path / "x.md")
