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
