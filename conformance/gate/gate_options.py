"""Define and read the command-line options of the pytest gate.

Every pytest run loads this module, so it imports nothing heavy.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance import packages
from conformance.gate import node_ids
from conformance.session.failures import CannotJudge
from conformance.session.process_setup import prepare_process, start_fork_server_for
from conformance.session.run_spec import OPTIONS, RunSpec, build_spec

PREFIX = "--conformance-"
"""The prefix of the gate's options."""
SHORT_FORMS = ("--impl", "--require-platform")
"""Options that may be written without the prefix where no `conftest.py` or other plugin has an option of that name."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options of the gate to pytest's parser, in groups of its help."""
    for each in OPTIONS.values():
        if each.pytest:
            group = parser.getgroup(f"attention conformance: {each.group}")
            group.addoption(f"{PREFIX}{each.name}", **each.describe_argument())


def is_requested(config: pytest.Config, arguments: Sequence[str], *, parser: pytest.Parser | None = None) -> bool:
    """Tell whether a run of pytest judges kernels, while its settings are read.

    Args:
      config: the configuration, as far as it is known before any `conftest.py` is imported.
      arguments: those of pytest.
      parser: pytest's, once `expand_short_forms` was called. Until then `--impl` counts as ours.
    """
    options = config.known_args_namespace if parser is None else parser.parse_known_args(arguments)
    names = [each for each in arguments if parser is None and each.partition("=")[0] == "--impl"]
    paths = options.file_or_dir or config.getini("testpaths")
    return node_ids.is_requested(paths, [*names, *options.conformance_impl], options.conformance_cases)


def expand_short_forms(parser: pytest.Parser, arguments: list[str]) -> None:
    """Give the short forms among the arguments of pytest their prefix, unless they are options of someone else.

    Call this after every `conftest.py` has added its options.
    """
    short = [number for number, each in enumerate(arguments) if each.partition("=")[0] in SHORT_FORMS]
    if not short:
        return
    _, unknown = parser.parse_known_and_unknown_args(arguments)
    for number in short:
        if arguments[number] in unknown:
            arguments[number] = f"{PREFIX}{arguments[number].removeprefix('--')}"


def read_options(config: pytest.Config) -> RunSpec:
    """Build the options of the run from those of pytest.

    Raises:
      pytest.UsageError: if the options are invalid. The message is one line.
    """
    arguments = [str(argument) for argument in config.invocation_params.args]
    given = {each.key: config.getoption(f"{PREFIX}{each.name}") for each in OPTIONS.values() if each.pytest}
    try:
        if None in given["seed"]:
            raise CannotJudge(f"{PREFIX}seed=random: give a number, so that all processes judge the same cases")
        return build_spec(
            given,
            use_listed=True,
            command=" ".join(["pytest", *map(shlex.quote, arguments)]),
            query={"pytest": arguments},
            option_prefix=PREFIX,
        )
    except CannotJudge as error:
        raise pytest.UsageError(str(error)) from error


def describe_keyword(expression: str) -> str:
    """Return the option `-k` as text if its expression names checks; otherwise an empty string.

    A run with some of the checks is reported as narrowed. If `-k` only leaves out cases, the number of jobs shows it.
    """
    if not expression:
        return ""
    from conformance.gate.keyword_selection import mentions_checks  # imported late: it loads JAX

    return f"-k {shlex.quote(expression)}" if mentions_checks(expression) else ""


def prepare_gate(config: pytest.Config, implementations: Sequence[str]) -> None:
    """Prepare this process for planning jobs, before JAX is loaded. Raises `pytest.UsageError`.

    Args:
      config: the configuration of pytest.
      implementations: what the command line names.
    """
    try:
        prepare_process()
    except (packages.NameTaken, CannotJudge) as error:
        raise pytest.UsageError(str(error)) from error
    names = implementations or list_configured(config.rootpath)
    start_fork_server_for(names, in_process=config.getoption("--conformance-in-process"))


def list_configured(root: Path) -> list[str]:
    """List the implementations in a project's `pyproject.toml`, without loading JAX; empty if it cannot be read."""
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["attention_conformance"]
        return [name for name in table["implementations"] if isinstance(name, str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the session reports what is wrong with the file


def format_reminder(root: Path) -> list[str]:
    """Return a line for a pytest run that judges nothing: which listed implementations it did not judge, and how to."""
    names = list_configured(root)
    if not names:
        return []
    what = names[0] if len(names) == 1 else f"{len(names)} implementations"
    return [f"attention conformance: {what} of pyproject.toml not judged; `pytest --pyargs conformance` judges"]
