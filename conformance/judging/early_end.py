"""End the run of a kernel early if none of its calls can come right.

A kernel that returns `(out, lse)`, takes another layout or lacks a parameter fails in every case for the same reason.
Its first cases tell this, and hundreds of others would only repeat it. The run of a kernel ends early if all of this
holds for the cases of the grid that were judged so far:

1. The call came right in none of them. A result that is only slightly wrong, or right under another declaration, counts
   as right here.
2. They have every coarse level of the planned cases between them (`cases.case_space.coarse_levels`), so the error
   belongs to no phase, dtype, mask, size or operand. Each run begins with such cases
   (`conformance.judging.prioritization`). Nor do all of them have an operand that a planned case lacks.
3. The call of several cases, which share no compiled program, broke the contract in the same way: it returned another
   form, shape or dtype, or raised at the same line. Or the calls of all cases ran out of time.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from cases.case_space.coarse_levels import find_coarse_levels, find_given_operands
from cases.operand_registry import OPTIONAL
from conformance.execution import kernel_errors
from conformance.judging.job import Job
from conformance.judging.rejudgement import UNSTEADY
from conformance.sandbox.kernel_process import TIMED_OUT
from reports.records import EARLY_END, ERROR, FAIL, FLAGS_DIFFER, UNJUDGED, UNSUPPORTED, Record

_Error: TypeAlias = tuple[str, ...]
_ENOUGH_PROGRAMS = 4
"""The number of compiled programs whose cases must break the contract in the same way."""
_FAR = 100.0
"""A result whose error is at least this number of bounds is wrong beyond all arithmetic."""
_VALUES: _Error = ("values",)
_TIMEOUT: _Error = ("timeout",)
_VARYING = re.compile(r"\b(?:b?float|u?int|complex|bool)\d*(?:_\w+)?\b|\d+")
"""The dtypes and numbers in a reason, which differ from case to case."""


@dataclasses.dataclass(frozen=True)
class EarlyEnd:
    """Why the jobs of a kernel end early.

    Attributes:
      example: the first record with the error that most cases have.
      same: the number of cases with this error.
      cases: the number of cases of the grid that were judged, of which none came right.
    """

    example: Record
    same: int
    cases: int


class FirstCases:
    """The cases of one kernel that were judged so far, as long as no call has come right.

    Attributes:
      end: why the jobs of the kernel end here; None as long as its calls may come right.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        """Begin with no judged case of the planned `jobs`."""
        cases = [job.case for job in jobs if job.is_on_grid]
        self._missing = frozenset[str]().union(*map(find_coarse_levels, cases))
        # The operands that some planned case lacks, and that all cases judged so far have.
        always = frozenset.intersection(*map(find_given_operands, cases)) if cases else frozenset[str]()
        self._shared = frozenset(operand.name for operand in OPTIONAL) - always
        self._is_hopeless = True
        self._failed: dict[str, tuple[_Error, Record, str]] = {}  # by case: its error, its record and its program
        self.end: EarlyEnd | None = None

    def add(self, job: Job, found: Sequence[Record]) -> None:
        """Add a judged job. Jobs that are not on the grid, and unsupported cases, say nothing about the plain call."""
        if self.end is not None or not (self._is_hopeless and job.is_on_grid):
            return
        records = [record for record in found if record.check == "forward"] or found
        records = [record for record in records if record.verdict not in (UNJUDGED, UNSUPPORTED)]
        if not records:
            return
        errors = [error for record in records if (error := _classify_failure(record)) is not None]
        if len(errors) < len(records):
            self._is_hopeless = False
            return
        self._missing -= find_coarse_levels(job.case)
        self._shared &= find_given_operands(job.case)
        self._failed[job.case.id] = errors[0], records[0], job.case.program.rpartition("/")[0]
        self.end = None if self._missing or self._shared else self._find_end()

    def _find_end(self) -> EarlyEnd | None:
        """Return the end of the jobs if enough cases have the same error."""
        by_error: dict[_Error, list[tuple[Record, str]]] = {}
        for error, record, program in self._failed.values():
            by_error.setdefault(error, []).append((record, program))
        by_error.pop(_VALUES, None)
        for error, failed in by_error.items():
            programs = len({program for _, program in failed})
            are_all_late = error == _TIMEOUT and len(failed) == len(self._failed)
            if programs >= _ENOUGH_PROGRAMS or are_all_late:
                return EarlyEnd(failed[0][0], len(failed), len(self._failed))
        return None


class EarlyEnds:
    """The kernels of a run whose jobs end early."""

    def __init__(self, jobs: Iterable[Job], *, is_enabled: bool) -> None:
        """Begin with no judged job of the planned ones; with `is_enabled=False`, none will end early."""
        by_name: dict[str, list[Job]] = {}
        for job in jobs if is_enabled else ():
            by_name.setdefault(job.implementation.name, []).append(job)
        self._first_cases = {name: FirstCases(its_jobs) for name, its_jobs in by_name.items()}

    def add(self, job: Job, found: Sequence[Record]) -> bool:
        """Add a judged job, and return whether the jobs of its kernel end here."""
        first = self._first_cases.get(job.implementation.name)
        if first is None or first.end is not None:
            return False
        first.add(job, found)
        return first.end is not None

    def has_ended(self, job: Job) -> bool:
        """Return whether the jobs of this job's kernel have ended, so that it is not judged."""
        first = self._first_cases.get(job.implementation.name)
        return first is not None and first.end is not None

    @property
    def ends(self) -> Mapping[str, EarlyEnd]:
        """Why the jobs of kernels have ended, by the name of the kernel."""
        return {name: first.end for name, first in self._first_cases.items() if first.end is not None}


def build_record(end: EarlyEnd, judged: int, planned: int, *, adapt: str, keep_going: str, timeout: str) -> Record:
    """Build the record that says that the jobs of a kernel ended early, and why.

    Args:
      end: why they ended.
      judged: the number of its jobs that were judged.
      planned: the number of all its jobs.
      adapt: the command or call that finds out the conventions of a function.
      keep_going: how the user asks for the other jobs.
      timeout: how the user gives calls more time.
    """
    example = end.example
    if example.reason.startswith(TIMED_OUT):
        same, advice = "no call returned in time", f"{timeout} gives calls more time"
    else:
        same = f"no call came right, and {end.same} end in the same error: {example.reason}"
        advice = f"Mend this first, or let `{adapt}` find out the function's names, layout and conventions"
    reason = (
        f"ended early: in the first {end.cases} cases, which are of every kind, {same}. {planned - judged:,} of "
        f"{planned:,} jobs were not judged ({keep_going} judges them too). {advice}"
    )
    return Record(
        implementation=example.implementation,
        platform=example.platform,
        case="*",
        check=EARLY_END,
        observable="all",
        verdict=UNJUDGED,
        reason=reason,
        reproduce=example.reproduce,
    )


def _classify_failure(record: Record) -> _Error | None:
    """Return what a failed call has in common with others; None if it came right, nearly right, or may come right."""
    if record.verdict not in (FAIL, ERROR) or record.remedy:
        return None
    if FLAGS_DIFFER in record.figures or UNSTEADY in record.reason:
        return None
    if record.reason.startswith(TIMED_OUT):
        return _TIMEOUT
    if record.verdict == FAIL and record.worst is not None:
        return _VALUES if record.ratio is not None and not record.ratio < _FAR else None
    if (place := kernel_errors.parse_place(record.reason)) is not None:
        return record.reason.partition(":")[0], place.file, str(place.line)
    return ("reason", _VARYING.sub("#", record.reason.partition(", and returned")[0]))
