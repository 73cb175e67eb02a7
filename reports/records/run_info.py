"""Define what a report shows of runs besides their records. It is built from run records, and no file has it."""

from __future__ import annotations

import dataclasses
from typing import Any

from reports.records.record import Record
from reports.records.run_record import Proposal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """The number of planned and judged jobs of an implementation, and whether these are all jobs of a level.

    Attributes:
      level: the level of its grid.
      narrowed: the options that selected only a part of the level, as the user wrote them; empty if none did.
      planned: the number of planned jobs; None where it is not known.
      done: the number of judged jobs.
      whole: the number of all jobs of the level, if the run selected only some of its cases.
      stopped: whether the run was stopped before its end.
      known: whether a run record holds these values.
    """

    level: str = ""
    narrowed: str = ""
    planned: int | None = None
    done: int = 0
    whole: int | None = None
    stopped: bool = False
    known: bool = True

    @property
    def is_partial(self) -> bool:
        """Whether some planned jobs were not judged."""
        return self.planned is not None and self.done < self.planned

    @property
    def is_whole(self) -> bool:
        """Whether every job of the level was judged; False if unknown, and always False for the level `smoke`."""
        return self.known and not (self.narrowed or self.is_partial or self.stopped or self.level == "smoke")


@dataclasses.dataclass(frozen=True)
class SimilarBug:
    """A planted bug that the failures of a finding resemble.

    Attributes:
      name: the name of the bug.
      family: what the bug is about, such as `soft cap`.
      reference: where a real project had it.
      similarity: from 0 to 1; 1 means wrong by the same numbers in the same places.
    """

    name: str
    family: str
    reference: str
    similarity: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The planted bugs that a finding resembles.

    Attributes:
      bugs: the most similar ones, the first most of all; empty if none is similar.
      cases: how many cases the finding was compared on; 0 if there was no time to compare it, or no case of its kind.
      known: how many planted bugs there are.
      is_shown: whether the finding shows on any of these cases, or could have without the limit of time.
    """

    bugs: tuple[SimilarBug, ...]
    cases: int
    known: int
    is_shown: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Everything that a report shows besides records, for one run or several merged runs.

    Keys of mappings are labels of implementations (which name the platform) or names of implementations.

    Attributes:
      command: the command that repeats the run.
      level: the level of the grid, if `extents` is empty.
      environment: versions, devices and flags.
      tolerances: the limits in force, one row for each.
      coverage: what the cases of each grid cover.
      seconds: the time of judging, in seconds.
      interrupted: whether the run was stopped, if `extents` is empty.
      notes: lines for the reader.
      detection: the planted bugs that each check detects (`sensitivity.detection_table`).
      declared: declarations that are weaker than the defaults.
      unasked: parameters to which nothing was passed.
      open_questions: what has to be answered before declarations count as meant.
      few_blocks: warnings that the judged lengths span too few blocks (`judging.block_coverage`).
      extents: how many of the planned jobs were judged.
      narrowed: the options that selected only a part of the level, if `extents` is empty.
      probes: records that confirm findings; they are not counted.
      proposals: the declarations that were tried on findings.
      diagnoses: which planted bugs each finding resembles, by the finding's key.
      files: for implementations that several runs judged, the files of these runs.
      runs: for the same implementations, the marks that identify these runs within their files (`Run.identity_mark`).
      unsandboxed: whether the kernel ran without a complete sandbox.
      check_meanings: what each check tests, in one sentence, by the name of the check.
    """

    command: str
    level: str
    environment: dict[str, str]
    tolerances: list[dict[str, Any]]
    coverage: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    detection: dict[str, Any] | None = None
    declared: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unasked: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    open_questions: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    few_blocks: dict[str, str] = dataclasses.field(default_factory=dict)
    extents: dict[str, Extent] = dataclasses.field(default_factory=dict)
    narrowed: str = ""
    probes: list[Record] = dataclasses.field(default_factory=list)
    proposals: dict[str, Proposal] = dataclasses.field(default_factory=dict)
    diagnoses: dict[tuple[str, ...], Diagnosis] = dataclasses.field(default_factory=dict)
    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    runs: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unsandboxed: dict[str, bool] = dataclasses.field(default_factory=dict)
    check_meanings: dict[str, str] = dataclasses.field(default_factory=dict)
