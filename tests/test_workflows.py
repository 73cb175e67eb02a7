"""Workflows and issue forms are ones that GitHub takes, as far as can be told without it, and run what is there."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.judging import settings

_DEV = 'pip install -e ".[dev]"'
jsonschema = pytest.importorskip("jsonschema", reason=_DEV)
schemas = pytest.importorskip("check_jsonschema.builtin_schemas", reason=_DEV)
yaml = pytest.importorskip("ruamel.yaml", reason=_DEV)

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
OURS = (GITHUB / "workflows" / "ci.yml").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def yours() -> str:
    """The workflow that docs/ci.md has for users."""
    found = re.search(r"```yaml\n(name: .*?)```", (ROOT / "docs" / "ci.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def load(text: str) -> Any:
    return yaml.YAML(typ="safe", pure=True).load(text)


def valid(text: str, schema: str) -> None:
    jsonschema.Draft7Validator(schemas.get_builtin_schema(f"vendor.{schema}")).validate(load(text))


@pytest.mark.parametrize("text", [OURS, yours()], ids=["ours", "yours"])
def test_a_workflow_fits_the_schema(text: str) -> None:
    valid(text, "github-workflows")


def test_the_schema_refuses_what_is_no_workflow() -> None:
    with pytest.raises(jsonschema.ValidationError):
        valid(OURS.replace("runs-on:", "run-on:"), "github-workflows")


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_an_issue_form_fits_the_schema(path: Path) -> None:
    valid(path.read_text(), "github-issue-config" if path.stem == "config" else "github-issue-forms")


def of_row(row: dict[str, str], name: re.Match[str]) -> str:
    return row[name[1]]


def commands(text: str) -> Iterator[list[str]]:
    """What the steps run, for each row of the job's matrix."""
    for job in load(text)["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
        for row in matrix:
            for step in job["steps"]:
                run = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", functools.partial(of_row, row), step.get("run", ""))
                assert "${{" not in run
                if run:
                    yield shlex.split(run)


@pytest.mark.parametrize("text", [OURS, yours()], ids=["ours", "yours"])
def test_what_a_workflow_runs_is_there(text: str, pytestconfig: pytest.Config) -> None:
    parser = pytestconfig._parser
    known = {
        name for group in [*parser._groups, parser._anonymous] for option in group.options for name in option.names()
    }
    gate = [line.removesuffix(" & typing=$!") for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    for command in commands(text):
        if command[0] == "pytest":
            assert {word.split("=")[0] for word in command if word.startswith("-")} <= known, command
            assert all((ROOT / word).exists() for word in command if word.startswith("tests/")), command
        elif command[:4] == ["python", "-m", "pip", "install"]:
            extras = set(re.findall(r"\[(\w+)\]", " ".join(command)))
            assert extras <= set(PROJECT["project"]["optional-dependencies"]), command
        else:
            assert shlex.join(command) in gate, command


def test_groups_that_a_workflow_judges_are_ones() -> None:
    groups = {word.partition("=")[2] for command in commands(OURS) for word in command if word.startswith("--impl=")}
    assert groups
    assert groups <= set(settings.load_settings(ROOT).groups)


def test_the_workflow_asks_of_the_newest_jax_what_the_gate_asks() -> None:
    gate = (ROOT / ".ci" / "run").read_text().partition(".venv/ci312/bin/activate")[2]
    listed = re.findall(r"(tests/\w*/?test_)\{?([\w,]+)\}?\.py", gate)
    asked = {f"{start}{name}.py" for start, names in listed for name in names.split(",")}
    newest = load(OURS)["jobs"]["test"]["strategy"]["matrix"]["include"][1]["tests"].split()
    assert asked
    assert asked <= {word for word in newest if word.startswith("tests/")}
