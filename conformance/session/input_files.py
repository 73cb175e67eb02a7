"""Read files of records that the user names, and turn read errors into messages (`CannotJudge`)."""

from __future__ import annotations

from pathlib import Path

from conformance.session.failures import CannotJudge
from reports import runs
from reports.printable_text import make_printable
from reports.records import Record
from reports.runs import RecordedRun


def parse_input_path(name: str) -> Path:
    """Return the path of a file to read. Raises `CannotJudge` for a name that no file can have."""
    if "\0" in name:
        raise CannotJudge(f"{make_printable(name)} cannot be read: no file has a zero byte in its name")
    return Path(name)


def read_recorded_runs(name: str) -> list[RecordedRun]:
    """Read the runs of a file of records. Raises `CannotJudge` if it is no such file, or cannot be read."""
    path = parse_input_path(name)
    try:
        return runs.read_runs(path)
    except OSError as error:
        raise CannotJudge(f"{make_printable(name)} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CannotJudge(str(error)) from error


def read_records(name: str) -> list[Record]:
    """Read the records of a file. Raises `CannotJudge` if it is no file of records, or cannot be read."""
    return [record for recorded in read_recorded_runs(name) for record in recorded.records]
