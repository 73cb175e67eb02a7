"""`mutants` says what a suite lets through, and its cases catch that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import conformance
from conformance.mutation.suite import SITE
from reports import mutants_page
from reports.mutant_results import CAUGHT, PASSED, UNSEEN, read_results

_REPOSITORY = Path(__file__).parent / "repository"
_PYTEST = [sys.executable, "-m", "pytest", "-q"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a function and a few lines of tests, which are no pytest tests."""
    (tmp_path / "flash.py").write_text((_REPOSITORY / "flash.py").read_text())
    (tmp_path / "check.py").write_text(
        "import flash, jax.numpy as jnp, numpy as np\n"
        "x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 16, 2, 8)), jnp.float32)\n"
        "out = flash.flash_attention(x, x, x, softcap=2.0, window_size=(3, 0))\n"
        "assert jnp.isfinite(out).all()\n"
        "assert not np.allclose(out, flash.flash_attention(x, x, x, window_size=(3, 0)), atol=1e-3)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance", "mutants", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_suite_is_measured_and_the_cases_catch_what_passed(folder: Path) -> None:
    arguments = ("--replace=flash:flash_attention", "--family=soft cap", "--save=found.jsonl", "--report=page.html")
    more = ("--write-tests=test_missed.py", "--fail-under=101", "--jobs=2", "--inputs-seconds=9999")
    done = _run(*arguments, *more, "--", sys.executable, "check.py")
    assert done.returncode == 1, done.stdout + done.stderr  # nothing reaches 101%
    found = read_results(folder / "found.jsonl")
    states = {one.name: one.state for one in found.outcomes}
    assert states["cap-ignored"] == CAUGHT
    passed = found.select(PASSED)
    assert passed
    assert all(one.case for one in passed)
    assert any("gradients" in one.detail for one in found.select(UNSEEN))  # nothing is differentiated
    page = (folder / "page.html").read_text()
    assert page == mutants_page.render_mutants_page(found)
    assert passed[0].sentence in page
    # The tests that were written are green as the function is, and red with what the suite let through.
    assert subprocess.run([*_PYTEST, "test_missed.py"], check=False).returncode == 0
    settings = {"replace": "flash:flash_attention", "mode": passed[0].name, "folder": str(folder)}
    (folder / "settings.json").write_text(json.dumps(settings))
    path = os.pathsep.join((SITE, str(folder)))
    environment = {**os.environ, "CONFORMANCE_MUTANTS": str(folder / "settings.json"), "PYTHONPATH": path}
    assert subprocess.run([*_PYTEST, "test_missed.py"], env=environment, check=False).returncode == 1
    # A second run takes over what the first one found.
    again = _run(*arguments, "--", sys.executable, "check.py")
    assert again.returncode == 0
    assert "[1/" not in again.stdout


def test_what_cannot_be_measured_is_said(folder: Path) -> None:
    (folder / "red.py").write_text("raise SystemExit(3)")
    red = _run("--replace=flash:flash_attention", "--", sys.executable, "red.py")
    assert (red.returncode, "fails as it is (exit code 3)" in red.stderr) == (2, True)
    warn = "import warnings\n" + "".join(f"warnings.warn('old {n}')\n" for n in range(9))
    (folder / "test_red.py").write_text(f"{warn}import flash\nflash.no_such_name\n")
    red = _run("--replace=flash:flash_attention", "--", *_PYTEST, "test_red.py")
    assert (red.returncode, "no_such_name" in red.stderr) == (2, True)  # warnings hide no reason
    never = _run("--replace=flash:flash_attention", "--", sys.executable, "-c", "pass")
    assert (never.returncode, "never calls flash:flash_attention" in never.stderr) == (2, True)
    assert _run("--replace=flash.py:flash_attention", "--", "pytest").returncode == 2
    for wrong, said in (
        ("--fail-under=nan", "--fail-under must be a finite number"),
        ("--seconds=-1", "--seconds must not be negative"),
        ("--jobs=0", "--jobs must be at least 1"),
        ("--sample=0", "--sample must be at least 1"),
        ("--save=no_folder/found.jsonl", "--save=no_folder/found.jsonl cannot be written"),
        ("--write-tests=no_folder/test_missed.py", "there is no no_folder"),
    ):
        refused = _run("--replace=flash:flash_attention", wrong, "--", sys.executable, "check.py")
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
    family = _run("--replace=flash:flash_attention", "--family=sink", "--", sys.executable, "check.py")
    assert (family.returncode, "no family 'sink'" in family.stderr) == (2, True)


def test_pytest_and_python_measure_too(folder: Path) -> None:
    (folder / "test_one.py").write_text("import flash\n\n\ndef test_one():\n    import check\n")
    command = [*_PYTEST, "test_one.py", "--conformance-mutants=flash:no_such_function"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no_such_function" in done.stdout + done.stderr
    checking = f"{sys.executable} check.py"
    results = conformance.mutants("flash:flash_attention", checking, families=["windows"], seconds=1e-3)
    assert len(results.select(PASSED)) == 1  # the one that began within this time
    assert results.outcomes[0].state != PASSED  # in random order, so that no family is always left out
    assert {one.detail for one in results.select("not run")} == {"the time was over"}
    assert "wrong versions of flash:flash_attention" in str(results)


@pytest.mark.nightly
def test_every_kind_that_weak_tests_can_see_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash.py", "weak_tests.py"):
        (tmp_path / name).write_text((_REPOSITORY / name).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = conformance.mutants("flash:flash_attention", [*_PYTEST, "weak_tests.py"], jobs=2)
    assert not results.select("not run")
    assert len(results.select(CAUGHT)) + len(results.select(PASSED)) > 50
    assert all(one.case for one in results.select(PASSED))
