"""What the arguments of a command name: implementations, cases, files; and refusing what cannot be done."""

from __future__ import annotations

from pathlib import Path

from cases.case import Case, CaseIdError, parse
from conformance import records
from conformance.calling import registry
from conformance.commands.errors import CannotJudge
from conformance.contract import Implementation
from conformance.judging import settings
from conformance.records import Record


def reject_negative(seed: int) -> None:
    """Refuse a seed that no case can have."""
    if seed < 0:
        raise CannotJudge(f"--seed must not be negative, got {seed}")


def reject_no_workers(jobs: int | None) -> None:
    """Refuse a number of processes that nothing can run in."""
    if jobs is not None and jobs < 1:
        raise CannotJudge(f"--jobs must be at least 1, got {jobs}")


def load_settings() -> settings.Settings:
    """The settings of the project that the command is given in."""
    try:
        return settings.load(Path.cwd())
    except settings.SettingsError as error:
        raise CannotJudge(str(error)) from error


def find(name: str, products: str | None = None) -> Implementation:
    """The implementation called `name`."""
    try:
        return registry.find(name, products=products)  # type: ignore[arg-type] # argparse has checked the choice
    except registry.ImplementationNotFound as error:
        raise CannotJudge(str(error)) from error


def case(text: str) -> Case:
    """The case with this id."""
    try:
        return parse(text)
    except CaseIdError as error:
        raise CannotJudge(str(error)) from error


def read(name: str) -> list[Record]:
    """The records in a file."""
    try:
        return records.read_jsonl(Path(name))
    except OSError as error:
        raise CannotJudge(f"{name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CannotJudge(str(error)) from error
