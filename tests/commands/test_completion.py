"""Shells complete commands, options and names, and `--version` names what is installed."""

from __future__ import annotations

import shutil
import subprocess

import jax
import numpy as np
import pytest

from conformance import cli

WORDS = ("run", "compare", "--fail-fast", "smoke", "dot_product", "forward", "paged_attention")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_options_and_names_are_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(cli.build_parser().parse_args(["completion", shell])) == 0
    script = capsys.readouterr().out
    assert "attention-conformance" in script
    for word in WORDS:
        assert word.removeprefix("--") in script, word
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=60)


def test_bash_completes_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash here")
    assert cli.main(cli.build_parser().parse_args(["completion", "bash"])) == 0
    typed = "COMP_WORDS=(attention-conformance run --check forw); COMP_CWORD=3"
    function = "$(complete -p attention-conformance | sed 's/.*-F \\([^ ]*\\) .*/\\1/')"
    script = f"{capsys.readouterr().out}\n{typed}\n{function}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    found = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["forward"]


def test_versions_are_those_that_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.build_parser().parse_args(["--version"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"jax {jax.__version__}" in lines
    assert f"numpy {np.__version__}" in lines
    for name in ("attention-conformance ", "jaxlib ", "python ", "platform "):
        assert any(line.startswith(name) for line in lines), name
