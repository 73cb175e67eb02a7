"""The plugin leaves the option `--impl` and the package name `conformance` to repositories that have them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.gate.gate_repository import FEW_CASES, NO_PROBES, Repository, create_repository
from tests.process_helpers import COMMAND_TIMEOUT

ROOT = Path(__file__).parent.parent.parent
OPTIONS = """
def pytest_addoption(parser):
    parser.addoption("--impl", default="fast", choices=("fast", "slow"))
    parser.addoption("--require-platform", action="store_true")
"""
TEST = """
def test_option(request):
    assert request.config.getoption("--impl") == "slow"
    assert request.config.option.impl == "slow"
    assert request.config.getoption("--require-platform")
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return create_repository(tmp_path, monkeypatch)


@pytest.mark.parametrize("place", ["conftest.py", "tests/conftest.py", "below/tests/conftest.py", "plugin.py"])
def test_options_of_a_repository_keep_their_names(place: str, repository: Repository) -> None:
    file = repository.path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(OPTIONS)
    (file.parent / "test_mine.py").write_text(TEST)
    words = ["-p", "plugin"] if place == "plugin.py" else []
    result = repository.pytest(*words, "--impl=slow", "--require-platform", str(file.parent), from_nothing=True)
    assert result.ret == 0, [*result.stdout.lines, *result.errlines]
    if not words:  # a `conftest.py` that pytest imports as it collects
        assert repository.pytest("--collect-only", from_nothing=True).ret == 0


def test_the_gate_judges_where_its_short_options_are_taken(repository: Repository) -> None:
    (repository.path / "conftest.py").write_text(OPTIONS)
    words = ("--pyargs", "conformance", "--conformance-impl=kernel.py:attention", FEW_CASES, *NO_PROBES)
    result = repository.pytest(*words, "-k=T1 and forward", "--impl=slow", from_nothing=True)
    assert result.ret == 0, [*result.stdout.lines, *result.errlines]
    wrong = repository.pytest(*words, "--conformance-impl", "kernel.py:wrong", "-k=T1 and forward", from_nothing=True)
    assert wrong.ret == 1
    assert "kernel.py:attention" in wrong.stdout.str()
    assert "kernel.py:wrong" in wrong.stdout.str()


def test_a_short_option_may_have_its_value_apart(repository: Repository) -> None:
    words = ("--pyargs", "conformance", "--impl", "kernel.py:wrong", FEW_CASES, *NO_PROBES, "-k=T1 and forward")
    result = repository.pytest(*words, from_nothing=True)
    assert result.ret == 1
    assert "kernel.py:wrong" in result.stdout.str()


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """Create a repository with two packages `conformance`, and what an installation has at its top level."""
    for package in ("conformance", "tests/conformance"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("NAME = 'theirs'\n")
    (tmp_path / "conformance" / "helpers.py").write_text("NAME = 'helper'\n")
    (tmp_path / "test_root.py").write_text(
        "import conformance\nfrom conformance import helpers\n\n"
        "def test_name():\n    assert (conformance.NAME, helpers.NAME) == ('theirs', 'helper')\n"
    )
    (tmp_path / "tests" / "conformance" / "test_below.py").write_text(
        "import sys\n\ndef test_name():\n    assert sys.modules['conformance'].NAME == 'theirs'\n"
    )
    (tmp_path / "test_kernel.py").write_text(
        "from attention_conformance.testing import conformance_tests\nfrom kernels import attention\n\n"
        "test_kernel = conformance_tests(attention, cases='train/f32/*.T1.*', checks='forward')\n"
    )
    shutil.copy(ROOT / "tests" / "api" / "kernels.py", tmp_path)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (entry,) = settings["project"]["entry-points"]["pytest11"].items()
    forced = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    described = tmp_path / "installed" / "attention_conformance-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: attention-conformance\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[pytest11]\n{' = '.join(entry)}\n")
    for source, target in forced.items():
        shutil.copy(ROOT / source, tmp_path / "installed" / target)
    return tmp_path


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder / "installed"), str(ROOT)])
    plain = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=plain,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT,
    )


def run_pytest(folder: Path, *words: str) -> str:
    """Run pytest, and return its last line."""
    done = run_python(folder, "-m", "pytest", "-p", "no:cacheprovider", *words)
    return (done.stdout.splitlines() or done.stderr.splitlines())[-1]


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_a_repository_keeps_its_package_conformance(mode: str, taken: Path) -> None:
    assert "1 passed" in run_pytest(taken, "test_root.py", f"--import-mode={mode}")
    if mode == "prepend":
        (taken / "conformance").rename(taken / "other")
        assert "1 passed" in run_pytest(taken, "tests")


def test_kernels_are_judged_beside_a_package_conformance(taken: Path) -> None:
    assert " passed" in run_pytest(taken, "test_kernel.py", *NO_PROBES)
    few = (*NO_PROBES, "--conformance-cases=train/f32/*.T1.*", "-k=forward", "--impl=kernels.py:attention")
    assert " passed" in run_pytest(taken, "--pyargs", "attention_conformance", *few)


def test_both_packages_in_one_run_are_refused_in_one_line(taken: Path) -> None:
    (taken / "conftest.py").write_text("import conformance\n")
    done = run_python(taken, "-m", "pytest", "--impl=kernels.py:attention", "--pyargs", "attention_conformance")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert "rename yours" in line
    assert str(taken / "conformance") in line


def test_the_public_names_are_found_beside_a_package_conformance(taken: Path) -> None:
    code = "import attention_conformance as a; from attention_conformance import testing; print(a.check, testing)"
    done = run_python(taken, "-c", f"{code}; import conformance; print(conformance.declare is a.declare)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"
