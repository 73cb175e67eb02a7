"""Options of the pytest gate. They are loaded in every pytest run, so nothing heavy is imported here."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from conformance import packages
from conformance.judging.run_levels import LEVELS
from conformance.session.failures import CannotJudge
from conformance.session.process_setup import prepare_process, start_fork_server_for
from conformance.session.run_options import RunOptions, parse_shard

PREFIX = "--conformance-"
"""How the names of the gate's options begin, but for `--impl` and `--require-platform`."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options of the gate; all but `--impl` and `--require-platform` carry its name."""
    group = parser.getgroup("attention conformance")
    group.addoption(
        "--impl", action="append", default=[], metavar="NAME", help="judge this one, or this group; may be repeated"
    )
    group.addoption("--conformance-level", default="quick", choices=LEVELS, help="how much is judged (quick)")
    group.addoption("--conformance-cases", metavar="QUERY", help="only cases that match")
    group.addoption("--conformance-seed", type=int, default=0, metavar="N", help="base seed of the grid (0)")
    group.addoption(
        "--conformance-timeout",
        type=float,
        metavar="SECONDS",
        help="the most that one call of a kernel of yours may take (300)",
    )
    group.addoption(
        "--conformance-memory", type=float, metavar="GIB", help="the most memory of its process (half of the machine's)"
    )
    group.addoption(
        "--conformance-in-process", action="store_true", help="run it in the judge's process, for debugging"
    )
    group.addoption(
        "--conformance-sandbox-read",
        action="append",
        default=[],
        metavar="PATH",
        help="let a kernel of yours read this file or folder too",
    )
    group.addoption(
        "--conformance-sandbox-env",
        action="append",
        default=[],
        metavar="NAME",
        help="give a kernel of yours this environment variable too",
    )
    group.addoption(
        "--conformance-require-sandbox",
        action="store_true",
        help="judge nothing where the sandbox of a kernel of yours is not complete",
    )
    group.addoption("--conformance-shard", metavar="K/N", help="judge the Kth of N parts; `report` merges them")
    group.addoption(
        "--conformance-report", metavar="FILE.html", help="write the HTML report, and its records beside it"
    )
    group.addoption("--conformance-json", metavar="FILE", help="write the records here, as they come")
    group.addoption(
        "--conformance-resume",
        metavar="FILE",
        help="continue this file of records: what is in it is not judged again",
    )
    group.addoption(
        "--conformance-baseline", metavar="FILE", help="compare with these records, and fail on a regression"
    )
    for name, what in (("confirm", "cases that confirm findings"), ("diagnose", "a comparison with planted bugs")):
        group.addoption(
            f"--conformance-{name}-seconds",
            type=float,
            metavar="N",
            help=f"for {what}, at the end of a run that is red (of a tenth of it both; 0 for none)",
        )
    group.addoption(
        "--require-platform", choices=("cpu", "gpu", "tpu"), help="fail if nothing was judged on this platform"
    )


def read_options(config: pytest.Config) -> RunOptions:
    """Build the options of the run from those of pytest.

    Raises:
      pytest.UsageError: with one line, for options that cannot be carried out.
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
    """Return the option `-k` if it narrows which checks are run; what it leaves out by case is counted instead."""
    if not expression:
        return ""
    from conformance.judging.keyword_selection import mentions_checks  # imported late: it loads JAX

    return f"-k {shlex.quote(expression)}" if mentions_checks(expression) else ""


def prepare_gate(config: pytest.Config) -> None:
    """Prepare this process for planning, before JAX is loaded. Raises `pytest.UsageError`."""
    try:
        prepare_process()
    except (packages.NameTaken, CannotJudge) as error:
        raise pytest.UsageError(str(error)) from error
    names = config.getoption("--impl") or list_configured(config.rootpath)
    start_fork_server_for(names, in_process=config.getoption("--conformance-in-process"))


def list_configured(root: Path) -> list[str]:
    """List the implementations in a project's `pyproject.toml`, without loading JAX; none if it cannot be read."""
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["attention_conformance"]
        return [name for name in table["implementations"] if isinstance(name, str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # a session says what is wrong with it


def format_reminder(root: Path) -> list[str]:
    """Say in a run without judgement that the project lists implementations, and what judges them."""
    names = list_configured(root)
    if not names:
        return []
    what = names[0] if len(names) == 1 else f"{len(names)} implementations"
    return [f"attention conformance: {what} of pyproject.toml not judged; `pytest --pyargs conformance` judges"]
