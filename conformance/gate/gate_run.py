"""Follow one session through a run of pytest: its tests, their records, what comes of them, and the files of the run.

A run of pytest may have several sessions: that of `pytest --pyargs conformance`, and one for each `conformance_tests`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from conformance.check_api.scopes import GRID
from conformance.checks import CHECKS_BY_NAME
from conformance.gate.completeness import find_missing_judgements
from conformance.gate.keyword_selection import select_checks
from conformance.gate.node_ids import NamedJob
from conformance.judging import flag_share, provenance
from conformance.judging.early_end import EarlyEnds
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner, build_changed_file_records
from conformance.session.failures import CannotJudge
from conformance.session.job_judging import find_early_ends, open_journal
from conformance.session.planned_run import PlannedRun, describe_unasked, find_number, load_resumed, select_jobs
from conformance.session.process_setup import isolate_settings
from conformance.session.resolved_run import create_runner
from conformance.session.run_outputs import check_outputs, find_step_summary
from conformance.session.run_result import FollowedUp, finish_run, follow_up_run, merge_runs
from conformance.session.run_spec import OPTIONS, RunSpec
from impls.contract.implementation import Implementation
from reports.conformity import describe_uncalled
from reports.page_model import Summary, build_summary
from reports.records import End, Record, RecordedRun, Run, serialize_recorded_run


class PlannedTests:
    """The tests of a planned run: one for each job, before `-k` and ids leave any out.

    Attributes:
      planned: the run.
      jobs: the job of each test.
      ids: what stands in brackets in the id of each test.
    """

    def __init__(self, planned: PlannedRun, build_id: Callable[[Job], str]) -> None:
        """Make a test of each job."""
        self.planned = planned
        self._build_id = build_id
        self.jobs: list[Job] = list(planned.jobs)
        self._by_id = {build_id(job): job for job in self.jobs}
        self._narrowed: dict[int, Job] = {}  # by the identity of the planned job

    @property
    def ids(self) -> list[str]:
        """Return the part in brackets of each test's id."""
        return list(self._by_id)

    @functools.cached_property
    def _runner(self) -> Runner:
        return create_runner(self.planned.resolved)

    def load_resumed(self) -> None:
        """Take over the jobs that the file of `--conformance-resume` has finished. Raises `CannotJudge`."""
        self.planned = load_resumed(self.planned)

    def judge(self, job: Job) -> tuple[int | None, list[Record]]:
        """Return the number of a job in the plan, if it has one, and its records, which a resumed file may have."""
        number = find_number(self.planned, job)
        if number is not None and (found := self.planned.finished.get(number)) is not None:
            return number, list(found)
        return number, self._runner.judge(job)

    @functools.cached_property
    def _ends(self) -> EarlyEnds:
        return find_early_ends(self.planned, self.planned.finished)

    def note_judged(self, number: int | None, found: Sequence[Record]) -> str:
        """Note the records of a job that was judged here or by a worker, by its number in the plan.

        Returns:
          The name of the implementation whose further jobs end with this one; empty if none do.
        """
        if number is None or not self._ends.add(job := self.planned.plan.jobs[number], found):
            return ""
        return job.implementation.name

    def describe_end(self, job: Job) -> str:
        """Return why a job is not judged, if the jobs of its implementation have ended early; empty if it is."""
        end = self._ends.ends.get(job.implementation.name)
        return "" if end is None else describe_unjudged(end.example.reason)

    def add_named_jobs(self, named: Sequence[NamedJob], *, only: bool) -> None:
        """Add tests for jobs that the plan lacks, such as those of another level or seed.

        Args:
          named: the jobs that pasted ids name.
          only: whether the run has no other tests.
        """
        further = {}
        for one in named:
            if (
                one.text not in self._by_id
                and (job := _build_job(one, self.planned.resolved.implementations)) is not None
            ):
                further[one.text] = job
        if not (further or only):
            return
        texts = {one.text for one in named}
        kept = {id(job) for text, job in self._by_id.items() if not only or text in texts}
        before = self.planned.resolved.spec.selection
        self.planned = select_jobs(
            self.planned,
            lambda job: job if id(job) in kept else None,
            " ".join(filter(None, (_describe_named(len(texts)) if only else "", before))),
            further=tuple(further.values()),
        )
        self._by_id = {text: job for text, job in self._by_id.items() if id(job) in kept} | further
        self.jobs = list(self._by_id.values())

    def narrow(self, expression: str, keywords: Sequence[str]) -> None:
        """Leave out what an expression of `-k` leaves out.

        Args:
          expression: as pytest takes it. It names checks.
          keywords: what words match besides implementations, cases and checks.
        """

        def select(job: Job) -> Job | None:
            checks = select_checks(expression, job, [*keywords, self._build_id(job)])
            if checks:
                self._narrowed[id(job)] = job if checks == job.checks else dataclasses.replace(job, checks=checks)
            return self._narrowed.get(id(job))

        self.planned = select_jobs(self.planned, select, self.planned.resolved.spec.selection)

    def narrow_job(self, job: Job, keywords: Sequence[str], expression: str) -> Job | None:
        """Return the job of a test with the checks that `-k` selects, or None if it selects none."""
        checks = select_checks(expression, job, keywords)
        if not checks:
            return None
        narrowed = self._narrowed.get(id(job), job)
        return narrowed if narrowed.checks == checks else dataclasses.replace(job, checks=checks)

    def find_id(self, case: str, check: str) -> str:
        """Return what stands in brackets in the id of the test that runs a check on a case, planned or not."""
        for text, job in self._by_id.items():
            if job.case.id == case and (check not in CHECKS_BY_NAME or check in {each.name for each in job.checks}):
                return text
        is_grid = check not in CHECKS_BY_NAME or CHECKS_BY_NAME[check].scope is GRID
        return case if is_grid else f"{check}-{case}"


def describe_unjudged(error: str) -> str:
    """Describe why a test judges nothing after the jobs of its kernel have ended early; `error` may be empty."""
    why = f" as in the cases judged before: {error}" if error else " in the cases judged before"
    return f"not judged, since no call came right{why} (--conformance-{OPTIONS['keep_going'].name} judges it)"


def _describe_named(count: int) -> str:
    return "1 test by its id" if count == 1 else f"{count} tests by their ids"


def _build_job(named: NamedJob, implementations: Sequence[Implementation]) -> Job | None:
    """Build the job that an id names; None if there is no such implementation, case or check."""
    from cases.case import CaseIdError
    from cases.case_id import parse_case_id

    fitting = [each for each in implementations if named.implementation in ("", each.name)]
    if not fitting or not CHECKS_BY_NAME.keys() >= set(named.checks):
        return None
    checks = [check for check in CHECKS_BY_NAME.values() if check.scope is GRID]
    try:
        case = parse_case_id(named.case)
    except (CaseIdError, ValueError):
        return None
    return Job(fitting[0], case, tuple(CHECKS_BY_NAME[name] for name in named.checks) or tuple(checks))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """The results of the tests of one kernel in a test file.

    Attributes:
      recorded: the run as it is stored in a file.
      records: its records, merged.
      summary: the content of its reports.
      failures: sentences on what fails the run as a whole, by name.
      said: lines that were printed while findings were confirmed.
      notes: notes on how the run was planned.
    """

    recorded: RecordedRun
    records: Sequence[Record]
    summary: Summary
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    said: Sequence[str] = ()
    notes: Sequence[str] = ()


class SuiteRun:
    """The records of the tests of one kernel, as they come.

    Attributes:
      run: the run record.
      tests: ids of the tests that gave records.
    """

    def __init__(self, run: Run, planned: PlannedRun | None) -> None:
        """Begin a suite.

        Args:
          run: the run record.
          planned: the run that is judged in this process; None where workers of pytest-xdist judge.
        """
        self.run = run
        self.tests: set[str] = set()
        self._planned = planned
        self._journal: Journal | None = None if planned is None else open_journal(planned)
        self._done: dict[int, tuple[Record, ...]] = {}
        self._others: list[Record] = []
        self._started = time.perf_counter()

    def add(self, test: str, number: int | None, found: Sequence[Record]) -> None:
        """Add the records of a job, by its number in the plan; None for a part of a job."""
        self.tests.add(test)
        if self._journal is not None:
            self._journal.add(number, found)
        elif number is None:
            self._others += found
        else:
            self._done[number] = (*self._done.get(number, ()), *found)

    @property
    def is_planned(self) -> bool:
        """Whether this process has planned the tests."""
        return self._planned is not None

    def continue_in(self, planned: PlannedRun) -> None:
        """Record the results of workers in a run of this process, which can follow up on them.

        Raises:
          CannotJudge: if this process plans other jobs than the workers.
        """
        if planned.run.jobs != self.run.jobs:
            raise CannotJudge("other jobs were planned here than by the workers")
        self._journal = open_journal(planned, self.run, started=self._started)
        for number, found in self._done.items():
            self._journal.add(number, found)
        if self._others:
            self._journal.add_records(self._others)
        self._planned = planned

    def finish(self, how: str, reason: str, *, command: str, obstacle: str = "") -> SuiteResult:
        """Follow up on the findings, and summarize the records.

        Args:
          how: how the run ended, `complete`, `interrupted` or `failed`.
          reason: why the run was interrupted or failed; otherwise empty.
          command: the command that the report shows.
          obstacle: why findings cannot be followed up here; empty if they can.
        """
        said: list[str] = []
        if self._planned is not None and self._journal is not None:
            followed = FollowedUp()
            if not (reason or obstacle):
                with isolate_settings():
                    followed = follow_up_run(self._planned, self._journal, said.append)
            result = finish_run(self._planned, self._journal, how, reason, followed)
            failures = _describe_failures([*result.stale, *result.flag_excess])
            recorded, found, summary = result.recorded, result.records, result.summary
            notes = [*self._planned.notes, *describe_unasked(self._planned.resolved.implementations)]
        else:
            excess = flag_share.find_excess(self._list_records())
            recorded = self._build_recorded_run(how, reason, excess)
            found, info = merge_runs([recorded], command=command)
            failures = _describe_failures(excess)
            summary, notes = build_summary(found, info), []
        if summary.findings and obstacle:
            said.append(f"findings are neither confirmed nor diagnosed: {obstacle} (-n 0 does both)")
        is_whole = len(recorded.done) == len(self.run.jobs)
        if is_whole and (sentence := find_missing_judgements(found)):
            failures["something_is_judged"] = sentence
        failures |= describe_uncalled(summary.implementations)
        return SuiteResult(recorded=recorded, records=found, summary=summary, failures=failures, said=said, notes=notes)

    def _list_records(self) -> list[Record]:
        return [*itertools.chain.from_iterable(self._done.values()), *self._others]

    def _build_recorded_run(self, how: str, reason: str, excess: Sequence[Record]) -> RecordedRun:
        others = (*self._others, *excess, *build_changed_file_records(self.run, self._list_records()))
        end = End(ended=provenance.format_current_time(), how=how, reason=reason, jobs=len(self._done))
        return RecordedRun(run=self.run, done=self._done, others=others, end=end)


def _describe_failures(found: Sequence[Record]) -> dict[str, str]:
    return {f"{record.check}[{record.implementation}]": record.reason for record in found}


def write_outputs(before: Sequence[RecordedRun], here: Sequence[RecordedRun], options: RunSpec) -> None:
    """Write the outputs that the command line names, for all sessions of the run.

    Args:
      before: the gate's own run, whose records are in the files already; empty without one.
      here: the runs of test files.
      options: those of the command line.

    Raises:
      CannotJudge: if a file cannot be written.
    """
    outputs = check_outputs(report=options.report, json=options.json, prefix=options.option_prefix)
    outputs = dataclasses.replace(outputs, step=None if before else find_step_summary())
    lines = "".join(map(serialize_recorded_run, here))
    for path in outputs.journals:
        try:
            with path.open("a" if before else "w", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            raise CannotJudge(f"{path} cannot be written: {error.strerror or error}") from error
    if outputs.report is not None or outputs.step is not None:
        records, info = merge_runs([*before, *here], command=options.command)
        outputs.write(build_summary(records, info))
