"""Finish a run: follow up on its findings, add the records of the run as a whole, and settle its exit code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import msgspec

from conformance import interrupts
from conformance.follow_up import bug_diagnosis, follow_up
from conformance.judging import early_end, flag_share
from conformance.judging.journal import Journal, JournalWriteError
from conformance.judging.run_aggregation import aggregate_runs
from conformance.judging.runner import build_changed_file_records, build_hardware_records
from conformance.sensitivity import detection_table
from conformance.session.failures import choose_exit_code
from conformance.session.job_judging import Say, find_early_ends, say_nothing
from conformance.session.planned_run import PlannedRun
from conformance.session.resolved_run import ResolvedRun, create_runner
from conformance.session.run_comparison import compare_runs, gather_compared_runs
from impls.contract.implementation import Implementation
from reports import conformity
from reports.causes.finding_text import FindingText
from reports.changes import Comparison
from reports.page_model import Summary, build_summary, spell_diagnose_option
from reports.records import COMPLETE, FAILED, JUDGED, RED, Record, RecordedRun, RunInfo


@dataclasses.dataclass(frozen=True)
class FollowedUp:
    """The outcome of following up on a run.

    Attributes:
      is_diagnosed: whether failing kernels were compared with planted bugs.
      shrunk: lines of text that describe the smallest failing case of each finding.
    """

    is_diagnosed: bool = False
    shrunk: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionResult:
    """The result of a run: its records, its reports and its exit code.

    Attributes:
      how: how the run ended, `complete`, `interrupted` or `failed`.
      reason: why the run was interrupted or failed; otherwise empty.
      recorded: the run as it is stored in its file.
      records: the records of the run, one for each judged result.
      info: the facts that a report shows besides the records, such as coverage and environment.
      summary: the content that all reports of the run show.
      stale: red records of expected failures that no longer fail.
      flag_excess: failures of kernels of which too many passes depend on compiler flags (`judging.flag_share`).
      shrunk: lines of text that describe the smallest failing case of each finding.
      lacks_platform: whether nothing was judged on the required platform.
      exit_code: 0 if every implementation conforms, 1 if one does not, 2 if the run could not judge. A run that a
        signal stopped has 128 plus the number of the signal.
      comparison: what changed since the baseline; None without a baseline.
    """

    how: str
    reason: str
    recorded: RecordedRun
    records: Sequence[Record]
    info: RunInfo
    summary: Summary
    stale: Sequence[Record] = ()
    flag_excess: Sequence[Record] = ()
    shrunk: Sequence[str] = ()
    lacks_platform: bool = False
    exit_code: int
    comparison: Comparison | None = None

    @property
    def findings(self) -> Sequence[FindingText]:
        """The findings of the run: the causes that explain its failures, in words."""
        return self.summary.findings


def follow_up_run(planned: PlannedRun, journal: Journal, say: Say = say_nothing) -> FollowedUp:
    """Confirm findings, compare failing kernels with planted bugs, and with `--shrink` shrink findings.

    Findings of kernels whose jobs ended early are neither confirmed nor compared: every call fails.
    A stop signal ends only this step: results are still written. Raises `JournalWriteError`.
    """
    if interrupts.get_received_signal() or not any(record.verdict in RED for record in journal.recorded.records):
        return FollowedUp()
    resolved, spec = planned.resolved, planned.resolved.spec
    ended = find_early_ends(planned, journal.recorded.done).ends
    # What this process can judge further is on the platform where it was judged.
    elsewhere = resolved.remote.pool.platforms if resolved.remote is not None else frozenset()
    implementations = [each for each in resolved.implementations if each.accelerator.platform not in elsewhere]
    followed = [each for each in implementations if each.name not in ended]
    is_diagnosed = False
    if followed and not spec.is_one_case_or_problem:
        seconds = follow_up.FollowUpSeconds(
            spec.confirm_seconds, spec.diagnose_seconds, spell_diagnose_option(spec.command)
        )
        runner = create_runner(resolved, confirmed=0)
        follow_up.follow_up(journal, followed, runner, seconds, spent=journal.seconds, say=say)
        is_diagnosed = spec.diagnose_seconds != 0
    shrunk: list[str] = []
    if spec.shrink and interrupts.get_received_signal() is None:
        from conformance.follow_up import shrinker  # imported late: it loads Hypothesis

        with interrupts.end_on_signal():
            for line in shrinker.shrink_findings(journal, implementations, create_runner(resolved), say):
                shrunk.append(line)  # one by one, so that a signal loses no finished line
    return FollowedUp(is_diagnosed, shrunk)


def finish_run(
    planned: PlannedRun, journal: Journal, how: str, reason: str, followed: FollowedUp = FollowedUp()
) -> SessionResult:
    """Add the records that concern the run as a whole, close the files, and build the result.

    If a file cannot be written, the run has failed, but its records are still reported.

    Args:
      planned: the run.
      journal: its files.
      how: how the run ended, `complete`, `interrupted` or `failed`.
      reason: why the run was interrupted or failed; otherwise empty.
      followed: what was done after judging.
    """
    resolved = planned.resolved
    stale: list[Record] = []
    excess: list[Record] = []
    try:
        found = journal.recorded.records
        journal.add_records(_set_repetition(resolved, build_hardware_records(_list_without_chip(resolved, found))))
        journal.add_records(_set_repetition(resolved, _build_early_end_records(planned, journal)))
        found = journal.recorded.records
        excess = _set_repetition(resolved, flag_share.find_excess(found))
        journal.add_records(excess)
        found = journal.recorded.records
        journal.add_records(_set_repetition(resolved, build_changed_file_records(journal.run, found)))
        is_whole = resolved.spec.is_whole and len(journal.recorded.done) == len(planned.plan.jobs)
        if how == COMPLETE and is_whole:
            stale = resolved.settings.find_stale_entries(journal.recorded.records, jax.__version__)
            journal.add_records(stale)
        journal.end(how, reason=reason)
    except JournalWriteError as error:
        how, reason = FAILED, abandon(journal, error)
    recorded, required = journal.recorded, resolved.spec.require_platform
    records, info = merge_runs([recorded], command=journal.run.command, is_followed_up=followed.is_diagnosed)
    lacks_platform = bool(required) and not any(r.platform == required and r.verdict in JUDGED for r in records)
    code = compute_exit_code(records, resolved.implementations, how, lacks_platform=lacks_platform)
    return SessionResult(
        how=how,
        reason=reason,
        recorded=recorded,
        records=records,
        info=info,
        summary=build_summary(records, info),
        stale=stale,
        flag_excess=excess,
        shrunk=followed.shrunk,
        lacks_platform=lacks_platform,
        exit_code=interrupts.resolve_exit_code(code),
    )


def _build_early_end_records(planned: PlannedRun, journal: Journal) -> list[Record]:
    """Build a record for each kernel whose jobs ended early."""
    spec, done = planned.resolved.spec, journal.recorded.done
    is_python = not spec.option_prefix
    found = []
    for name, end in find_early_ends(planned, done).ends.items():
        its_jobs = [planned.numbers[id(job)] for job in planned.jobs if job.implementation.name == name]
        judged = sum(number in done for number in its_jobs)
        if judged < len(its_jobs):
            found.append(
                early_end.build_record(
                    end,
                    judged,
                    len(its_jobs),
                    adapt="conformance.adapt(function)" if is_python else f"python -m conformance adapt --impl={name}",
                    keep_going=f"{spec.spell('keep_going')}{'=True' if is_python else ''}",
                    timeout=f"{spec.spell('timeout')}=SECONDS",
                )
            )
    return found


def _list_without_chip(resolved: ResolvedRun, found: Sequence[Record]) -> list[Implementation]:
    """Return the judged implementations of which no record is from the chip that they are written for."""
    judged = {record.implementation for record in found}
    on_chip = {(record.implementation, record.platform) for record in found}
    return [
        each
        for each in resolved.implementations
        if each.name in judged and (each.name, each.accelerator.platform) not in on_chip
    ]


def _set_repetition(resolved: ResolvedRun, found: Iterable[Record]) -> list[Record]:
    """Return records of the run as a whole with what reproduces them, if the caller formats that."""
    if (format_repetition := resolved.caller.format_repetition) is None:
        return list(found)
    return [msgspec.structs.replace(record, reproduce=format_repetition(record)) for record in found]


def abandon(journal: Journal, error: JournalWriteError) -> str:
    """End a run without writing its files further, and return the reason for the user."""
    reason = f"{error}; what was judged before is in it"
    journal.abandon(reason)
    return reason


def compare_with_baseline(resolved: ResolvedRun, result: SessionResult) -> SessionResult:
    """Add the comparison with the baseline, if there is one, to the result. A regression makes the exit code 1.

    Raises:
      CannotJudge: if this run has no record to compare.
    """
    if resolved.baseline is None:
        return result
    now = gather_compared_runs([result.recorded], "this run", command=resolved.spec.command)
    changed = compare_runs(resolved.baseline, now)
    code = result.exit_code or (1 if changed.regressions else 0)
    return dataclasses.replace(result, comparison=changed, exit_code=code)


def merge_runs(
    recorded: Sequence[RecordedRun], *, command: str, is_followed_up: bool = False
) -> tuple[list[Record], RunInfo]:
    """Merge the records of runs, and collect what a report shows besides them, such as the likeliest planted bugs.

    Args:
      recorded: the runs.
      command: the command that the report shows.
      is_followed_up: whether failing kernels were compared with planted bugs after judging.
    """
    records, info = aggregate_runs(recorded, command=command, detection=detection_table.load_table())
    return records, bug_diagnosis.add_diagnoses(info, records, is_followed_up=is_followed_up)


def compute_exit_code(
    records: Sequence[Record], implementations: Sequence[Implementation], how: str, *, lacks_platform: bool
) -> int:
    """Return 0 if all implementations conform, 1 if one does not or only in part, 2 if one could not be judged.

    An implementation whose accelerator this machine lacks counts only if some check judged it all the same, or if no
    other implementation counts.
    """
    if how == FAILED:
        return 2
    judged = {record.implementation for record in records if record.verdict in JUDGED}
    present = [each for each in implementations if each.accelerator.absent is None or each.name in judged]
    standings = {
        conformity.compute_conformity(
            [r for r in records if r.implementation == each.name], each.unasked, each.open_questions
        )
        for each in present or implementations
    }
    is_judged = not lacks_platform and how == COMPLETE and conformity.NOT_JUDGED not in standings
    return choose_exit_code(is_wrong=bool(conformity.WRONG & standings), is_judged=is_judged)
