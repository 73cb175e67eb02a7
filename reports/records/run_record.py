"""Define run records, and the other lines of a file that are no records, such as finished jobs and the end of a run.

A file of records begins with a run record (`Run`): the conditions of the run and its planned jobs. The records of each
finished job follow as one block, and a line that names the job closes the block. The last line is an `End`; if it is
missing, the run was killed. Older files have only records. What they do not say is treated as unknown.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from reports.records.record import Figure, Record
from reports.records.strict_json import serialize_strict_json

RUN_SCHEMA = "attention-conformance/run/2"
JOB_SCHEMA = "attention-conformance/job/1"
END_SCHEMA = "attention-conformance/end/1"
PROBE_SCHEMA = "attention-conformance/probe/1"
PROPOSAL_SCHEMA = "attention-conformance/proposal/1"

COMPLETE = "complete"
INTERRUPTED = "interrupted"
FAILED = "failed"
"""The three ways in which a run ends: complete; stopped by a signal or by `--fail-fast`; or failed by our own error."""
OWN_PROCESS = "ran in a process of its own that was "
"""The start of `Kernel.place` for a kernel in its own process. The rest of the phrase says how it was confined."""
DIGEST_OF = "digest of "
"""The prefix of the key of a file's digest in `Run.provenance`."""
SHARD_PATTERN = r"([1-9]\d{0,3})/([1-9]\d{0,3})"
"""A number of a part and the number of parts, at most 9999: each part that is missing is reported."""

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Time: TypeAlias = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+]00:00\Z")]
# A row of a covering array: one character for each varied axis.
Row: TypeAlias = Annotated[str, Meta(max_length=256)]


class CoveringArraySize(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a covering array: the number of feasible combinations of `strength` levels that it covers."""

    strength: Annotated[int, Meta(ge=1, le=8)]
    combinations: Count


class Kernel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entry of one implementation in a run record.

    Attributes:
      package: the package that installed the implementation, with the version; empty if no package did.
      source: a digest of its source, if the version does not identify the source.
      declared: its declarations that can be stored as data, including its arithmetic.
      asks_less: its declarations, as they are written in code, what it lacks, and limits that were raised.
      unasked: its parameters to which the run passed nothing.
      open_questions: what has to be answered before its declarations count as meant.
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
    declared: Mapping[str, Any] = {}
    asks_less: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    open_questions: tuple[str, ...] = ()
    block_lengths: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    arrays: tuple[CoveringArraySize, ...]
    declined: Count = 0
    parted: tuple[Count, Count] = (0, 0)
    place: str = ""
    files: Mapping[str, str] = {}

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


class Query(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The query of a run: the options of the command `run` by name, or the arguments of pytest."""

    impl: list[str] | UnsetType = UNSET
    all: bool | UnsetType = UNSET
    level: Literal["smoke", "quick", "standard", "deep"] | UnsetType | None = UNSET
    case: str | UnsetType | None = UNSET
    cases: str | UnsetType | None = UNSET
    regressions: bool | UnsetType = UNSET
    problem: str | UnsetType | None = UNSET
    full_size: bool | UnsetType = UNSET
    check: list[str] | UnsetType = UNSET
    branches: list[str] | UnsetType = UNSET
    pullback: Literal["plain", "residuals"] | UnsetType | None = UNSET
    seed: list[Count] | UnsetType = UNSET
    products: Literal["exact", "tf32", "bf16"] | UnsetType | None = UNSET
    in_process: bool | UnsetType = UNSET
    timeout: Figure | UnsetType | None = UNSET
    memory: Figure | UnsetType | None = UNSET
    pytest: list[str] | UnsetType = UNSET


class RunFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts of a run record, without its planned jobs, which have another form in a file.

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
      whole: for each implementation, the number of all jobs of the level, without the selection of cases, if known.
      resumed: the times when the run was continued.
      id: a random name that distinguishes the runs of one file; empty in older files.
    """

    started: Time
    command: str
    level: str
    seeds: tuple[int, ...]
    narrowed: str = ""
    query: Query = Query()
    shard: Annotated[str, Meta(pattern=rf"^({SHARD_PATTERN})?\Z")] = ""
    environment: Mapping[str, str] = {}
    tolerances: tuple[Mapping[str, Any], ...]
    kernels: Mapping[str, Kernel]
    whole: Mapping[str, Count] = {}
    resumed: tuple[Time, ...]
    id: str = ""


class Run(RunFacts, frozen=True, kw_only=True):
    """The run record: the facts that hold for all records of a run, and its planned jobs.

    It is the first line of their file. `jobs` are the planned jobs, those of other shards included.
    """

    jobs: tuple[PlannedJob, ...] = ()

    @property
    def identity_mark(self) -> str:
        """The mark that distinguishes the run from others of its file: its id, or in older files its start."""
        return self.id or self.started

    def provenance(self, implementation: str) -> dict[str, str]:
        """Return, by name, the facts in which two runs must agree to compare their records of an implementation."""
        kernel = self.kernels.get(implementation, Kernel(arrays=()))
        known = {
            "declared": serialize_strict_json(dict(sorted(kernel.declared.items()))),
            "package": kernel.package,
            "source": kernel.source,
        }
        known |= {"place": kernel.place} | {f"{DIGEST_OF}{name}": digest for name, digest in kernel.files.items()}
        return known | dict(self.environment) | {"tolerances": serialize_strict_json({"": list(self.tolerances)})}


class JobEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A planned job in a file, as a list: indices into `kernels` and `asked`, the case, its covering-array rows.

    `asked` lists the distinct tuples of checks. A case has one row in each covering array, or none.
    """

    kernel: Count
    checks: Count
    case: str
    row: Row | UnsetType = UNSET
    row_of_sizes: Row | UnsetType = UNSET


class RunLine(RunFacts, frozen=True, kw_only=True, tag_field="schema", tag=RUN_SCHEMA):
    """The conditions of a run and its planned jobs."""

    jobs: tuple[JobEntry, ...]
    asked: tuple[tuple[str, ...], ...]


class JobLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=JOB_SCHEMA):
    """The end of a finished job: its index among the planned jobs, and the number of its records before this line."""

    job: Count
    records: Count


class ProbeLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=PROBE_SCHEMA):
    """A record that confirms or refutes a finding."""

    record: Record


class DeclarationTrial(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure that was judged again under declarations.

    Attributes:
      check: the check that had failed.
      case: the case on which it had failed.
      declarations: the declarations, as they are written in code, or names of conventions that need a wrapper.
      wrong: the results that are still wrong; `all` if the call raised.
    """

    check: str
    case: str
    declarations: tuple[str, ...]
    wrong: tuple[str, ...] = ()


class Proposal(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=PROPOSAL_SCHEMA):
    """The declarations under which findings of an implementation pass, and the failures that were judged under them.

    Attributes:
      implementation: the name of the implementation.
      platform: the platform on which it was judged.
      declarations: the declarations, as they are written in code, that together cover all findings that some cover.
      wrappers: conventions that no declaration has, in words: a wrapper that converts them covers findings too.
      loosens: for each declaration that lets something be judged less strictly, what that is.
      is_function: whether it is a plain function, on which the decorator `declare` can be put.
      declares: whether it declares something already.
      trials: the failures that were judged again.
    """

    implementation: str
    platform: str
    declarations: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    loosens: Mapping[str, str] = {}
    is_function: bool = True
    declares: bool = False
    trials: tuple[DeclarationTrial, ...] = ()


class End(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag=END_SCHEMA):
    """How a run ended.

    Attributes:
      ended: the time when the run ended, in UTC.
      how: `COMPLETE`, `INTERRUPTED` or `FAILED`.
      reason: why the run did not complete; empty if it did.
      jobs: the number of finished jobs.
      seconds: the duration of the run.
    """

    ended: Time
    how: Annotated[str, Meta(pattern=rf"^({COMPLETE}|{INTERRUPTED}|{FAILED})\Z")]
    reason: str = ""
    jobs: Count = 0
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
      proposals: the declarations that were tried on findings.
      end: the end of the run; None if the run was killed, or is still going on.
      note: what is wrong with the file, if anything.
    """

    source: str = ""
    run: Run | None = None
    done: Mapping[int, tuple[Record, ...]] = dataclasses.field(default_factory=dict)
    others: tuple[Record, ...] = ()
    probes: tuple[Record, ...] = ()
    proposals: tuple[Proposal, ...] = ()
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


def list_differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """List the names of the facts in which two provenances (`Run.provenance`) differ, the most important first."""
    names = dict.fromkeys((*_MOST_TELLING, *one, *other))
    return [name for name in names if one.get(name) != other.get(name)]


# The facts of a provenance that matter most to a reader, the most important first.
_MOST_TELLING = ("declared", "package", "source", "place", "attention-conformance", "commit", "jax", "jaxlib", "libtpu")
