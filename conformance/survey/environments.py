"""Create the Python environment of a library's version with uv.

The description (`impls.libraries.library_specs.Environment`) pins what matters. uv resolves the rest with what was
published by the description's date, so an environment that is created later is the same.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

from impls.libraries.library_specs import Environment

_PROJECT = "attention-conformance"
_STAMP = "environment.json"
_MAX_REASON = 300  # characters of a message of uv
_MINUTES = 30  # time limit of one installation


class CannotCreateEnvironment(Exception):
    """An environment cannot be created; the message is the reason in one line."""


@dataclasses.dataclass(frozen=True)
class CreatedEnvironment:
    """An environment on disk; `packages` has the lines of `pip freeze`, without this project."""

    python: Path
    packages: tuple[str, ...]


def find_uv() -> str:
    """Find uv in this environment, or else on the path. Raises `CannotCreateEnvironment` if there is none."""
    try:
        import uv  # imported late: the package is optional

        return str(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise CannotCreateEnvironment('uv is not installed: pip install "attention-conformance[survey]"')
    return found


def create_environment(described: Environment, folder: Path) -> CreatedEnvironment:
    """Create an environment in a folder unless an equal one is there. Raises `CannotCreateEnvironment` on failure."""
    project = describe_project()
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if (kept := _read_stamp(folder, described, project)) is not None and python.exists():
        return CreatedEnvironment(python, kept)
    uv = find_uv()
    _run_uv([uv, "venv", "--quiet", "--clear", "--python", described.python, str(folder)], f"Python {described.python}")
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    dated = [f"--exclude-newer={described.resolved.isoformat()}"]
    _run_uv([*install, *dated, *project, *described.requirements], " ".join(described.requirements))
    if described.without_dependencies:
        bare = described.without_dependencies
        _run_uv([*install, *dated, "--no-deps", *bare], " ".join(bare))
    frozen = _run_uv([uv, "pip", "freeze", "--quiet", "--python", str(python)], "the list of packages").splitlines()
    packages = tuple(line for line in frozen if not line.startswith(("-e", _PROJECT)))
    write_stamp(folder, described, project, packages)
    return CreatedEnvironment(python, packages)


def describe_project() -> list[str]:
    """Return the arguments of `pip install` that install this project as it is installed here."""
    try:
        found = importlib.metadata.distribution(_PROJECT)
    except importlib.metadata.PackageNotFoundError as error:
        raise CannotCreateEnvironment(f"{_PROJECT} is not installed here, so it cannot be installed there") from error
    direct = json.loads(found.read_text("direct_url.json") or "{}")
    place = unquote(urlparse(direct.get("url", "")).path)
    if direct.get("url", "").startswith("file:") and Path(place).exists():
        return ["--editable", place] if direct.get("dir_info", {}).get("editable") else [place]
    return [f"{_PROJECT}=={found.version}"]


def write_stamp(folder: Path, described: Environment, project: Sequence[str], packages: Sequence[str]) -> None:
    """Note in the environment's folder that it is complete, for what description, and what it holds."""
    stamp = {"stamp": _build_stamp(described, project), "packages": list(packages)}
    (folder / _STAMP).write_text(json.dumps(stamp), encoding="utf-8")


def _read_stamp(folder: Path, described: Environment, project: Sequence[str]) -> tuple[str, ...] | None:
    """Return the packages of the environment in `folder`; None unless it was completed for the same description."""
    try:
        found = json.loads((folder / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tuple(found["packages"]) if found.get("stamp") == _build_stamp(described, project) else None


def _build_stamp(described: Environment, project: Sequence[str]) -> dict[str, object]:
    return {
        "python": described.python,
        "requirements": list(described.requirements),
        "without_dependencies": list(described.without_dependencies),
        "resolved": described.resolved.isoformat(),
        "project": list(project),
    }


def _run_uv(command: list[str], what: str) -> str:
    """Run uv and return what it prints. Raises `CannotCreateEnvironment` with the reason that uv gives."""
    # An active environment or configuration of the caller must not decide what is installed where.
    environ = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environ,
            timeout=60 * _MINUTES,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotCreateEnvironment(f"installing {what} took more than {_MINUTES} minutes") from error
    except OSError as error:
        raise CannotCreateEnvironment(f"uv cannot be started: {error.strerror or error}") from error
    if done.returncode:
        print(done.stderr, file=sys.stderr, end="")
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        words = " ".join(" ".join(lines).split())[:_MAX_REASON]
        # A package that cannot be built has a long log before uv's explanation.
        hints = [line for line in lines if line.startswith("hint:") and line not in words]
        raise CannotCreateEnvironment(" ".join([f"uv cannot install {what}: {words}", *hints[:1]]))
    return done.stdout
