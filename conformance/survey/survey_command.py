"""Implement `survey`: judge published libraries, each in an environment of its own, and print a table."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance import interrupts
from conformance.commands.argument_lookup import format_command_line
from conformance.judging.run_aggregation import aggregate_runs
from conformance.session import input_files
from conformance.session.failures import CannotJudge, choose_exit_code
from conformance.session.run_spec import parse_shard, reject_bad_job_count
from conformance.survey import judged_rows, known_failures
from conformance.survey.judged_rows import RECORDS, RowOutcome, is_finished, judge_row, read_outcome
from conformance.survey.survey_rows import Row, format_rows, select_rows, select_shard
from conformance.survey.upstream_findings import name_raising, read_findings
from impls.libraries.library_specs import PREFIX, load_libraries
from reports import survey_page, survey_results
from reports.page_model import build_summary
from reports.records import RecordFileError, read_measurements
from reports.survey_results import FunctionResult, RowResult


def run_survey(arguments: argparse.Namespace) -> int:
    """Judge the rows that the arguments select, and return the exit code that the help text explains."""
    if arguments.results is not None:
        return _show_results(Path(arguments.results), arguments.report)
    libraries = load_libraries()
    listing = arguments.list and not arguments.library
    rows = select_rows(
        libraries,
        arguments.library,
        everything=arguments.all or listing,
        all_versions=arguments.versions == "all",
    )
    try:
        rows = select_shard(rows, parse_shard(arguments.shard) if arguments.shard else None)
    except ValueError as error:
        raise CannotJudge(f"--shard: {error}") from error
    if arguments.list:
        print(format_rows(rows))
        return 0
    reject_bad_job_count(arguments.jobs)
    folder = Path(arguments.out)
    console = Console(stderr=True)
    with interrupts.record_signals():
        _judge_rows(rows, folder, arguments, console)
        results = [found for row in rows if (found := collect_row(row, folder / row.name)) is not None]
        _print_results(results, Console(markup=False))
        if arguments.json is not None:
            write_results(Path(arguments.json), collect_folder(folder))
        if arguments.report is not None:
            _save_page(Path(arguments.report), collect_folder(folder))
        return interrupts.resolve_exit_code(_compute_exit_code(results))


def _show_results(path: Path, report: str | None) -> int:
    """Print the results of a file, and write their page if asked for; return the exit code."""
    try:
        results = survey_results.read_results(path)
    except (OSError, ValueError) as error:
        raise CannotJudge(f"{path} cannot be read: {error}") from error
    _print_results(results, Console(markup=False))
    if report is not None:
        _save_page(Path(report), results)
    return _compute_exit_code(results)


def _save_page(path: Path, results: Sequence[RowResult]) -> None:
    findings = read_findings()
    titles = {one.name: one.title.replace("`", "") for one in findings}
    survey_page.save_survey_page(path, results, titles, name_raising(findings))


def _judge_rows(rows: Sequence[Row], folder: Path, arguments: argparse.Namespace, console: Console) -> None:
    """Judge the rows that are not finished, one after the other, until a signal arrives."""
    waiting = [
        row
        for row in rows
        if not is_finished(row, folder / row.name, arguments.level, retry=arguments.retry, bench=arguments.bench)
    ]
    if done := len(rows) - len(waiting):
        console.print(f"{done} of {len(rows)} rows are finished in {folder}", style="dim", highlight=False)
    for number, row in enumerate(waiting, 1):

        def say(line: str, number: int = number) -> None:
            console.print(f"[{number}/{len(waiting)}] {line}", markup=False, highlight=False, soft_wrap=True)

        try:
            with interrupts.raise_on_signal():
                outcome = judge_row(
                    row,
                    folder / row.name,
                    arguments.level,
                    jobs=arguments.jobs,
                    bench=arguments.bench,
                    show=len(waiting) == 1,
                    on_step=say,
                )
        except KeyboardInterrupt:
            break
        except OSError as error:
            raise CannotJudge(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error
        reason = f": {outcome.reason}" if outcome.reason else ""
        say(f"{row.name}: {outcome.state} after {outcome.seconds:.0f} s{reason}")
        if interrupts.get_received_signal() is not None:
            break


def collect_row(row: Row, folder: Path) -> RowResult | None:
    """Summarize a row's folder; None if the row was never begun. Raises `CannotJudge` for unreadable records."""
    outcome = read_outcome(folder)
    return (
        None if outcome is None else _build_result(row.library.name, row.library.package, row.version, outcome, folder)
    )


def collect_folder(folder: Path) -> list[RowResult]:
    """Summarize all rows in the folder of a survey, also those of other shards, in the order of the libraries."""
    rows = select_rows(load_libraries(), (), everything=True, all_versions=True)
    return [found for row in rows if (found := collect_row(row, folder / row.name)) is not None]


def _build_result(library: str, package: str, version: str, outcome: RowOutcome, folder: Path) -> RowResult:
    functions: tuple[FunctionResult, ...] = ()
    started, environment = "", dict(map(_split_pin, outcome.packages))
    if outcome.state == judged_rows.JUDGED:
        recorded = input_files.read_recorded_runs(str(folder / RECORDS))
        records, info = aggregate_runs(recorded, command=format_command_line())
        versions = {**environment, **info.environment}
        entries = known_failures.load_known_failures(library)
        records = known_failures.mark_known_failures(records, entries, versions, outcome.level)
        summary = build_summary(records, info)
        functions = tuple(
            survey_results.summarize_function(
                one,
                summary.groups.by_implementation[one.implementation],
                info.declared.get(one.implementation.label) or info.declared.get(one.implementation.name) or (),
                _read_speeds(folder).get(one.implementation.name, {}),
            )
            for one in summary.implementations
        )
        started = recorded[0].run.started if recorded[0].run is not None else ""
        environment = {**info.environment, "machine": _describe_machine()}
    judged = {one.function for one in functions}
    return RowResult(
        library=library,
        package=package,
        version=version,
        state=outcome.state,
        reason=shorten_paths(outcome.reason),
        level=outcome.level,
        started=started,
        environment=environment,
        functions=functions,
        missing=tuple(name for name in outcome.functions if name not in judged),
    )


def shorten_paths(text: str) -> str:
    """Shorten absolute paths of a row's environment and of the adapters, so that the text suits every machine."""
    return re.sub(r"/[^\s:=()]*?/(?=environment/lib/)|/[^\s:=()]*?/impls/libraries/", "", text)


def _read_speeds(folder: Path) -> dict[str, dict[str, float]]:
    """Read how fast each function was, by mask and phase, in units of this project's; empty without measurements."""
    found: dict[str, dict[str, float]] = {}
    with contextlib.suppress(OSError, RecordFileError):
        for one in read_measurements(folder / judged_rows.SPEED):
            if one.speed is not None and one.baseline == judged_rows.BASELINE:
                mask = one.case.split("/")[3]
                found.setdefault(one.implementation, {})[f"{mask} {one.phase}"] = round(one.speed.median, 3)
    return found


def _describe_machine() -> str:
    """Describe the processor of this machine: its model where the system tells, and the number of cores."""
    model = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores"


def _split_pin(text: str) -> tuple[str, str]:
    name, _, version = text.partition("==")
    return name, version


def write_results(path: Path, results: Iterable[RowResult]) -> None:
    """Write results as JSON, compressed if the name ends in `.gz`. Raises `CannotJudge` if that fails."""
    try:
        survey_results.write_results(path, results)
    except OSError as error:
        raise CannotJudge(f"{path} cannot be written: {error.strerror or error}") from error


def _print_results(results: Sequence[RowResult], console: Console) -> None:
    """Print a table of all functions, then the failures that are not known."""
    table = Table("library", "function", "verdict", "findings", box=None, pad_edge=False)
    for row in results:
        for one in row.functions:
            known = ", ".join(f"{name or 'no finding'} ({count})" for name, count in one.findings.items())
            new = f"{one.red_count} NEW" if one.red_count else ""
            table.add_row(
                f"{row.package} {row.version}",
                one.function.removeprefix(PREFIX),
                one.text,
                ", ".join(filter(None, (new, known))),
            )
        if row.state != judged_rows.JUDGED:
            table.add_row(f"{row.package} {row.version}", "", f"{row.state}: {row.reason}", "")
    console.print(table, highlight=False)
    for row in results:
        for one in row.functions:
            for record in one.red[:3]:
                result = f"{record.check}/{record.observable} {record.case}"
                line = f"new: {row.package} {row.version} {one.function} {result}: {record.reason}"
                console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _compute_exit_code(results: Sequence[RowResult]) -> int:
    """Return 1 if a failure is new, 2 if no function was judged, else 0."""
    functions = [one for row in results for one in row.functions]
    is_judged = any(cell.passed or cell.known for one in functions for cell in one.cells.values())
    return choose_exit_code(is_wrong=any(one.red_count for one in functions), is_judged=is_judged)
