"""Every command and Python block of the README, the tutorial and the how-to pages does what its page says."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conformance.fork_server import command_server
from tests.docs import page_blocks
from tests.process_helpers import OWN_SERVER, run_server
from website.fences import Fence, find_fences

ROOT = Path(__file__).parent.parent.parent
GIVEN = Path(__file__).parent / "given"
_SINGLE = ("README.md", "docs/index.md", "docs/tutorial.md")
PAGES = {
    str(path.relative_to(ROOT)): list(find_fences(path.read_text(encoding="utf-8")))
    for path in (*map(ROOT.joinpath, _SINGLE), *sorted((ROOT / "docs/how-to").glob("*.md")))
}
LANGUAGES = {"python", "sh", "console", "text", "toml", "yaml", "json", "diff", ""}
_LONG_GUIDES = (
    "add-a-kernel add-a-mask compare-versions explore other-layout paged read-a-finding tpu-without-chip many-machines"
)
LONG = {*_SINGLE, *(f"docs/how-to/{name}.md" for name in _LONG_GUIDES.split())}
"""Pages that take more than ten seconds."""
ELSEWHERE = {"docs/how-to/cluster.md": "tests/judging/test_cluster.py starts its scheduler and its workers"}
"""Pages whose commands another test runs, with that test."""

CHANGE_THE_PROJECT = {
    page
    for page, fences in PAGES.items()
    if any(fence.language == "diff" or fence.text.startswith("# impls/") for fence in fences)
}
"""Pages that change this project: their blocks run in a copy of its packages."""
NOT_RUN = [(page, fence) for page, fences in PAGES.items() for fence in fences if "not-run" in fence.classes]


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Run a server, so that not every command of a page loads JAX, and return the variables by which it is used."""
    folder = {"TMPDIR": str(tmp_path_factory.mktemp("temporary"))}
    made = page_blocks.build_environment() | OWN_SERVER | folder
    with run_server(made) if command_server.is_supported() else contextlib.nullcontext():
        yield made


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.long] * (page in LONG)) for page in PAGES])
def test_the_blocks_of_a_page_run(
    page: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in ELSEWHERE:
        pytest.skip(ELSEWHERE[page])
    shutil.copytree(GIVEN, tmp_path, dirs_exist_ok=True)
    if page in CHANGE_THE_PROJECT:
        for package in ("cases", "conformance", "impls", "reports"):
            shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    try:
        for fence in PAGES[page]:
            if "not-run" in fence.classes:
                continue
            if "output" in fence.classes:
                assert printed is not None, f"{page}:{fence.line}: no Python block stands before this output"
                page_blocks.assert_shown(fence.text, printed)
                continue
            try:
                printed = page_blocks.run_block(fence, tmp_path, names, environ) or printed
            except Exception as error:
                error.add_note(f"in the block at {page}:{fence.line}")
                raise
    finally:
        for name in set(sys.modules) - before:
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]


@pytest.mark.parametrize(("page", "fence"), NOT_RUN, ids=lambda value: str(getattr(value, "line", value)))
def test_a_block_that_is_not_run_says_why(page: str, fence: Fence) -> None:
    assert fence.options.get("reason"), f"{page}:{fence.line} is not run, and gives no reason"
    pytest.skip(f"{page}:{fence.line} is not run: {fence.options['reason']}")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_kind_and_can_be_read(page: str) -> None:
    for fence in PAGES[page]:
        place = f"{page}:{fence.line}"
        assert fence.language in LANGUAGES, f"{place}: {fence.language}"
        assert fence.classes <= {"not-run", "output", "in-clone"}, f"{place}: {fence.classes}"
        assert set(fence.options) <= {"reason", "exit"}, f"{place}: {fence.options}"
        if fence.language == "python":
            ast.parse(fence.text)
        elif fence.language == "toml":
            tomllib.loads(fence.text)
        elif fence.language == "yaml":
            list(yaml.safe_load_all(fence.text))


def test_workflows_in_the_guide_fit_the_schema_of_github(tmp_path: Path) -> None:
    texts = [fence.text for fence in PAGES["docs/how-to/github-actions.md"] if fence.language == "yaml"]
    files = [tmp_path / f"{number}.yml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(f"on: push\n{text}" if text.startswith("jobs:") else text)
    assert files
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
        *map(str, files),
    ]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_output_is_compared_but_for_what_differs_between_machines() -> None:
    page_blocks.assert_shown("a 1.2341 in 3 s\n...\nz\n", "a 1.2339 in 40.1 s\nb\nc\nz\n")
    with pytest.raises(AssertionError, match="but this was printed"):
        page_blocks.assert_shown("a 1.2341\n", "a 1.25\n")
    with pytest.raises(AssertionError, match="but this was printed"):
        page_blocks.assert_shown("a\n", "a\nb\n")


def test_only_judging_gets_more_time() -> None:
    options = "--confirm-seconds=600 --diagnose-seconds=600"
    command = "python -m conformance run --impl=a.py:b"
    assert page_blocks.raise_time_limits(command) == f"{command} {options}"
    assert page_blocks.raise_time_limits(f"{command} > a.txt") == f"{command} {options} > a.txt"
    assert page_blocks.raise_time_limits("python -m conformance list checks") == "python -m conformance list checks"
    assert page_blocks.raise_time_limits(f"{command} --diagnose-seconds=0") == f"{command} --diagnose-seconds=0"


def test_a_command_with_another_exit_code_fails(tmp_path: Path) -> None:
    (fence,) = find_fences("```sh {exit=3}\nexit 3\n```\n")
    page_blocks.run_block(fence, tmp_path, {}, os.environ)
    (fence,) = find_fences("```console\n$ echo a\na\n$ exit 3\n```\n")
    with pytest.raises(AssertionError, match="exit code 3, not 0"):
        page_blocks.run_block(fence, tmp_path, {}, os.environ)
