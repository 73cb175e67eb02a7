"""Runs: what holds for all records of one, the first and the last line of its file, and which jobs are done.

A file of records begins with a `Run`, which says under what the records came about and which jobs are planned. The
records of a job follow as one piece, closed by a line that names the job. The last line is an `End`. Where it is
missing, the run was killed. Older files have records alone: what they lack is unknown, and never taken for granted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from conformance import records
from conformance.record_schema import (
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
)
from conformance.records import Record, RecordFileError

COMPLETE = "complete"
INTERRUPTED = "interrupted"
FAILED = "failed"
ENDS = (COMPLETE, INTERRUPTED, FAILED)
"""How a run ends: to its end, stopped from outside or by `--fail-fast`, or by an error that is not the kernel's."""
OWN_PROCESS = "ran in a process of its own that was "
"""Beginning of `Kernel.place` where a kernel had a process of its own; how that was confined follows."""
DIGEST_OF = "digest of "
"""Beginning of the name that a file has among the provenance of a run."""
# What a job may have in place of a record of its checks: why there is none.
_SUBSTITUTE_CHECKS = ("support", "discrimination", "devices", "hardware")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoveringArraySize:
    """What a covering array covers: combinations of `strength` levels, so many of them feasible."""

    strength: int
    combinations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What is known of an implementation that is judged.

    Attributes:
      package: what it is installed by, with the version; empty for a file or a module that no package has.
      source: a digest of its source, where no version tells it from another.
      declared: what it declares that is data, arithmetic included.
      asks_less: what of this asks less of it than the defaults, as it is written.
      block_lengths: lengths of blocks that it takes as a sequence's, if it takes no others (`judging.reach`).
      arrays: the covering arrays whose cases it is judged by.
      declined: how many cases it does not support.
      parted: how many pairs of operands and masks it does not support together, of how many that it does each.
      place: where it ran, as a sentence goes on, if that was neither a confined process of its own nor, for one of this
        project's, the judge's.
      files: that its process read as it was loaded, with their digests, and the packages that it imported.
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
        """Tell whether a user's kernel ran without being confined by both Landlock and seccomp."""
        return bool(self.place) and not self.place.startswith(f"{OWN_PROCESS}confined")


@dataclasses.dataclass(frozen=True)
class PlannedJob:
    """A job by names: an implementation, a case, checks; `rows` are the case's in the arrays, empty where it has none.

    A row has one character for each axis that is varied, which stands for the level.
    """

    implementation: str
    case: str
    checks: tuple[str, ...]
    rows: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, tuple[str, ...]]:
        """What identifies the job among those of one provenance."""
        return (self.implementation, self.case, self.checks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What holds for all records of a run, written before any of them.

    Attributes:
      started: when, in UTC.
      command: as it can be repeated.
      level: of the grid, or what is judged in place of one.
      seeds: base seeds of the grid.
      narrowed: to what it is narrowed, as whoever runs it writes it; empty if it is not.
      query: what was asked for, by option.
      shard: `2/3` where two others judge the rest.
      environment: versions, commit, devices, flags.
      tolerances: those in force.
      kernels: what is known of each implementation.
      jobs: those that are planned, other shards' included.
      whole: how many jobs each implementation has without the query of cases, where that is known.
      resumed: when it was taken up again.
      id: drawn for this run, so that one run of a file is told from another; empty in older files.
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
        """What tells it from the other runs of its file: its id, or when it started, in older files."""
        return self.id or self.started

    def provenance(self, implementation: str) -> dict[str, str]:
        """All that two runs must share for their records of an implementation to be answers to the same questions."""
        kernel = self.kernels.get(implementation, Kernel())
        known = {
            "declared": records.serialize_strict_json(kernel.declared),
            "package": kernel.package,
            "source": kernel.source,
        }
        known |= {"place": kernel.place} | {f"{DIGEST_OF}{name}": digest for name, digest in kernel.files.items()}
        return (
            known | dict(self.environment) | {"tolerances": records.serialize_strict_json({"": list(self.tolerances)})}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How a run ended: when, how (`ENDS`), why if not by itself, how many jobs were done, and how long it took."""

    ended: str
    how: str
    reason: str = ""
    jobs: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as its file has it.

    Attributes:
      source: the file's name, empty for the run of this process.
      run: none in older files.
      done: the records of each job that is done, by its place among those planned.
      others: records of no job: of a job that was not finished, or of the run as a whole.
      probes: what was judged to confirm findings, beside what was planned: no record of the run, and counted nowhere.
      end: none if the run was killed, or goes on.
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
        """All records, in the order in which they came."""
        return [*itertools.chain.from_iterable(self.done.values()), *self.others]

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its end by itself."""
        return self.end is not None and self.end.how == COMPLETE


def serialize_run(run: Run) -> str:
    """The first line of a file. Jobs are written compactly, by numbers of names."""
    names, asked = list(run.kernels), list(dict.fromkeys(job.checks for job in run.jobs))
    numbers = {checks: number for number, checks in enumerate(asked)}
    jobs = [[names.index(job.implementation), numbers[job.checks], job.case, *job.rows] for job in run.jobs]
    data = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    if not run.id:  # as in older files, where a reader takes what it lacks for none
        del data["id"]
    kernels = {name: dataclasses.asdict(kernel) for name, kernel in run.kernels.items()}
    return records.serialize_strict_json(
        {"schema": RUN_SCHEMA} | data | {"kernels": kernels, "asked": asked, "jobs": jobs}
    )


def serialize_job(number: int, found: Iterable[Record]) -> str:
    """The lines of a job that is done: its records, then its number and how many they are."""
    lines = [records.serialize_record(record) for record in found]
    closing = records.serialize_strict_json({"schema": JOB_SCHEMA, "job": number, "records": len(lines)})
    return "".join(f"{line}\n" for line in (*lines, closing))


def serialize_probe(probe: Record) -> str:
    """The line of a judgement that confirms a finding, or does not."""
    return records.serialize_strict_json({"schema": PROBE_SCHEMA, "record": records.to_plain_data(probe)}) + "\n"


def serialize_end(end: End) -> str:
    """The last line of a file."""
    return records.serialize_strict_json({"schema": END_SCHEMA} | dataclasses.asdict(end))


def read_runs(path: Path) -> list[RecordedRun]:
    """Read the runs of a file: one, or several where files were joined; older records alone are a run without a `Run`.

    Raises:
      OSError: if the file cannot be read.
      RecordFileError: for a line that is none of ours, or that contradicts the lines before it.
    """
    lines, note = records.read_lines(path)
    found: list[RecordedRun] = []
    reading = _RunReader(path.name)
    for number, line in lines:
        try:
            if isinstance(line, RunLine):
                found += reading.finished()
                reading = _RunReader(path.name, _build_run(line))
            else:
                reading.take(line)
        except ValueError as error:
            remedy = "altered or of another version, so judge again"
            raise RecordFileError(f"{path}:{number} is no word of a conformance run: {error} ({remedy})") from error
    try:
        found += reading.finished()
    except ValueError as error:
        raise RecordFileError(f"{path} is no conformance run: {error}") from error
    return [*found[:-1], dataclasses.replace(found[-1], note=note)] if found else []


class _RunReader:
    """A run that is being read."""

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
            raise ValueError(f"job {number} has {count} records, and {len(self._open)} stand before it")
        first = len(self._open) - count
        self._others += self._open[:first]
        theirs = self._open[first:]
        for record in theirs:
            _reject_foreign_record(record, self._run.jobs[number])
        # One that was judged twice, as by a plugin that runs failing tests again, has both: the worse answer counts.
        self._done[number] = (*self._done.get(number, ()), *theirs)
        self._open = []

    def finished(self) -> list[RecordedRun]:
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
    """Refuse a record that answers another question than the job which it is said to be of."""
    if record.implementation != job.implementation:
        raise ValueError(f"a job of {job.implementation} has a record of {record.implementation}")
    if record.case != job.case:
        raise ValueError(f"a job of the case {job.case} has a record of {record.case}")
    if record.check not in (*job.checks, *_SUBSTITUTE_CHECKS):
        raise ValueError(f"a job of {', '.join(job.checks)} has a record of {record.check}")


def _reject_unknown_implementation(found: Iterable[Record], run: Run) -> None:
    """Refuse records of an implementation that the run does not judge: nothing says of what kernel they are."""
    for record in found:
        if record.implementation not in run.kernels:
            raise ValueError(f"the run judges {', '.join(run.kernels)}, and has a record of {record.implementation}")


def _build_run(line: RunLine) -> Run:
    """Build the run that a decoded line has. Raises `ValueError` where its parts contradict each other."""
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
        raise ValueError(f"a job of {name} has {len(rows)} rows, and its arrays are {len(kernels[name].arrays)}")
    return PlannedJob(name, job.case, asked[job.checks], rows)


def list_differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """In which parts of their provenance two runs differ, those first that say most."""
    names = dict.fromkeys((*_MOST_TELLING, *one, *other))
    return [name for name in names if one.get(name) != other.get(name)]


# Parts of a provenance by how much they tell a person.
_MOST_TELLING = ("declared", "package", "source", "place", "attention-conformance", "commit", "jax", "jaxlib", "libtpu")
