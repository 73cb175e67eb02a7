"""Run the blocks of a page in order, and compare what they print with what the page shows."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from website.fences import Fence, split_console

ROOT = Path(__file__).parent.parent.parent
_FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|toml|ya?ml))\s*$")
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[+-]?\d+)?(?![\w.]\w)")
_TIME = re.compile(r"\b\d+(?:\.\d+)? ?(?:s|ms|min|h|seconds?|minutes?)\b")
_COMMAND_SECONDS = 600
_TIME_LIMITS = ("--confirm-seconds", "--diagnose-seconds")


def run_block(fence: Fence, folder: Path, names: dict[str, Any], environ: Mapping[str, str]) -> str | None:
    """Run one block in a folder, and return what a Python block printed.

    Args:
      fence: the block.
      folder: the page's folder.
      names: the global names of the page's Python blocks, which the block may add to.
      environ: the environment variables of the page's commands.

    Raises:
      AssertionError: if a command exits with another code than the page says, or prints something else.
    """
    name = _FILE_NAME.match(fence.text.partition("\n")[0])
    if name and fence.language in ("python", "toml", "yaml"):
        (folder / name[1]).parent.mkdir(parents=True, exist_ok=True)
        (folder / name[1]).write_text(fence.text, encoding="utf-8")
        # Another test of this process, or an earlier block, may have imported a module of this name.
        sys.modules.pop(name[1].removesuffix(".py").replace("/", "."), None)
        importlib.invalidate_caches()
    elif fence.language == "python":
        return _execute(fence, names)
    elif fence.language == "diff":
        apply_diff(fence.text, folder)
    elif fence.language in ("sh", "console"):
        commands = [(fence.text, None)] if fence.language == "sh" else list(split_console(fence.text))
        for number, (command, shown) in enumerate(commands, 1):
            code = int(fence.options.get("exit", 0)) if number == len(commands) else 0
            printed = _run_command(command, ROOT if "in-clone" in fence.classes else folder, environ, code)
            if shown is not None:
                assert_shown(shown, printed)
    return None


def raise_time_limits(command: str) -> str:
    """Give a judging command ample time to confirm and to diagnose, since a slow machine would otherwise print less."""
    if not command.startswith("python -m conformance run ") or any(option in command for option in _TIME_LIMITS):
        return command
    options = " ".join(f"{option}={_COMMAND_SECONDS}" for option in _TIME_LIMITS)
    return re.sub(r"\A(.*?)(\s*(?:\||>|&&|;|\n|\Z))", rf"\1 {options}\2", command, count=1)


def apply_diff(text: str, folder: Path) -> None:
    """Change a file of `folder` as a diff says: `--- PATH` first, then hunks that begin with `@@`.

    A hunk has no line numbers. Its unchanged and removed lines are looked for in the file, which must have them.
    """
    header, *hunks = re.split(r"^@@\n", text, flags=re.MULTILINE)
    path = folder / header.removeprefix("--- ").strip()
    content = path.read_text(encoding="utf-8")
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert before in content, f"{path} has no lines\n{before}"
        content = content.replace(before, after, 1)
    path.write_text(content, encoding="utf-8")


def assert_shown(shown: str, printed: str) -> None:
    """Check that a text was printed, where a line `...` of it stands for any lines."""
    pieces = re.split(r"^\.\.\.\n", normalize(shown), flags=re.MULTILINE)
    pattern = r"(?:.*\n)*?".join(re.escape(piece) for piece in pieces)
    assert re.fullmatch(pattern, normalize(printed)), f"the page shows:\n{shown}\nbut this was printed:\n{printed}"


def normalize(text: str) -> str:
    """Round numbers to three digits, and drop times and spaces at ends of lines, which differ between machines."""
    text = _TIME.sub("TIME", text)
    text = _NUMBER.sub(lambda number: f"{float(number[0]):.3g}", text)
    return re.sub(r"[ \t]+$", "", text.rstrip("\n") + "\n", flags=re.MULTILINE)


def _execute(fence: Fence, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(fence.text, f"<block at line {fence.line}>", "exec"), names)  # what a reader would paste
    return printed.getvalue()


def build_environment() -> dict[str, str]:
    """Return the environment variables of a reader's shell in which this Python is active."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return environment | {"COLUMNS": "120", "NO_COLOR": "1", "PATH": path}


def _run_command(command: str, folder: Path, environ: Mapping[str, str], code: int) -> str:
    done = subprocess.run(
        ["bash", "-euc", raise_time_limits(command)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=3 * _COMMAND_SECONDS,
    )
    assert done.returncode == code, (
        f"$ {command}\nexit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout
