"""What must not be imported; `lint-imports` checks the layers that pyproject.toml lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_help_loads_no_jax() -> None:
    asked = "import sys, conformance.cli as cli; cli.build_parser().format_help(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("package", ["cases", "reports"])
def test_no_jax_outside_what_computes(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        assert "import jax" not in path.read_text(), path


@pytest.mark.parametrize("module", ["conformance.cli", "conformance.pytest_plugin", "conformance.testing"])
def test_no_package_with_an_everyday_name_is_loaded_before_the_names_are_claimed(module: str) -> None:
    found = f"import sys, {module}; print([name for name in ('cases', 'impls', 'reports') if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"
