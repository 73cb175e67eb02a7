"""Resolve the ids of the gate's tests, so that a printed id can be pasted on the command line.

pytest names a test by the path of its file from its root folder. The gate's file is outside of the root folder of most
projects, so the gate's tests have the same path everywhere: `conformance/test_gate.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from conformance import packages

GATE_PATH = "conformance/test_gate.py"
"""The path in the ids of the gate's tests."""
_PACKAGES = ("conformance", "attention_conformance")
GATE_FILE = Path(__file__).resolve().parent.parent / "test_gate.py"
_CASE = re.compile(r"((?:\w+-)*)((?:train|prefill|decode)/.+)")
_TEST = re.compile(r"(.+)-(?:cpu|gpu|tpu)(?:-interpret)?-(.+)")


@dataclasses.dataclass(frozen=True)
class NamedJob:
    """A job that a test's id names.

    Attributes:
      text: what stands in brackets in the id of the test.
      case: the id of the case.
      checks: the names of its checks; empty for those that every case of the grid gets.
      implementation: the name of the implementation; empty if the test's function says it.
    """

    text: str
    case: str
    checks: tuple[str, ...] = ()
    implementation: str = ""


def is_requested(arguments: Iterable[str], implementations: Iterable[str], cases: str | None) -> bool:
    """Tell whether a run of pytest judges kernels, according to its paths, `--impl` and `--conformance-cases`."""
    return bool(any(map(_is_of_gate, arguments)) or list(implementations) or cases is not None)


def _is_of_gate(argument: str) -> bool:
    """Tell whether an argument names this package, as a module or by its folder, or a test of the gate by its id."""
    path = argument.partition("[")[0].partition("::")[0]
    if path.partition(".")[0] in _PACKAGES or Path(path).parts[-2:] == Path(GATE_PATH).parts:
        return True
    return bool(path) and Path(path).resolve().is_relative_to(packages.HOME / "conformance")


def resolve_arguments(arguments: Iterable[str], folder: Path) -> list[str]:
    """Replace the gate's path, where no such file exists, by the file that is installed.

    Args:
      arguments: the paths and ids that pytest was given.
      folder: the folder that they are relative to.
    """
    return [_resolve_argument(argument, folder) for argument in arguments]


def _resolve_argument(argument: str, folder: Path) -> str:
    base, bracket, parameters = argument.partition("[")
    path, *names = base.split("::")
    is_gate = Path(path).parts[-2:] == Path(GATE_PATH).parts or path == "attention_conformance"
    if not is_gate or (folder / path).exists():
        return argument
    return "::".join((str(GATE_FILE), *names)) + bracket + parameters


def list_gate_jobs(arguments: Sequence[str], folder: Path) -> list[NamedJob]:
    """List the jobs of the gate that arguments name by the ids of their tests; empty if any asks for all tests."""
    found = []
    for argument in arguments:
        base, _, parameters = argument.partition("[")
        path = base.partition("::")[0]
        if (folder / path).resolve() != GATE_FILE:
            if "::" in base or path.endswith(".py"):
                continue  # tests of another file
            return []
        job = parse_gate_test(parameters.removesuffix("]"))
        if job is None:
            return []
        found.append(job)
    return found


def parse_gate_test(text: str) -> NamedJob | None:
    """Parse `IMPLEMENTATION-PLATFORM-CHECKS-CASE`, where the checks may be missing; None for any other text."""
    found = _TEST.fullmatch(text)
    job = parse_kernel_test(found[2]) if found is not None else None
    return dataclasses.replace(job, text=text, implementation=found[1]) if job is not None and found else None


def parse_kernel_test(text: str) -> NamedJob | None:
    """Parse `CHECKS-CASE`, where the checks may be missing; None for any other text."""
    found = _CASE.fullmatch(text)
    if found is None:
        return None
    return NamedJob(text, found[2], tuple(filter(None, found[1].split("-"))))


def list_kernel_jobs(arguments: Iterable[str], folder: Path, file: Path, names: Sequence[str]) -> list[NamedJob]:
    """List the jobs that arguments name as tests of one function.

    Args:
      arguments: the paths and ids that pytest was given.
      folder: the folder that they are relative to.
      file: the file of the test function.
      names: the names in the function's id after the file: classes, if any, and the function.
    """
    found = []
    for argument in arguments:
        base, _, parameters = argument.partition("[")
        path, *theirs = base.split("::")
        if theirs == list(names) and (folder / path).resolve() == file.resolve():
            found.append(parse_kernel_test(parameters.removesuffix("]")))
    return [job for job in found if job is not None]
