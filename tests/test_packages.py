"""A user's own `cases`, `reports` or `impls` breaks no way into the harness; a clash of names is said in one line.

Every way in is a process of its own: which module goes by a name is settled once in a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import conformance
from tests.process_helpers import COMMAND_TIMEOUT

ROOT = Path(__file__).parent.parent
CASE = "train/f32/B1.T16.S16.N2.K2.H16.V16/full/normal/s0"
RUN = ("run", "--impl=kernel.py:attention", f"--case={CASE}", "--check=forward")
KERNEL = """
import jax
import jax.numpy as jnp
from helpers import SCALE


def attention(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = SCALE * jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)
"""
# As pip writes the console script.
SCRIPT = "import sys\nfrom conformance.cli import run_main\nif __name__ == '__main__':\n    sys.exit(run_main())\n"
# What a kernel may do with a module of its own that one of our packages hides.
ASKS = {
    "from cases import scale": "no module 'cases.scale'",
    "import cases.scale": "no module 'cases.scale'",
    "import cases\ncases.scale": "module 'cases' has no attribute 'scale'",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder with a kernel, and modules that have our packages' names and fail when they are imported."""
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "helpers.py").write_text("SCALE = 1.0\n")
    (tmp_path / "impls").mkdir()
    for name in ("cases.py", "reports.py", "impls/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit(f'the user has {__name__}')\n")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the folder, with our packages behind it on the path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def test_the_command_finds_its_own_packages(folder: Path) -> None:
    done = run(folder, "-m", "conformance", *RUN, "--jobs=1", "--report=r.html")
    assert done.returncode == 0, said(done)
    assert (folder / "r.html").exists()


def test_the_console_script_stands_a_module_called_conformance_too(folder: Path) -> None:
    (folder / "conformance.py").write_text((folder / "cases.py").read_text())
    (folder / "bin").mkdir()
    (folder / "bin" / "attention-conformance").write_text(SCRIPT)
    done = run(folder, "bin/attention-conformance", *RUN, "--jobs=2")
    assert done.returncode == 0, said(done)


@pytest.mark.parametrize(
    "processes", [pytest.param("0", marks=pytest.mark.long), pytest.param("2", marks=pytest.mark.nightly)]
)
def test_the_gate_finds_its_own_packages(processes: str, folder: Path) -> None:
    (folder / "conftest.py").write_text("")  # its folder is where Python looks first
    gate = ("-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "conformance", "-n", processes)
    few = ("--impl=kernel.py:attention", "--conformance-cases=train/f32/*.T1.*", "--conformance-report=r.html")
    done = run(folder, *gate, *few)
    assert done.returncode == 0, said(done)
    assert " passed" in done.stdout
    assert (folder / "r.html").exists()


def test_tests_keep_their_own_modules_where_nothing_is_judged(folder: Path) -> None:
    (folder / "cases.py").write_text("scale = 2\n")
    (folder / "test_own.py").write_text("from cases import scale\n\ndef test_scale():\n    assert scale == 2\n")
    done = run(folder, "-m", "pytest", "-p", "no:cacheprovider", "test_own.py")
    assert done.returncode == 0, said(done)


def test_a_module_that_a_conftest_has_loaded_is_named_before_anything_is_judged(folder: Path) -> None:
    (folder / "cases.py").write_text("")
    (folder / "conftest.py").write_text("import cases\n")
    done = run(
        folder, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "conformance", "--impl=kernel.py:attention"
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith(f"ERROR: 'cases' is loaded from {folder / 'cases.py'}, and attention-conformance has")
    assert "rename yours" in line


@pytest.mark.long
@pytest.mark.parametrize("asks", ASKS)
def test_a_kernel_whose_neighbour_asks_for_a_hidden_module_is_told_which(asks: str, folder: Path) -> None:
    (folder / "helpers.py").write_text(f"{asks}\nSCALE = 1.0\n")
    done = run(folder, "-m", "conformance", *RUN)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: kernel.py does not import: ")
    hides = f"'cases' is a package of attention-conformance here, and hides {folder / 'cases.py'}: rename that one"
    assert f"Error: {ASKS[asks]}: {hides} (helpers.py:" in line


@pytest.mark.parametrize("name", ["impls:attention", "impls.flash:attention"])
def test_an_implementation_in_a_hidden_package_is_told_so(name: str, folder: Path) -> None:
    done = run(folder, "-m", "conformance", "run", f"--impl={name}", f"--case={CASE}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"attention-conformance here, and hides {folder / 'impls/__init__.py'}: rename that one")


def test_a_name_that_nothing_hides_is_simply_missing(folder: Path) -> None:
    (folder / "cases.py").unlink()
    (folder / "helpers.py").write_text("import cases\nSCALE = cases.scale\n")
    done = run(folder, "-m", "conformance", *RUN)
    assert done.returncode == 2
    assert "AttributeError: module 'cases' has no attribute 'scale' (helpers.py:2: " in done.stderr


def test_type_checkers_are_given_the_public_names() -> None:
    stub = (ROOT / "conformance" / "__init__.pyi").read_text()
    found = {line.rpartition(" as ")[2]: line.split()[1] for line in stub.splitlines() if line.startswith("from ")}
    assert found == vars(conformance)["_PUBLIC"]
