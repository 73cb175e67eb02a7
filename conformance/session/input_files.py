"""Read files of records and of measurements that the user names, and turn read errors into messages (`CannotJudge`)."""

from __future__ import annotations

from pathlib import Path

from conformance.session.failures import CannotJudge
from reports import records
from reports.printable_text import make_printable
from reports.records import RecordedRun
from reports.records.measurement import Measurement


def parse_input_path(name: str) -> Path:
    """Return the path of a file to read. Raises `CannotJudge` for a name that no file can have."""
    if "\0" in name:
        raise CannotJudge(f"{make_printable(name)} cannot be read: no file has a zero byte in its name")
    return Path(name)


def read_recorded_runs(name: str) -> list[RecordedRun]:
    """Read the runs of a file of records. Raises `CannotJudge` if it is no such file, or cannot be read."""
    path = parse_input_path(name)
    try:
        return records.read_runs(path)
    except OSError as error:
        raise CannotJudge(f"{make_printable(name)} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CannotJudge(str(error)) from error


def holds_measurements(name: str) -> bool:
    """Tell whether a file has measurements. Raises `CannotJudge` if it cannot be read."""
    try:
        return records.has_measurements(Path(name))
    except OSError as error:
        raise CannotJudge(f"{name} cannot be read: {error.strerror or error}") from error


def read_measurements(name: str) -> list[Measurement]:
    """Read the measurements of a file. Raises `CannotJudge` if it is no such file."""
    try:
        return records.read_measurements(Path(name))
    except ValueError as error:
        raise CannotJudge(str(error)) from error
