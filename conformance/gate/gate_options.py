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
from conformance.judging.run_levels import LEVELS
from conformance.session.failures import CannotJudge
from conformance.session.process_setup import prepare_process, start_fork_server_for
from conformance.session.run_options import RunOptions, parse_shard

PREFIX = "--conformance-"
"""The prefix of the gate's options, except `--impl` and `--require-platform`."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options of the gate to pytest's parser, in three groups of its help."""
    _add_selection_options(parser.getgroup("attention conformance: what is judged"))
    _add_process_options(parser.getgroup("attention conformance: the process of your kernel"))
    _add_result_options(parser.getgroup("attention conformance: results and files"))


def _add_selection_options(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--impl",
        action="append",
        default=[],
        metavar="NAME",
        help="with --pyargs conformance: judge this kernel (module:function or file.py:function) or group of "
        "pyproject.toml; may be repeated",
    )
    group.addoption(
        "--conformance-level",
        choices=LEVELS,
        help="how much is judged (quick, or what a call of conformance_tests says)",
    )
    group.addoption("--conformance-cases", metavar="QUERY", help="judge only cases whose id matches, as train/bf16")
    group.addoption(
        "--conformance-seed", type=int, default=0, metavar="N", help="base seed from which cases are drawn (0)"
    )
    group.addoption("--conformance-shard", metavar="K/N", help="judge the Kth of N parts; `report` merges them")
    group.addoption(
        "--require-platform",
        choices=("cpu", "gpu", "tpu"),
        help="judge only what runs natively on this platform; fail if nothing does",
    )


def _add_process_options(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--conformance-in-process", action="store_true", help="run your kernel in the judge's process, for debugging"
    )
    group.addoption(
        "--conformance-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit for one call of your kernel (300)",
    )
    group.addoption(
        "--conformance-memory",
        type=float,
        metavar="GIB",
        help="memory limit of your kernel's process (half of the machine's)",
    )
    group.addoption(
        "--conformance-sandbox-read",
        action="append",
        default=[],
        metavar="PATH",
        help="let your kernel read this file or folder too",
    )
    group.addoption(
        "--conformance-sandbox-env",
        action="append",
        default=[],
        metavar="NAME",
        help="give your kernel this environment variable too",
    )
    group.addoption(
        "--conformance-require-sandbox",
        action="store_true",
        help="judge nothing if the sandbox of your kernel is not complete",
    )


def _add_result_options(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--conformance-report", metavar="FILE.html", help="write the HTML report, and its records beside it"
    )
    group.addoption("--conformance-json", metavar="FILE", help="write the records here, as they come")
    group.addoption(
        "--conformance-resume",
        metavar="FILE",
        help="continue this file of records: its finished jobs are not judged again",
    )
    group.addoption(
        "--conformance-baseline", metavar="FILE", help="compare with these records, and fail on a regression"
    )
    for name, what in (("confirm", "cases that confirm findings"), ("diagnose", "a comparison with planted bugs")):
        group.addoption(
            f"--conformance-{name}-seconds",
            type=float,
            metavar="N",
            help=f"time for {what} after a red run (both together: 15 s, or a tenth of a longer run; 0 for none)",
        )


def read_options(config: pytest.Config) -> RunOptions:
    """Build the options of the run from those of pytest.

    Raises:
      pytest.UsageError: if the options are invalid. The message is one line.
    """
    arguments = [str(argument) for argument in config.invocation_params.args]
    seed, shard = config.getoption("--conformance-seed"), config.getoption("--conformance-shard")

    def get(name: str) -> str | None:
        value: str | None = config.getoption(f"{PREFIX}{name}")
        return value

    try:
        return RunOptions(
            implementations=tuple(config.getoption("--impl")),
            use_listed=True,
            level=get("level"),
            cases=get("cases"),
            seeds=(seed,) if seed else (),
            timeout=config.getoption("--conformance-timeout"),
            memory=config.getoption("--conformance-memory"),
            in_process=config.getoption("--conformance-in-process"),
            sandbox_read=tuple(config.getoption("--conformance-sandbox-read")),
            sandbox_env=tuple(config.getoption("--conformance-sandbox-env")),
            require_sandbox=config.getoption("--conformance-require-sandbox"),
            shard=None if shard is None else parse_shard(shard),
            confirm_seconds=config.getoption("--conformance-confirm-seconds"),
            diagnose_seconds=config.getoption("--conformance-diagnose-seconds"),
            require_platform=config.getoption("--require-platform"),
            report=get("report"),
            json=get("json"),
            resume=get("resume"),
            baseline=get("baseline"),
            command=" ".join(["pytest", *map(shlex.quote, arguments)]),
            query={"pytest": arguments},
            option_prefix=PREFIX,
        )
    except CannotJudge as error:
        raise pytest.UsageError(str(error)) from error
    except ValueError as error:
        raise pytest.UsageError(f"--conformance-shard: {error}") from error


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
