"""Define runs, and read and write them as lines of a file of records: run record, finished jobs, end of the run.

A file of records begins with a run record (`Run`): the conditions of the run and its planned jobs. The records of each
finished job follow as one block, and a line that names the job closes the block. The last line is an `End`; if it is
missing, the run was killed. Older files have only records. What they do not say is treated as unknown.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from reports import records
from reports.printable_text import make_printable
from reports.record_schema import (
    END_SCHEMA,
    JOB_SCHEMA,
    PROBE_SCHEMA,
    RUN_SCHEMA,
    EndLine,
    JobFields,
    JobLine,
    KernelFields,
    ProbeLine,
    RunLine,
    decode_line,
)
from reports.records import Record, RecordFileError

COMPLETE = "complete"
INTERRUPTED = "interrupted"
FAILED = "failed"
"""The three ways in which a run ends: complete; stopped by a signal or by `--fail-fast`; or failed by our own error."""
OWN_PROCESS = "ran in a process of its own that was "
"""The start of `Kernel.place` for a kernel in its own process. The rest of the phrase says how it was confined."""
DIGEST_OF = "digest of "
"""The prefix of the key of a file's digest in `Run.provenance`."""
# Names of checks in records that stand in place of a job's own checks, and say why those did not run.
_SUBSTITUTE_CHECKS = ("support", "discrimination", "devices", "hardware")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoveringArraySize:
    """The size of a covering array: the number of feasible combinations of `strength` levels that it covers."""

    strength: int
    combinations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """The entry of one implementation in a run record.

    Attributes:
      package: the package that installed the implementation, with the version; empty if no package did.
      source: a digest of its source, if the version does not identify the source.
      declared: its declarations that can be stored as data, including its arithmetic.
      asks_less: its declarations, as they are written in code, what it lacks, and limits that were raised.
      block_lengths: the usual block lengths (64 to 1024) that it accepts as sequence lengths; empty if it accepts all.
      arrays: the sizes of the covering arrays that it is judged with.
      declined: the number of cases of its grids that it does not support.
      parted: two counts of pairs of operands and masks, where each member of a pair is supported by itself. The first
        is the number of pairs that are not supported together, the second is the number of all pairs.
      place: where it ran, as a phrase that ends a sentence. Empty for the usual place: a confined process of its own,
        or the judge's process for an implementation of this project.
      files: digests of the files that its process read while loading it, and versions of the packages it imported.
    """

    package: str = ""
    source: str = ""
    declared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    asks_less: tuple[str, ...] = ()
    block_lengths: tuple[int, ...] = ()
    arrays: tuple[CoveringArraySize, ...] = ()
    declined: int = 0
    parted: tuple[int, int] = (0, 0)
    place: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_unsandboxed(self) -> bool:
        """Whether a user's kernel ran without being confined by both Landlock and seccomp."""
        return bool(self.place) and not self.place.startswith(f"{OWN_PROCESS}confined")


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """A planned job: the names of an implementation, a case and checks.

    `rows` are the case's rows of the covering arrays; empty if the case is in none. A row is a string with one
    character for each varied axis. The character stands for the level on that axis.
    """

    implementation: str
    case: str
    checks: tuple[str, ...]
    rows: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        """The identity of the job among the jobs of runs with the same provenance."""
        return (self.implementation, self.case, self.checks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The run record: the facts that hold for all records of a run. It is the first line of their file.

    Attributes:
      started: the time when the run began, in UTC.
      command: the command that repeats the run.
      level: the level of the grid, or the name of what is judged instead of a grid.
      seeds: base seeds of the grid.
      narrowed: the options that select only a part of the level, as the user wrote them; empty if none does.
      query: the options that say what to judge, by name.
      shard: this run's share of the jobs, such as `2/3` if two other runs judge the rest; empty for all jobs.
      environment: versions, commit, devices, flags.
      tolerances: the limits in force.
      kernels: facts on each implementation, by name.
      jobs: the planned jobs, those of other shards included.
      whole: for each implementation, the number of all jobs of the level, without the selection of cases, if known.
      resumed: the times when the run was continued.
      id: a random name that distinguishes the runs of one file; empty in older files.
    """

    started: str
    command: str
    level: str
    seeds: tuple[int, ...] = ()
    narrowed: str = ""
    query: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shard: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerances: tuple[Mapping[str, Any], ...] = ()
    kernels: Mapping[str, Kernel] = dataclasses.field(default_factory=dict)
    jobs: tuple[PlannedJob, ...] = ()
    whole: Mapping[str, int] = dataclasses.field(default_factory=dict)
    resumed: tuple[str, ...] = ()
    id: str = ""

    @property
    def identity_mark(self) -> str:
        """The mark that distinguishes the run from others of its file: its id, or in older files its start."""
        return self.id or self.started

    def provenance(self, implementation: str) -> dict[str, str]:
        """Return, by name, the facts in which two runs must agree to compare their records of an implementation."""
        kernel = self.kernels.get(implementation, Kernel())
        known = {
            "declared": records.serialize_strict_json(dict(sorted(kernel.declared.items()))),
            "package": kernel.package,
            "source": kernel.source,
        }
        known |= {"place": kernel.place} | {f"{DIGEST_OF}{name}": digest for name, digest in kernel.files.items()}
        return (
            known | dict(self.environment) | {"tolerances": records.serialize_strict_json({"": list(self.tolerances)})}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended.

    Attributes:
      ended: the time when the run ended, in UTC.
      how: `COMPLETE`, `INTERRUPTED` or `FAILED`.
      reason: why the run did not complete; empty if it did.
      jobs: the number of finished jobs.
      seconds: the duration of the run.
    """

    ended: str
    how: str
    reason: str = ""
    jobs: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run, as it is read from its file.

    Attributes:
      source: the file's name; empty for the run of this process.
      run: the run record; None in older files.
      done: the records of each finished job, by the job's index among the planned jobs.
      others: records that belong to no finished job: of an unfinished job, or of the run as a whole.
      probes: records that confirm findings. They do not count as records of the run.
      end: the end of the run; None if the run was killed, or is still going on.
      note: what is wrong with the file, if anything.
    """

    source: str = ""
    run: Run | None = None
    done: Mapping[int, tuple[Record, ...]] = dataclasses.field(default_factory=dict)
    others: tuple[Record, ...] = ()
    probes: tuple[Record, ...] = ()
    end: End | None = None
    note: str = ""

    @property
    def records(self) -> list[Record]:
        """All records: those of the finished jobs, in the order of their ends, then the others."""
        return [*itertools.chain.from_iterable(self.done.values()), *self.others]

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its end by itself."""
        return self.end is not None and self.end.how == COMPLETE


def serialize_run(run: Run) -> str:
    """Serialize a run record to the first line of a file. Jobs name kernels and lists of checks by index."""
    names, asked = list(run.kernels), list(dict.fromkeys(job.checks for job in run.jobs))
    numbers = {checks: number for number, checks in enumerate(asked)}
    jobs = [[names.index(job.implementation), numbers[job.checks], job.case, *job.rows] for job in run.jobs]
    data = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    if not run.id:  # a run from an older file stays without one
        del data["id"]
    kernels = {name: dataclasses.asdict(kernel) for name, kernel in run.kernels.items()}
    return records.serialize_strict_json(
        {"schema": RUN_SCHEMA} | data | {"kernels": kernels, "asked": asked, "jobs": jobs}
    )


def serialize_job(number: int, found: Iterable[Record]) -> str:
    """Serialize a finished job to lines: its records, then a line with the job's index and the number of records."""
    lines = [records.serialize_record(record) for record in found]
    closing = records.serialize_strict_json({"schema": JOB_SCHEMA, "job": number, "records": len(lines)})
    return "".join(f"{line}\n" for line in (*lines, closing))


def serialize_probe(probe: Record) -> str:
    """Serialize a probe to a line; a probe is a record that confirms or refutes a finding."""
    return records.serialize_strict_json({"schema": PROBE_SCHEMA, "record": records.to_plain_data(probe)}) + "\n"


def serialize_end(end: End) -> str:
    """Serialize the end of a run to the last line of a file."""
    return records.serialize_strict_json({"schema": END_SCHEMA} | dataclasses.asdict(end))


def serialize_recorded_run(recorded: RecordedRun) -> str:
    """Serialize a whole run to the content of a file of records."""
    assert recorded.run is not None
    jobs = "".join(serialize_job(number, found) for number, found in recorded.done.items())
    others = "".join(records.serialize_record(record) + "\n" for record in recorded.others)
    probes = "".join(map(serialize_probe, recorded.probes))
    end = "" if recorded.end is None else serialize_end(recorded.end) + "\n"
    return f"{serialize_run(recorded.run)}\n{jobs}{others}{probes}{end}"


def parse_run(line: str) -> Run:
    """Parse a run record from the line that `serialize_run` makes. Raises `ValueError` for any other text."""
    found = decode_line(line)
    if not isinstance(found, RunLine):
        raise ValueError("the line is no run record")
    return _build_run(found)


def read_runs(path: Path) -> list[RecordedRun]:
    """Read the runs of a file: usually one, or several if files were concatenated.

    Records without a run record, as in older files, become a `RecordedRun` whose `run` is None.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: if a line is not one that this project writes, or contradicts the lines before it.
    """
    lines, note = records.read_lines(path)
    found: list[RecordedRun] = []
    source = make_printable(path.name)
    reading = _RunReader(source)
    for number, line in lines:
        try:
            if isinstance(line, RunLine):
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
        self._end: End | None = None

    def take(self, line: Record | JobLine | ProbeLine | EndLine) -> None:
        if isinstance(line, Record):
            self._open.append(line)
        elif isinstance(line, ProbeLine):
            self._probes.append(records.build_record(line.record))
        elif isinstance(line, EndLine):
            self._end = End(**msgspec.structs.asdict(line))
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
            _reject_unknown_implementation((*others, *self._probes), self._run)
        probes = tuple(self._probes)
        return [
            RecordedRun(
                source=self._source, run=self._run, done=self._done, others=others, probes=probes, end=self._end
            )
        ]


def _reject_foreign_record(record: Record, job: PlannedJob) -> None:
    """Raise `ValueError` if a record in the block of a job does not belong to that job."""
    if record.implementation != job.implementation:
        raise ValueError(f"a job of {job.implementation} has a record of {record.implementation}")
    if record.case != job.case:
        raise ValueError(f"a job of the case {job.case} has a record of {record.case}")
    if record.check not in (*job.checks, *_SUBSTITUTE_CHECKS):
        raise ValueError(f"a job of {', '.join(job.checks)} has a record of {record.check}")


def _reject_unknown_implementation(found: Iterable[Record], run: Run) -> None:
    """Raise `ValueError` for records of an implementation that the run does not judge."""
    for record in found:
        if record.implementation not in run.kernels:
            raise ValueError(f"the run judges {', '.join(run.kernels)}, and has a record of {record.implementation}")


def _build_run(line: RunLine) -> Run:
    """Build a run record from a decoded line. Raises `ValueError` if its parts contradict each other."""
    fields = msgspec.structs.asdict(line)
    names, asked = list(line.kernels), fields.pop("asked")
    fields["query"] = msgspec.to_builtins(line.query)
    fields["kernels"] = {name: _build_kernel(kernel) for name, kernel in line.kernels.items()}
    fields["jobs"] = tuple(_build_planned_job(job, names, asked, line.kernels) for job in line.jobs)
    return Run(**fields)


def _build_kernel(fields: KernelFields) -> Kernel:
    arrays = tuple(CoveringArraySize(**msgspec.structs.asdict(array)) for array in fields.arrays)
    return Kernel(**msgspec.structs.asdict(fields) | {"arrays": arrays})


def _build_planned_job(
    job: JobFields, names: Sequence[str], asked: Sequence[tuple[str, ...]], kernels: Mapping[str, KernelFields]
) -> PlannedJob:
    for what, place, known in (("kernel", job.kernel, names), ("list of checks", job.checks, asked)):
        if place >= len(known):
            raise ValueError(f"a job is of the {what} number {place}, and there are {len(known)}")
    name = names[job.kernel]
    rows = tuple(row for row in (job.row, job.row_of_sizes) if row is not msgspec.UNSET)
    if 0 < len(rows) < len(kernels[name].arrays):
        raise ValueError(f"a job of {name} has {len(rows)} rows for {len(kernels[name].arrays)} covering arrays")
    return PlannedJob(name, job.case, asked[job.checks], rows)


def list_differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """List the names of the facts in which two provenances (`Run.provenance`) differ, the most important first."""
    names = dict.fromkeys((*_MOST_TELLING, *one, *other))
    return [name for name in names if one.get(name) != other.get(name)]


# The facts of a provenance that matter most to a reader, the most important first.
_MOST_TELLING = ("declared", "package", "source", "place", "attention-conformance", "commit", "jax", "jaxlib", "libtpu")
