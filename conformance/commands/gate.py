"""What the pytest gate writes: the records of all its processes, as they come, and the page at the end."""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from conformance.commands import compare, run_annotations
from conformance.commands.command_errors import CannotJudge
from conformance.commands.probes import bug_diagnosis, follow_up
from conformance.commands.run_outputs import Outputs, find_step_summary
from conformance.execution import implementation_registry
from conformance.judging import gate, provenance
from conformance.judging.journal import Journal, ResumeMismatchError, describe_resumed_jobs, load_resumed_run
from conformance.judging.run_aggregation import aggregate_runs
from conformance.judging.run_plan import Plan
from conformance.judging.runner import Runner, build_changed_file_records, build_hardware_records
from conformance.judging.settings import Settings
from conformance.records import RED, Record, make_printable
from conformance.runs import RecordedRun, Run
from conformance.sandbox.kernel_options import KernelOptions
from conformance.sensitivity import detection_table
from reports import changes, terminal
from reports.changes import Comparison
from reports.page_model import Summary, build_summary

_WIDEST = 400


def described(
    planned: Plan,
    settings: Settings,
    *,
    arguments: Sequence[str],
    level: str,
    seed: int,
    narrowed: str,
    shard: str,
    kernels: KernelOptions,
) -> Run:
    """What holds for all records of a run of the gate."""
    implementations = list({job.implementation.name: job.implementation for job in planned.jobs}.values())
    return provenance.build_run(
        implementations,
        planned,
        command=" ".join(["pytest", *map(shlex.quote, arguments)]),
        level=level,
        seeds=(seed,),
        narrowed=narrowed,
        query={"pytest": list(arguments)},
        shard=shard,
        limits=settings.tolerances.rows(),
        kernels=kernels,
    )


def kept_from(place: Path, run: Run) -> tuple[Run, dict[int, tuple[Record, ...]]]:
    """The run that is gone on with and the records of the jobs that are done.

    Raises:
      ValueError: with one line, if the file is of another run or cannot be read.
    """
    try:
        return load_resumed_run(place, run)
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror or error}") from error
    except ResumeMismatchError as error:
        raise ValueError(str(error)) from error


def baseline(name: str | None, written: Sequence[str | None]) -> compare.ComparedRuns | None:
    """The run to compare with. Raises `ValueError` with one line if there is none, or if this run writes it."""
    if name is None:
        return None
    places = [Path(place) for place in written if place is not None]
    if Path(name).resolve() in [found.resolve() for place in places for found in (place, place.with_suffix(".jsonl"))]:
        raise ValueError(f"{name} is written by this run too: give the records another file")
    try:
        return compare.read_compared_runs(name)
    except CannotJudge as error:
        raise ValueError(str(error)) from error


class Written:
    """The files of a run of the gate, open from its first record to its end."""

    def __init__(
        self,
        run: Run,
        planned: Plan,
        *,
        report: Path | None,
        json: Path | None,
        kept: dict[int, tuple[Record, ...]] | None = None,
        baseline: compare.ComparedRuns | None = None,
        suite: Callable[[str, str], None] | None = None,
    ) -> None:
        """Begin the files; properties of the run go to the `suite` at its end. Raises `CannotWrite`."""
        self._suite = suite
        self._baseline = baseline
        self.changed: Comparison | None = None
        self.told: list[str] = []
        self.verdict: list[str] = []
        self._from_file = [describe_resumed_jobs(len(kept))] if kept else []
        self._implementations = {job.implementation.name: job.implementation for job in planned.jobs}
        self._outputs = Outputs(report=report, json=json, markdown=None, step=find_step_summary())
        self._run = run
        self._started = time.perf_counter()
        self._journal = Journal(self._outputs.journals, run, kept)

    def take(self, job: int | None, found: Sequence[Record]) -> None:
        """The records of a job that is done, or of a part of one. Raises `CannotWrite`."""
        if job is None:
            self._journal.add(found)
        else:
            self._journal.job(job, found)

    def probe(self, runner: Runner, seconds: Sequence[float | None], beside_workers: bool) -> None:
        """Confirm findings and diagnose them by the process that reports, in the seconds of a `follow_up.FollowUpSeconds`.

        Workers have ended their tests by then, and still hold an accelerator: beside them there is neither there.

        Raises:
          CannotWrite: if the records cannot be written.
        """
        on = jax.default_backend()
        if beside_workers and on != "cpu" and any(record.verdict in RED for record in self._journal.recorded.records):
            self.told += [f"findings are neither confirmed nor diagnosed: workers hold the {on} (-n 0 does both)"]
            return
        said = Console(file=(text := io.StringIO()), width=_WIDEST)
        spent = time.perf_counter() - self._started
        kernels, allowed = list(self._implementations.values()), follow_up.FollowUpSeconds(*seconds)
        follow_up.follow_up(self._journal, kernels, runner, allowed, spent=spent, console=said)
        self.told += text.getvalue().splitlines()

    @property
    def probes(self) -> tuple[Record, ...]:
        """What was judged to confirm findings and to diagnose."""
        return self._journal.recorded.probes

    def finish(self, how: str, reason: str, more: Sequence[Record]) -> str:
        """End the files, write page and summary; what became worse than in the baseline, if anything.

        Raises:
          CannotWrite: if the records cannot be written.
          CannotJudge: if page or summary cannot be written.
        """
        names = sorted({record.implementation for record in self._journal.recorded.records})
        judged = [self._implementations[name] for name in names if name in self._implementations]
        changed_files = build_changed_file_records(self._run, self._journal.recorded.records)
        self._journal.add([*more, *build_hardware_records(judged), *changed_files])
        self._journal.end(how, reason=reason, seconds=time.perf_counter() - self._started)
        facts: dict[str, Any] = {"command": self._run.command, "detection": detection_table.load_table()}
        found, info = aggregate_runs([self._journal.recorded], **facts)
        info = bug_diagnosis.add_diagnoses(info, found)
        summary = build_summary(found, info)
        self.told += terminal.format_findings(summary, str(self._outputs.report or ""))
        self.verdict = [*self._from_file, summary.headline]
        if self._suite is not None:
            for name, value in properties(self._journal.recorded, summary):
                self._suite(name, value)
        self._outputs.write(summary)
        if self._baseline is None:
            return ""
        changed = compare.compare_runs(
            self._baseline, compare.gather_compared_runs([self._journal.recorded], "this run")
        )
        self.changed = changed
        if not changed.regressions:
            return ""
        groups = [
            f"{len(group)} {' '.join(key)}, as in {group[0].record.case}"
            for key, group in changes.list_reported_changes(changed)
        ]
        return "\n".join([changes.format_changes_headline(changed), *groups])


def properties(recorded: RecordedRun, summary: Summary) -> list[tuple[str, str]]:
    """What JUnit files say of the run as a whole; a name in brackets is that of an implementation."""
    run = recorded.run
    assert run is not None
    facts = {
        "started": run.started,
        "command": run.command,
        "level": run.level,
        "narrowed": run.narrowed,
        "seeds": ", ".join(map(str, run.seeds)),
        "shard": run.shard,
        "state": summary.state,
    }
    facts |= {f"environment.{name}": value for name, value in run.environment.items()}
    for contender in summary.contenders:
        facts[f"verdict[{contender.contender.label}]"] = contender.text
    for name, kernel in run.kernels.items():
        facts[f"declared[{name}]"] = ", ".join(kernel.asks_less) or "as the defaults"
        facts[f"package[{name}]"] = kernel.package
        facts[f"source[{name}]"] = kernel.source
        apart = (
            "ran in a confined process of its own"
            if not implementation_registry.is_builtin(name)
            else "ran in the judge's process"
        )
        facts[f"place[{name}]"] = kernel.place or apart
    return [(make_printable(name), make_printable(value)) for name, value in facts.items()]


def told(found: list[Record], places: Sequence[str], written: Written | None) -> list[str]:
    """What the terminal is told at the end: findings, counts, places, the verdict, annotations of GitHub Actions."""
    counted = [*gate.table(found), *places]
    if written is None:
        return [*counted, *run_annotations.annotate_run(found)]
    return [
        *written.told,
        *counted,
        *written.verdict,
        *run_annotations.annotate_run(found, written.changed, written.probes),
    ]
