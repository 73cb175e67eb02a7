"""Read and write files of records, and files of measurements.

A file has one JSON object per line, and the field `schema` names the kind of line. Lines can be appended, and files of
several processes and machines can be merged. A line with unknown fields, missing fields or fields of another type is
refused. Every string is read as one printable line.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.structs import force_setattr

from reports import output_files
from reports.printable_text import make_all_printable, make_printable, may_need_escapes
from reports.records.measurement import MEASUREMENT_SCHEMA, Measurement
from reports.records.record import BRANCHES, PASS, RECORD_SCHEMA, Record
from reports.records.run_record import (
    END_SCHEMA,
    JOB_SCHEMA,
    PROBE_SCHEMA,
    PROPOSAL_SCHEMA,
    RUN_SCHEMA,
    End,
    JobEntry,
    JobLine,
    PlannedJob,
    ProbeLine,
    Proposal,
    RecordedRun,
    Run,
    RunFacts,
    RunLine,
)
from reports.records.strict_json import serialize_strict_json

Line: TypeAlias = Record | RunLine | JobLine | ProbeLine | Proposal | End
_Decoded = TypeVar("_Decoded")

_LINE_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_MEASUREMENT_DECODER = msgspec.json.Decoder(Measurement)
# Fields of a record whose values many records of a file have in common.
_SHARED_FIELDS = (
    *("implementation", "platform", "case", "check", "observable", "verdict", "dtype", "features"),
    *("reason", "remedy", "pattern", "reproduce", "host", "limit", "rms_limit", "margin", "seconds"),
)
# Names of checks in records that stand in place of a job's own checks, and say why those did not run.
_SUBSTITUTE_CHECKS = ("support", "discrimination", "devices", "hardware")
_MAX_MESSAGE_LENGTH = 500


class RecordFileError(ValueError):
    """A file is not a valid file of records. The message is one line that names the file, the line and the field."""

    def __init__(self, message: str) -> None:
        line = make_printable(message)
        super().__init__(line if len(line) <= _MAX_MESSAGE_LENGTH else f"{line[:_MAX_MESSAGE_LENGTH]} …")


def serialize_record(record: Record) -> str:
    """Serialize a record to one line of strict JSON; infinities and NaN become the strings `inf`, `-inf`, `nan`."""
    return serialize_strict_json(_to_plain_data(record))


def _to_plain_data(record: Record) -> dict[str, Any]:
    """Return the JSON object of a record, without its label and its empty optional fields."""
    data = msgspec.structs.asdict(record)
    del data["run"]
    for name in ("figures", "files", "pattern", "error_map", "host"):  # most records have none
        if not data[name]:
            del data[name]
    return data | {"schema": RECORD_SCHEMA}


def serialize_run(run: Run) -> str:
    """Serialize a run record to the first line of a file. Jobs name kernels and lists of checks by index."""
    names, asked = list(run.kernels), list(dict.fromkeys(job.checks for job in run.jobs))
    numbers = {checks: number for number, checks in enumerate(asked)}
    data = msgspec.structs.asdict(run)
    del data["jobs"]
    if not run.id:  # a run from an older file stays without one
        del data["id"]
    jobs = [[names.index(job.implementation), numbers[job.checks], job.case, *job.rows] for job in run.jobs]
    later = {name: data.pop(name) for name in ("whole", "resumed", "id") if name in data}
    return serialize_strict_json({"schema": RUN_SCHEMA} | data | {"jobs": jobs} | later | {"asked": asked})


def serialize_job(number: int, found: Iterable[Record]) -> str:
    """Serialize a finished job to lines: its records, then a line with the job's index and the number of records."""
    lines = [serialize_record(record) for record in found]
    closing = serialize_strict_json({"schema": JOB_SCHEMA, "job": number, "records": len(lines)})
    return "".join(f"{line}\n" for line in (*lines, closing))


def serialize_probe(probe: Record) -> str:
    """Serialize a probe to a line; a probe is a record that confirms or refutes a finding."""
    return serialize_strict_json({"schema": PROBE_SCHEMA, "record": _to_plain_data(probe)}) + "\n"


def serialize_proposal(proposal: Proposal) -> str:
    """Serialize the declarations that are proposed for an implementation to a line."""
    return serialize_strict_json({"schema": PROPOSAL_SCHEMA} | msgspec.to_builtins(proposal)) + "\n"


def serialize_end(end: End) -> str:
    """Serialize the end of a run to the last line of a file."""
    return serialize_strict_json({"schema": END_SCHEMA} | msgspec.structs.asdict(end))


def serialize_recorded_run(recorded: RecordedRun) -> str:
    """Serialize a whole run to the content of a file of records."""
    assert recorded.run is not None
    jobs = "".join(serialize_job(number, found) for number, found in recorded.done.items())
    others = "".join(serialize_record(record) + "\n" for record in recorded.others)
    probes = "".join([*map(serialize_probe, recorded.probes), *map(serialize_proposal, recorded.proposals)])
    end = "" if recorded.end is None else serialize_end(recorded.end) + "\n"
    return f"{serialize_run(recorded.run)}\n{jobs}{others}{probes}{end}"


def serialize_measurement(measurement: Measurement) -> str:
    """Serialize a measurement to one line of strict JSON; an infinite error becomes the string `inf`."""
    return serialize_strict_json(msgspec.structs.asdict(measurement) | {"schema": MEASUREMENT_SCHEMA})


def write_measurements(path: Path, measurements: Iterable[Measurement]) -> None:
    """Write measurements to a file in the given order: as they were timed in each round, the baseline first."""
    output_files.write_text(path, "".join(serialize_measurement(measurement) + "\n" for measurement in measurements))


def parse_record(line: str) -> Record:
    """Parse the record in a line that `serialize_record` wrote.

    Raises:
      ValueError: if the line is not a record, or if the record's fields contradict each other.
    """
    found = _parse_line(line)
    if not isinstance(found, Record):
        raise ValueError(f"the line has the schema {found.__struct_config__.tag!r}, must have {RECORD_SCHEMA!r}")
    return found


def parse_run(line: str) -> Run:
    """Parse a run record from the line that `serialize_run` makes. Raises `ValueError` for any other text."""
    found = _parse_line(line)
    if not isinstance(found, RunLine):
        raise ValueError("the line is no run record")
    return _build_run(found)


def _parse_line(text: str) -> Line:
    """Parse a line of a file of records. Raises `ValueError`; the message is one sentence that names the field."""
    line = _decode(text, _LINE_DECODER)
    if isinstance(line, Record):
        _reject_contradictions(line)
    elif isinstance(line, ProbeLine):
        _reject_contradictions(line.record)
    return line


def _decode(text: str, decoder: msgspec.json.Decoder[_Decoded]) -> _Decoded:
    try:
        if may_need_escapes(text):
            return msgspec.convert(make_all_printable(msgspec.json.decode(text)), decoder.type)
        return decoder.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _reject_contradictions(record: Record) -> None:
    """Raise `ValueError` if fields of the record contradict each other: the judge cannot have written such a record."""
    for name, value, limit in (("ratio", record.ratio, record.limit), ("rms", record.rms, record.rms_limit)):
        most = sys.float_info.max if limit is None else limit
        if record.verdict == PASS and value is not None and not value <= most:  # NaN is a contradiction too
            raise ValueError(f"a pass whose {name} is {value:g}, which must be at most {most:g}")
    if (drawn := record.error_map) is not None:
        for name, lines in (("cells", drawn.cells), ("mask", drawn.mask)):
            if len(set(map(len, lines))) > 1:
                raise ValueError(f"the lines of {name} in error_map must have one length")


def _build_run(line: RunLine) -> Run:
    """Build a run record from its line. Raises `ValueError` if its parts contradict each other."""
    facts = {name: getattr(line, name) for name in RunFacts.__struct_fields__}
    names = list(line.kernels)
    return Run(**facts, jobs=tuple(_build_planned_job(job, names, line) for job in line.jobs))


def _build_planned_job(job: JobEntry, names: Sequence[str], line: RunLine) -> PlannedJob:
    for what, place, known in (("kernel", job.kernel, names), ("list of checks", job.checks, line.asked)):
        if place >= len(known):
            raise ValueError(f"a job is of the {what} number {place}, and there are {len(known)}")
    name = names[job.kernel]
    rows = tuple(row for row in (job.row, job.row_of_sizes) if row is not msgspec.UNSET)
    if 0 < len(rows) < (count := len(line.kernels[name].arrays)):
        raise ValueError(f"a job of {name} has {len(rows)} rows for {count} covering arrays")
    return PlannedJob(name, job.case, line.asked[job.checks], rows)


def read_jsonl(path: Path) -> list[Record]:
    """Read the records of a file.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: if a line is not one that this project writes.
    """
    return [line for _, line in iter_lines(path) if isinstance(line, Record)]


def iter_lines(path: Path) -> Iterator[tuple[int, Line | str]]:
    """Yield the numbered lines of a file as they are read. A last line that is cut off is yielded as a note.

    A process that is killed while it writes leaves part of a line. That is no error. Equal values of records are one
    object, since a file may have hundreds of thousands of records.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: if any other line is not one that this project writes.
    """
    pool: dict[Any, Any] = {}
    for number, text, is_whole in _iter_text(path, "conformance records"):
        try:
            line = _parse_line(text)
        except ValueError as error:
            if not is_whole and number > 1:
                yield number, f"{path.name}: the last line is torn, as if its process was killed while it wrote"
                return
            remedy = "altered or of another version, so judge again" if number > 1 else "give a file that `run` wrote"
            raise RecordFileError(f"{path}:{number} is not a conformance record: {error} ({remedy})") from error
        if isinstance(line, Record):
            _share_values(line, pool)
        yield number, line


def _iter_text(path: Path, content: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the number and text of each line of a file, and whether the line is whole."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                line = text.removesuffix("\n")
                yield number, line, line is not text
    except UnicodeDecodeError:
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError as error:  # this error has the place within the file
            raise RecordFileError(f"{path} is not a file of {content}: {error.reason} at byte {error.start}") from error


def _share_values(record: Record, pool: dict[Any, Any]) -> None:
    """Replace values of a record by the equal values of earlier records."""
    for name in _SHARED_FIELDS:
        value = getattr(record, name)
        if (shared := pool.setdefault(value, value)) is not value:
            force_setattr(record, name, shared)


def read_runs(path: Path) -> list[RecordedRun]:
    """Read the runs of a file: usually one, or several if files were concatenated.

    Records without a run record, as in older files, become a `RecordedRun` whose `run` is None.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: if a line is not one that this project writes, or contradicts the lines before it.
    """
    found: list[RecordedRun] = []
    source = make_printable(path.name)
    reading, note = _RunReader(source), ""
    for number, line in iter_lines(path):
        try:
            if isinstance(line, str):
                note = line
            elif isinstance(line, RunLine):
                found += reading.finish()
                reading = _RunReader(source, _build_run(line))
            else:
                reading.take(line)
        except ValueError as error:
            remedy = "altered or of another version, so judge again"
            raise RecordFileError(f"{path}:{number} is not a line of a conformance run: {error} ({remedy})") from error
    try:
        found += reading.finish()
    except ValueError as error:
        raise RecordFileError(f"{path} is no conformance run: {error}") from error
    return [*found[:-1], dataclasses.replace(found[-1], note=note)] if found else []


class _RunReader:
    """Builds a `RecordedRun` from the lines of a file, one line at a time."""

    def __init__(self, source: str, run: Run | None = None) -> None:
        self._source = source
        self._run = run
        self._done: dict[int, tuple[Record, ...]] = {}
        self._open: list[Record] = []
        self._others: list[Record] = []
        self._probes: list[Record] = []
        self._proposals: list[Proposal] = []
        self._end: End | None = None

    def take(self, line: Record | JobLine | ProbeLine | Proposal | End) -> None:
        if isinstance(line, Record):
            self._open.append(line)
        elif isinstance(line, ProbeLine):
            self._probes.append(line.record)
        elif isinstance(line, Proposal):
            self._proposals.append(line)
        elif isinstance(line, End):
            self._end = line
        else:
            self._close(line.job, line.records)

    def _close(self, number: int, count: int) -> None:
        if self._run is None or number >= len(self._run.jobs):
            raise ValueError(f"there is no job {number}")
        if count > len(self._open):
            raise ValueError(f"job {number} has {count} records, but only {len(self._open)} come before its line")
        first = len(self._open) - count
        self._others += self._open[:first]
        theirs = self._open[first:]
        for record in theirs:
            _reject_foreign_record(record, self._run.jobs[number])
        # A pytest plugin may repeat a failing test. Then the job has the records of both attempts, and the worse count.
        self._done[number] = (*self._done.get(number, ()), *theirs)
        self._open = []

    def finish(self) -> list[RecordedRun]:
        others = (*self._others, *self._open)
        if self._run is None and not others:
            return []
        if self._run is not None:
            _reject_unknown_implementation((*others, *self._probes, *self._proposals), self._run)
        return [
            RecordedRun(
                source=self._source,
                run=self._run,
                done=self._done,
                others=others,
                probes=tuple(self._probes),
                proposals=tuple(self._proposals),
                end=self._end,
            )
        ]


def _reject_foreign_record(record: Record, job: PlannedJob) -> None:
    """Raise `ValueError` if a record in the block of a job does not belong to that job."""
    if record.implementation != job.implementation:
        raise ValueError(f"a job of {job.implementation} has a record of {record.implementation}")
    if record.case != job.case and BRANCHES in job.checks:
        return  # a case that the search for branches added, on which every check of the grid is run
    if record.case != job.case:
        raise ValueError(f"a job of the case {job.case} has a record of {record.case}")
    if record.check not in (*job.checks, *_SUBSTITUTE_CHECKS):
        raise ValueError(f"a job of {', '.join(job.checks)} has a record of {record.check}")


def _reject_unknown_implementation(found: Iterable[Record | Proposal], run: Run) -> None:
    """Raise `ValueError` for records of an implementation that the run does not judge."""
    for record in found:
        if record.implementation not in run.kernels:
            raise ValueError(f"the run judges {', '.join(run.kernels)}, but has a record of {record.implementation}")


def has_measurements(path: Path) -> bool:
    """Check whether the first line of a file is a measurement."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return f'"{MEASUREMENT_SCHEMA}"' in file.readline()


def read_measurements(path: Path) -> list[Measurement]:
    """Read the measurements of a file.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: if a line is not a measurement.
    """
    found = []
    for number, text, _ in _iter_text(path, "measurements"):
        try:
            found.append(_decode(text, _MEASUREMENT_DECODER))
        except ValueError as error:
            remedy = "altered or of another version, so measure again"
            raise RecordFileError(f"{path}:{number} is not a measurement: {error} ({remedy})") from error
    return found
