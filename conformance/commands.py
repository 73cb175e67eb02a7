"""What the sub-commands do."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from cases.case import FEATURES, Case, CaseIdError, matches, parse
from cases.grid import grid
from conformance import environment, plan, records, registry, runner, settings
from conformance.checks import BY_NAME, CHECKS, Check
from conformance.cli import CannotJudge
from conformance.contract import Implementation
from conformance.explain import explain_case
from conformance.parallel import run_parallel
from conformance.progress import Exploring, Progress
from conformance.records import Record, RunInfo
from reports import html, markdown, summary, terminal


def run(arguments: argparse.Namespace) -> int:
    """`run`: judge, report, and say by the exit code whether all conform."""
    started = time.perf_counter()
    _reject_contradictions(arguments)
    outputs = _outputs(arguments)
    chosen = _settings()
    implementations = _implementations(arguments)
    level = arguments.level or "quick"
    planned = _plan(arguments, implementations, level)
    if not planned.jobs:
        raise CannotJudge(_nothing_planned(arguments))
    console = Console(stderr=True)
    found: list[Record] = []
    interrupted = False
    with Progress(len(planned.jobs), console) as progress:

        def on_job(job: plan.Job, judged: list[Record]) -> None:
            found.extend(judged)
            progress.advance(judged)

        try:
            _run_jobs(arguments, planned.jobs, chosen, on_job)
        except registry.ImplementationNotFound as error:  # a worker finds less than this process did
            raise CannotJudge(str(error)) from error
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was judged gets written, whatever else is pressed
            interrupted = True
    found = records.merge(found, runner.hardware_records(implementations))
    if _is_whole(arguments, interrupted):
        found = records.merge(found, chosen.stale(found, jax.__version__))
    info = RunInfo(
        command=_command(),
        level="one case" if arguments.case is not None else level,
        environment=environment.describe(),
        tolerances=chosen.tolerances.rows(),
        coverage=list(planned.coverage),
        seconds=round(time.perf_counter() - started, 1),
        interrupted=interrupted,
    )
    outputs.write(found, info)
    terminal.print_summary(found, info, Console())
    return _exit_code(found, implementations, arguments.require_platform, interrupted, console)


def _command() -> str:
    return " ".join(["python -m conformance", *map(shlex.quote, sys.argv[1:])])


@dataclasses.dataclass(frozen=True)
class _Outputs:
    report: Path | None
    json: Path | None
    markdown: Path | None

    def write(self, found: list[Record], info: RunInfo) -> None:
        if self.json is not None:
            records.write_jsonl(self.json, found)
        if self.report is not None:
            html.write(self.report, found, info)
            records.write_jsonl(self.report.with_suffix(".jsonl"), found)
        if self.markdown is not None:
            self.markdown.write_text(markdown.render(found, info))


def _outputs(arguments: argparse.Namespace) -> _Outputs:
    """Where results go; each place is tried before any work is done."""
    paths = {}
    for name in ("report", "json", "markdown"):
        value = getattr(arguments, name, None)
        paths[name] = _writable(value, name) if value is not None else None
    outputs = _Outputs(**paths)
    _reject_collisions(outputs)
    return outputs


def _reject_collisions(outputs: _Outputs) -> None:
    """The records beside the page may be the file of `--json`, since they are the same; no other file is shared."""
    named = [path for path in dataclasses.astuple(outputs) if path is not None]
    beside = [] if outputs.report is None else [outputs.report.with_suffix(".jsonl")]
    places = [path.resolve() for path in [*named, *(path for path in beside if path != outputs.json)]]
    for path in places:
        if places.count(path) > 1:
            raise CannotJudge(
                f"two outputs go to {path.name}: give each of --report, --json and --markdown its own file"
            )


def _writable(value: str, option: str) -> Path:
    path = Path(value)
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{value} is a directory")
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise CannotJudge(f"--{option}={value} cannot be written: {error.strerror or error}") from error
    return path


def _reject_contradictions(arguments: argparse.Namespace) -> None:
    if arguments.all and arguments.impl:
        raise CannotJudge("--all and --impl contradict each other: give one of them")
    if not arguments.all and not arguments.impl:
        raise CannotJudge("nothing to judge: give --impl=NAME (see `python -m conformance list`) or --all")
    if arguments.case is not None and (arguments.cases is not None or arguments.level or arguments.seed):
        raise CannotJudge("--case names one case, seed included: it cannot be combined with --cases, --level or --seed")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise CannotJudge(f"--jobs must be at least 1, got {arguments.jobs}")
    for seed in arguments.seed:
        _reject_negative(seed)


def _reject_negative(seed: int) -> None:
    if seed < 0:
        raise CannotJudge(f"--seed must not be negative, got {seed}")


def _settings() -> settings.Settings:
    try:
        return settings.load(Path.cwd())
    except settings.SettingsError as error:
        raise CannotJudge(str(error)) from error


def _implementations(arguments: argparse.Namespace) -> list[Implementation]:
    names = registry.names() if arguments.all else list(dict.fromkeys(arguments.impl))
    return [_find(name, arguments.products) for name in names]


def _find(name: str, products: str | None = None) -> Implementation:
    try:
        return registry.find(name, products=products)  # type: ignore[arg-type] # argparse has checked the choice
    except registry.ImplementationNotFound as error:
        raise CannotJudge(str(error)) from error


def _checks(arguments: argparse.Namespace) -> tuple[Check, ...]:
    for name in arguments.check:
        if name not in BY_NAME:
            raise CannotJudge(f"unknown check {name!r}: known are {', '.join(BY_NAME)}")
    return tuple(check for check in CHECKS if not arguments.check or check.name in arguments.check)


def _plan(arguments: argparse.Namespace, implementations: Sequence[Implementation], level: str) -> plan.Plan:
    checks = _checks(arguments)
    if arguments.case is not None:
        case = _case(arguments.case)
        plans = [plan.single(implementation, case, checks) for implementation in implementations]
        return plan.Plan(tuple(job for one in plans for job in one.jobs), ())
    return plan.plan(implementations, level=level, seeds=arguments.seed or (0,), query=arguments.cases, checks=checks)


def _case(text: str) -> Case:
    try:
        return parse(text)
    except CaseIdError as error:
        raise CannotJudge(str(error)) from error


def _nothing_planned(arguments: argparse.Namespace) -> str:
    if arguments.cases is not None:
        return f"no case of the grid matches --cases={arguments.cases!r} (see `python -m conformance list cases`)"
    return f"no case asks for {', '.join(arguments.check) or 'any check'}"


def _run_jobs(
    arguments: argparse.Namespace,
    jobs: Sequence[plan.Job],
    chosen: settings.Settings,
    on_job: Callable[[plan.Job, list[Record]], None],
) -> None:
    workers = arguments.jobs
    if workers is None:
        workers = (os.cpu_count() or 1) if jax.default_backend() == "cpu" and len(jobs) > 8 else 1
    if workers == 1:
        runner.Runner(chosen).run(jobs, on_job)
    else:
        run_parallel(jobs, workers, arguments.products, on_job, runner.Runner(chosen).lost)


def _is_whole(arguments: argparse.Namespace, interrupted: bool) -> bool:
    """Whether the run judged all that its level asks for, so that what did not fail can be called stale."""
    narrowed = arguments.case is not None or arguments.cases is not None
    return not (narrowed or arguments.check or arguments.seed or interrupted)


def _exit_code(
    found: Sequence[Record],
    implementations: Sequence[Implementation],
    required: str | None,
    interrupted: bool,
    console: Console,
) -> int:
    standings = {
        implementation.name: summary.conformity([r for r in found if r.implementation == implementation.name])
        for implementation in implementations
    }
    if required and not any(r.platform == required and r.verdict in records.JUDGED for r in found):
        console.print(f"--require-platform={required}: nothing was judged there", style="red")
        return 1
    if summary.DOES_NOT_CONFORM in standings.values():
        return 1
    if interrupted or summary.NOT_JUDGED in standings.values():
        return 2
    return 0


def explore(arguments: argparse.Namespace) -> int:
    """`explore`: look for a wrong case beyond the grid."""
    from conformance import explore as exploring  # imported late: no other command needs Hypothesis

    if arguments.seed is not None:
        _reject_negative(arguments.seed)
    try:
        budget = exploring.budget(
            arguments.profile, seconds=arguments.seconds, examples=arguments.examples, seed=arguments.seed
        )
    except ValueError as error:
        raise CannotJudge(f"--{error}") from error
    outputs = _outputs(arguments)
    chosen = _settings()
    implementation = _find(arguments.impl, arguments.products)
    console = Console(stderr=True)
    console.print(f"seed {budget.seed}", highlight=False)
    with Exploring(budget.seconds, console) as progress:

        def on_case(seen: exploring.Seen) -> None:
            progress.advance(seen.records, shrinking=seen.shrinking)

        try:
            found = exploring.explore(implementation, chosen, budget, query=arguments.cases, on_case=on_case)
        except exploring.NothingToDraw as error:
            raise CannotJudge(f"there is no case to draw: {error}") from error
    if found.interrupted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was found gets written, whatever else is pressed
    info = RunInfo(
        command=_command(),
        level="explore",
        environment=environment.describe(),
        tolerances=chosen.tolerances.rows(),
        seconds=round(found.seconds, 1),
        interrupted=found.interrupted,
        notes=exploring.told(found, budget),
    )
    outputs.write(found.records, info)
    terminal.print_summary(found.records, info, Console())
    for note in info.notes:
        Console().print(note, highlight=False, soft_wrap=True)
    if found.failing is not None:
        return 1
    return 0 if found.judged and not found.interrupted else 2


def list_things(arguments: argparse.Namespace) -> int:
    """`list`: implementations, cases, checks or features."""
    console = Console(soft_wrap=True)
    for option in ("impl", "level", "cases", "seed"):
        if arguments.what != "cases" and getattr(arguments, option) is not None:
            raise CannotJudge(f"--{option} goes with `list cases`, not with `list {arguments.what}`")
    if arguments.what == "cases":
        for case in _listed_cases(arguments):
            print(case.id)
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(arguments.what.rstrip("s"), no_wrap=True)
    table.add_column("what it is")
    for name, text in _descriptions(arguments.what):
        table.add_row(name, text)
    console.print(table)
    return 0


def _listed_cases(arguments: argparse.Namespace) -> list[Case]:
    level, seed = arguments.level or "quick", arguments.seed or 0
    _reject_negative(seed)
    supports = _find(arguments.impl).supports if arguments.impl is not None else (lambda case: None)
    found = grid(level, seed, supports)
    chosen = [case for case in found.cases if arguments.cases is None or matches(arguments.cases, case.id)]
    if not chosen:
        raise CannotJudge(f"no case of the {level} grid matches {arguments.cases or '*'!r}")
    return chosen


def _descriptions(what: str) -> list[tuple[str, str]]:
    if what == "checks":
        return [(check.name, check.asks) for check in CHECKS]
    if what == "features":
        return list(FEATURES.items())
    return [(name, _find(name).description) for name in registry.names()]


def explain(arguments: argparse.Namespace) -> int:
    """`explain`: what a case is, and what judges it."""
    print(explain_case(_case(arguments.case), _settings().tolerances))
    return 0


def render_report(arguments: argparse.Namespace) -> int:
    """`report`: records of earlier runs, merged, as one page."""
    path = _writable(arguments.report, "report")
    if path.resolve() in [Path(name).resolve() for name in arguments.records]:
        raise CannotJudge(f"--report={arguments.report} is one of the files to be read: give the page its own file")
    found = records.merge(*(_read(name) for name in arguments.records))
    if not found:
        raise CannotJudge(f"there is no record in {', '.join(arguments.records)}")
    info = RunInfo(
        command=_command(),
        level="merged records",
        environment={"rendered from": ", ".join(Path(name).name for name in arguments.records)},
        tolerances=[],
        seconds=round(sum(record.seconds for record in found), 1),
    )
    html.write(path, found, info)
    return 0


def _read(name: str) -> list[Record]:
    try:
        return records.read_jsonl(Path(name))
    except OSError as error:
        raise CannotJudge(f"{name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CannotJudge(str(error)) from error


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run,
    "explore": explore,
    "list": list_things,
    "explain": explain,
    "report": render_report,
}
