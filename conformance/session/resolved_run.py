"""Resolve the options of a run: check its files, load the project's settings, and find what it judges and with what."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cases.name_suggestions import suggest_name
from conformance.checks import CHECKS, CHECKS_BY_NAME, Check
from conformance.execution import implementation_registry
from conformance.judging.rejudgement import ENOUGH_CONFIRMED
from conformance.judging.runner import Runner
from conformance.judging.settings import Settings
from conformance.sandbox.kernel_options import KernelOptions
from conformance.session.failures import CannotJudge
from conformance.session.input_files import parse_input_path
from conformance.session.project_lookup import build_kernel_options, find_implementations, load_project_settings
from conformance.session.remote_pools import RemotePool, open_pool
from conformance.session.required_platform import select_native
from conformance.session.run_comparison import ComparedRuns, read_compared_runs
from conformance.session.run_outputs import Outputs, check_outputs, check_writable, find_step_summary
from conformance.session.run_spec import RunSpec
from conformance.temporary_folders import remove_abandoned_folders
from impls.contract.implementation import Implementation
from reports.records import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caller:
    """The settings that the caller of a run makes besides the options that users write.

    Attributes:
      implementations: the implementations to judge, in place of those that the options name. They run in this process.
      folder: the folder whose project has the settings; the current one if None.
      handshakes: pairs of a kernel's name and its handshake with the process that started this one.
      is_worker: whether this is a worker of pytest-xdist. Then another process checks and writes the files.
      executor: runs the jobs in its processes, in place of worker processes of this one. They find implementations by
        name, so it cannot be combined with `implementations`. `RunSpec.jobs` is the number of its workers (one a core).
      format_repetition: formats what reproduces a record, such as Python code, in place of a command.
      compiler_options: for first judgements in a process whose XLA flags were not set for judging.
      writes_step_summary: whether a step of GitHub Actions gets a summary of the run.
    """

    implementations: Sequence[Implementation] = ()
    folder: Path | None = None
    handshakes: Sequence[tuple[str, str]] = ()
    is_worker: bool = False
    executor: concurrent.futures.Executor | None = None
    format_repetition: Callable[[Record], str] | None = None
    compiler_options: Mapping[str, bool | int] | None = None
    writes_step_summary: bool = True


COMMAND_LINE = Caller()
"""The command line sets nothing besides its options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A run whose options have been looked up.

    Attributes:
      spec: the options of the run.
      caller: what its caller sets.
      started: the time of `time.perf_counter` when the run began.
      settings: the settings of the project.
      kernels: the options that say how kernels are found and where they run.
      implementations: the implementations to judge.
      checks: the checks to run.
      outputs: the files that the run writes at its end.
      journals: the files of records, which it writes job by job. A resumed file comes first.
      baseline: the runs to compare with; None without any.
      remote: the processes of others that judge; None if this machine judges.
      notes: lines for the user, such as which implementations `--require-platform` leaves out.
    """

    spec: RunSpec
    caller: Caller
    started: float
    settings: Settings
    kernels: KernelOptions
    implementations: Sequence[Implementation]
    checks: tuple[Check, ...]
    outputs: Outputs
    journals: Sequence[Path]
    baseline: ComparedRuns | None
    remote: RemotePool | None
    notes: tuple[str, ...]


def resolve_run(spec: RunSpec, caller: Caller = COMMAND_LINE) -> ResolvedRun:
    """Look up all that the options of a run name. Files are checked first, since the rest is slow.

    Raises:
      CannotJudge: if the run is not possible; the message is one line.
    """
    started = time.perf_counter()
    outputs, baseline = Outputs(), None
    journals: Sequence[Path] = ()
    if not caller.is_worker:
        remove_abandoned_folders()
        outputs = _check_outputs(spec, caller)
        journals = _list_journals(spec, outputs)
        baseline = _read_baseline(spec, journals)
    settings = load_project_settings(caller.folder)
    kernels = build_kernel_options(spec, handshakes=caller.handshakes)
    checks = _select_checks(spec)
    found: Sequence[Implementation] = caller.implementations
    notes: tuple[str, ...] = ()
    if not found:
        found, notes = _select_native(spec, _find_implementations(spec, settings, kernels))
    remote = None
    if caller.executor is not None or spec.cluster is not None:
        remote = open_pool(spec, found, caller.executor, is_given=bool(caller.implementations))
        notes += remote.notes
    return ResolvedRun(
        spec=spec,
        caller=caller,
        started=started,
        settings=settings,
        kernels=kernels,
        implementations=found,
        checks=checks,
        outputs=outputs,
        journals=journals,
        baseline=baseline,
        remote=remote,
        notes=notes,
    )


def create_runner(resolved: ResolvedRun, *, confirmed: float = ENOUGH_CONFIRMED) -> Runner:
    """Create what judges the jobs of a run in this process.

    Args:
      resolved: the run.
      confirmed: the number of confirmed failures of a result, after which its failures are not judged again.
    """
    return Runner(
        resolved.settings,
        confirmed=confirmed,
        options=resolved.kernels.options,
        format_repetition=resolved.caller.format_repetition,
        compiler_options=resolved.caller.compiler_options,
    )


def _check_outputs(spec: RunSpec, caller: Caller) -> Outputs:
    """Check that all files can be written, and return those of the end of the run."""
    if spec.resume is not None:
        check_writable(spec.resume, "resume", prefix=spec.option_prefix)
    outputs = check_outputs(report=spec.report, json=spec.json, markdown=spec.markdown, prefix=spec.option_prefix)
    return dataclasses.replace(outputs, step=find_step_summary() if caller.writes_step_summary else None)


def _list_journals(spec: RunSpec, outputs: Outputs) -> Sequence[Path]:
    if spec.resume is None:
        return outputs.journals
    first = Path(spec.resume)
    return [first, *(path for path in outputs.journals if path.resolve() != first.resolve())]


def _read_baseline(spec: RunSpec, journals: Sequence[Path]) -> ComparedRuns | None:
    """Read the runs of the baseline, if there is one, before this run could replace its file."""
    if spec.baseline is None:
        return None
    name = spec.spell("baseline")
    if parse_input_path(spec.baseline).resolve() in [path.resolve() for path in journals]:
        raise CannotJudge(f"{name}={spec.baseline} is written by this run too: give the records another file")
    try:
        return read_compared_runs(spec.baseline, command=spec.command)
    except CannotJudge as error:
        raise CannotJudge(f"{name}: {error}") from error


def _find_implementations(spec: RunSpec, settings: Settings, kernels: KernelOptions) -> list[Implementation]:
    if spec.judge_all:
        names = implementation_registry.list_implementations()
    else:
        listed = settings.implementations if spec.use_listed else ()
        names = settings.resolve_groups(spec.implementations or listed)
    if not names:
        raise CannotJudge(
            f"nothing to judge: give {spec.spell('implementations')}=NAME, or list implementations under "
            "[tool.attention_conformance] in pyproject.toml"
        )
    return find_implementations(names, kernels)


def _select_native(spec: RunSpec, found: list[Implementation]) -> tuple[Sequence[Implementation], tuple[str, ...]]:
    """Leave out what does not run natively on the required platform, and return a note on it.

    Raises `CannotJudge` if nothing is left.
    """
    if spec.require_platform is None:
        return found, ()
    selection = select_native(found, spec.require_platform, judged_elsewhere=spec.cluster is not None)
    note = selection.describe()
    if not selection.kept:
        raise CannotJudge(f"nothing was judged: {note}")
    return selection.kept, (note,) if note else ()


def _select_checks(spec: RunSpec) -> tuple[Check, ...]:
    for name in spec.checks:
        if name not in CHECKS_BY_NAME:
            if "," in name:
                raise CannotJudge(f"{name!r} is several names: give {spec.spell('checks')} once for each")
            known = f"known are {', '.join(CHECKS_BY_NAME)}"
            raise CannotJudge(f"unknown check {name!r}: {known}{suggest_name(name, CHECKS_BY_NAME)}")
    return tuple(check for check in CHECKS if not spec.checks or check.name in spec.checks)
