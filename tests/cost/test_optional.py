"""The core works without this package: it judges, compiles, and writes pages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from conformance import cli, extensions
from conformance.accelerators import compilation
from conformance.accelerators.targets import TPU, list_targets
from conformance.extensions import Extension

ROOT = Path(__file__).parents[2]
CASE = "train/f32/B1.T128.S128.N2.K2.H64.V64/causal/normal/s0"
NO_COST = """\
import importlib.util, sys
assert importlib.util.find_spec("conformance.cost") is None
from conformance.__main__ import main
sys.argv = ["conformance", *sys.argv[1:]]
main()
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A copy of the project in which no process can import `conformance.cost`."""
    for name in ("cases", "impls", "reports"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(
        ROOT / "conformance",
        tmp_path / "conformance",
        ignore=lambda folder, names: {"cost", "__pycache__"} & set(names),
    )
    return tmp_path


def run_core(core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of the copy."""
    return subprocess.run(
        [sys.executable, "-P", "-c", NO_COST, *arguments],
        cwd=core,
        env=os.environ | {"PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_kernel_is_judged_and_a_page_is_written_without_the_package(core: Path) -> None:
    options = [f"--case={CASE}", "--check=forward", "--check=gradients", "--report=page.html"]
    found = run_core(core, "run", "--impl=dot_product", *options)
    assert found.returncode == 0, found.stdout + found.stderr
    verdicts = [json.loads(line).get("verdict") for line in (core / "page.jsonl").read_text().splitlines()]
    assert verdicts.count("pass") >= 4
    assert "dot_product" in (core / "page.html").read_text()


def test_its_commands_are_gone_with_the_package(core: Path) -> None:
    found = run_core(core, "bench", "--impl=dot_product")
    assert found.returncode == 2
    assert "invalid choice: 'bench'" in found.stderr


def test_its_commands_are_there_with_the_package() -> None:
    text = cli.build_parser().format_help()
    assert all(f"\n    {name} " in text for name in ("bench", "tune", "cycles"))


@pytest.mark.skipif(TPU.missing is not None, reason=str(TPU.missing))
def test_compiling_gives_the_compilers_own_figures_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    operand = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    (target, *_) = list_targets("tpu")
    function = jax.jit(lambda x: jnp.tanh(x @ x) @ x)
    whole = compilation.compile_for(target, function, (operand,))
    monkeypatch.setattr(extensions, "load_extensions", lambda: (Extension(),))
    monkeypatch.setattr("conformance.accelerators.program_observers.load_extensions", lambda: (Extension(),))
    core = compilation.compile_for(target, function, (operand,))
    assert list(core) == ["compile_seconds", "temporary_bytes", "argument_bytes", "output_bytes", "code_bytes"]
    assert list(whole)[: len(core)] == list(core)
    assert "live_bytes" in whole
