"""Examples of the Python calls run, and type checkers of users accept them."""

from __future__ import annotations

import inspect
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import conformance
from conformance.api.argument_checks import CheckArguments, SuiteArguments
from conformance.testing import conformance_tests
from impls.contract.declarations import Declarations
from tests.api.examples import debugging, judging, testing

FOLDER = Path(judging.__file__).parent


def test_examples_do_what_they_say(tmp_path: Path) -> None:
    cause, place = judging.judge(tmp_path)
    assert "out is wrong" in cause
    assert "in place of" in place
    with pytest.raises(AssertionError, match="does not conform"):
        judging.raise_unless_conforming()
    assert "pass" in debugging.compare()
    assert all(case.startswith("train/bf16/") for case in debugging.list_cases())
    assert "attention" in str(testing.test_attention.__doc__)


# By day one type checker. `mypy` takes a minute, and checks the calls themselves where `.ci/run` checks this project.
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("mypy", "--strict", "--cache-dir=cache"), id="mypy", marks=pytest.mark.nightly),
        pytest.param(("pyright", "--pythonpath", sys.executable), id="pyright", marks=pytest.mark.long),
    ],
)
def test_type_checkers_accept_the_examples_and_see_a_wrong_argument(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "reportUnknownMemberType": false}')
    for path in FOLDER.glob("[!_]*.py"):
        shutil.copy(path, tmp_path / f"example_{path.name}")
    (tmp_path / "wrong.py").write_text(
        "import conformance\n\nconformance.check('kernel:attention', level='smok')\n"
        "conformance.assert_conforms('kernel:attention', logit='input')\n"
    )
    words = [sys.executable, "-m", *command, *(path.name for path in tmp_path.glob("*.py"))]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if ": error:" in line or " - error:" in line]
    assert errors
    assert all("wrong.py" in line for line in errors), done.stdout
    for word in ("smok", "logit"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (conformance.check, CheckArguments),
        (conformance.assert_conforms, CheckArguments),
        (conformance_tests, SuiteArguments),
    ],
)
def test_help_lists_each_option_of_a_call_with_text_and_default(function: Callable[..., Any], kinds: type) -> None:
    listed = inspect.signature(function).parameters
    assert kinds.__annotations__.keys() - Declarations.__annotations__.keys() < listed.keys()
    assert listed["level"].default == "quick"
    shown = pydoc.plain(pydoc.render_doc(function))
    for name, parameter in listed.items():
        assert re.search(rf"^ +(\*\*)?{name}: .", shown, re.MULTILINE), name
        assert str(parameter) in shown


def test_importing_the_tests_of_kernels_loads_no_jax() -> None:
    code = (
        "import sys, conformance.testing, conformance.pytest_plugin; print({'jax', 'numpy', 'cases'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
