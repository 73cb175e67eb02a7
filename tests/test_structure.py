"""Imports run one way, and the README says what happens."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from conformance import cli

ROOT = Path(__file__).parent.parent
PACKAGES = ("cases", "conformance", "impls", "reports")

# What each package may import of ours; a module name stands for that module alone.
ALLOWED = {
    "cases": {"cases"},
    "impls": {"impls", "cases", "conformance.contract", "conformance.tunable"},
    "reports": {"reports", "cases.operands", "conformance.records", "conformance.bench.measurements"},
    "conformance": {"conformance", "cases"},
}
# Only the command line and the pytest plugin see everything.
SEE_EVERYTHING = {"conformance/commands", "conformance/pytest_plugin.py"}


def imports(path: Path) -> set[str]:
    """Modules of ours that the file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return {name for name in found if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if not any(str(path.relative_to(ROOT)).startswith(seeing) for seeing in SEE_EVERYTHING)
        for name in sorted(imports(path))
        if not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED[package])
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["cases", "reports"])
def test_no_jax_outside_what_computes(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        assert "import jax" not in path.read_text(), path


def test_no_module_outgrows_its_room() -> None:
    long = {str(p): n for folder in PACKAGES for p in (ROOT / folder).rglob("*.py") if (n := lines(p)) > 400}
    assert long == {}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_readme_example_fails_as_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text()
    kernel = re.search(r"```python\n(# kernel\.py\n.*?)```", readme, re.DOTALL)
    console = re.search(r"```console\n\$ python -m conformance (.*?)\n(.*?)```", readme, re.DOTALL)
    assert kernel is not None
    assert console is not None
    (tmp_path / "kernel.py").write_text(kernel[1])
    monkeypatch.chdir(tmp_path)
    arguments = cli.parser().parse_args(console[1].split())
    assert cli.main(arguments) == 1
    assert rounded(console[2].strip()) in rounded(capsys.readouterr().out)


def rounded(text: str) -> str:
    """The text with its numbers to three digits: the kernel's own last digits differ between machines."""
    return re.sub(r"-?\d+\.?\d*(e[+-]?\d+)?(?= |,|$|\n)", lambda number: f"{float(number[0]):.3g}", text)


def test_every_command_of_the_readme_is_one() -> None:
    readme = (ROOT / "README.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", readme, re.DOTALL)
    commands = re.findall(r"(?<!-m )python -m conformance ([a-z].*)", "\n".join(blocks))
    assert len(commands) > 20
    for command in commands:
        cli.parser().parse_args(shlex.split(command, comments=True))
