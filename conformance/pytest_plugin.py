"""The pytest gate: one test for each implementation and case.

    pytest                                                   # what pyproject.toml lists
    pytest --pyargs conformance --impl=my.module:attention   # your own kernel, from your own repository
    pytest -k "block_flash and softcap" -n auto

This module is loaded in every pytest run where the package is installed, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance import interrupts, packages
from conformance.fork_server import shared_server
from conformance.judging import exit_guard, gate, plugin_warnings, stop_signals

if TYPE_CHECKING:
    from conformance.commands.compare import ComparedRuns
    from conformance.commands.gate import Written
    from conformance.judging.job import Job
    from conformance.judging.run_plan import Plan
    from conformance.judging.runner import Runner
    from conformance.judging.settings import Settings
    from conformance.records import Record
    from conformance.runs import Run

_NAME = "attention-conformance-gate"
_GATE = "conformance/test_gate.py"
_ATTRIBUTE = "attention_conformance_records"
_FOUND: pytest.StashKey[tuple[int | None, list[Record]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Options of the gate; all but `--impl` and `--require-platform` carry its name."""
    gate.add_options(parser)
    # Here, since any `conftest.py` is imported before what follows.
    pluginmanager.register(exit_guard.ExitGuard(_NAME), exit_guard.PLUGIN_NAME)
    pluginmanager.register(stop_signals.StopSignals(), stop_signals.PLUGIN_NAME)
    pluginmanager.register(plugin_warnings.PluginWarnings())


def pytest_configure(config: pytest.Config) -> None:
    """Set up the collection of records."""
    made = _Gate(config)
    config.pluginmanager.register(made, _NAME)
    if not hasattr(config, "workerinput"):  # what the main process accepts, its workers need not check again
        made.check_options()
    elif made.is_asked_for():  # a worker imports the gate's module before it plans
        packages.claim_names()
        if address := config.workerinput[_NAME]:
            shared_server.join_server(address)


class _Gate:
    """Plans the tests, and gathers the records of all processes in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._planned: Plan | None = None
        self._settings: Settings | None = None
        self._runner: Runner | None = None
        self._run: Run | None = None
        self._lent: str | None = None
        self._kept: dict[int, tuple[Record, ...]] | None = None
        self._written: Written | None = None
        self._baseline: ComparedRuns | None = None
        self._records: list[Record] = []
        self._stale: list[Record] = []
        self._tests: set[str] = set()
        self._whole: set[int] = set()  # jobs that were judged under all of their checks
        self._selected: set[str] = set()  # the tests of jobs that are to be run
        self._skipped: set[str] = set()  # those that others have skipped

    @pytest.hookimpl
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "conformance_job" not in metafunc.fixturenames:
            return
        from conformance.judging import run_plan
        from conformance.judging.runner import find_platform  # imported late: it loads JAX

        shard = gate.shard(self._config.getoption("--conformance-shard"))
        jobs = run_plan.select_shard(self._plan().jobs, *shard) if shard else self._plan().jobs
        ids = [self._id(job, find_platform(job.implementation)) for job in jobs]
        metafunc.parametrize("conformance_job", jobs, ids=ids)

    @staticmethod
    def _id(job: Job, platform: str) -> str:
        name = job.implementation.name
        return f"{name}-{platform}{job.id.removeprefix(name)}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """`-k forward` asks the check `forward` of every case that has it, and no other check."""
        expression = self._config.option.keyword
        if not expression or self._planned is None:
            return
        from conformance.judging.keyword_selection import find_target_platform, select_checks

        left_out = []
        for item in items:
            job = gate.job_of(item)
            if job is None:
                continue
            chosen = select_checks(expression, job, [*item.keywords, item.name])
            if not chosen:
                left_out.append(item)
            elif chosen != job.checks:
                gate.set_job(item, dataclasses.replace(job, checks=chosen))
            item.extra_keyword_matches.update([find_target_platform(job), *(check.name for check in chosen)])
        if left_out:
            self._config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Have the workers of pytest-xdist ask the process that this one has loaded JAX in."""
        if self._lent is None:
            self._lent = shared_server.share_server()
        node.workerinput[_NAME] = self._lent
        if self._planned is not None:
            gate.tell_worker(node.workerinput, self._planned)

    def check_options(self) -> None:
        """Refuse options that cannot be carried out, before anything is collected or judged."""
        option = self._config.getoption
        if not 0 <= option("--conformance-seed") < 2**64:
            raise pytest.UsageError(f"--conformance-seed must be in 0..2**64-1, got {option('--conformance-seed')}")
        gate.shard(option("--conformance-shard"))
        gate.reject_no_limits(self._config)
        for name in ("report", "json"):
            if (target := option(f"--conformance-{name}")) is not None:
                gate.reject_unwritable(f"--conformance-{name}={target}", Path(target), page=name == "report")
        if self.is_asked_for():
            self._plan()
        if option("--conformance-resume") is not None:
            self._take_up()
        if (earlier := option("--conformance-baseline")) is not None:
            from conformance.commands.gate import baseline

            self._plan()
            try:
                self._baseline = baseline(earlier, [option(f"--conformance-{n}") for n in ("report", "json", "resume")])
            except ValueError as error:
                raise pytest.UsageError(f"--conformance-baseline: {error}") from error

    def is_asked_for(self) -> bool:
        """Whether this run is to judge, as far as its arguments say."""
        option = self._config.getoption
        return exit_guard.is_requested(self._config.args, option("--impl"), option("--conformance-cases"))

    @property
    def found(self) -> list[Record]:
        """The records of all processes, as far as they have come."""
        return self._records

    def _plan(self) -> Plan:
        if self._planned is None:
            with stop_signals.leave_on_signals(self._config):
                gate.prepare(self._config)
                from conformance.execution import implementation_registry  # imported late: they load JAX
                from conformance.judging import run_plan, settings
                from conformance.judging.runner import Runner

            option, kernels = self._config.getoption, gate.kernels(self._config)
            try:
                self._settings = found = settings.load_settings(self._config.rootpath)
                names = found.resolve_groups(option("--impl") or found.implementations)
                with interrupts.raise_on_signal():
                    interrupts.raise_if_stopped()
                    implementations = [kernels.find(name) for name in names]
            except (settings.SettingsError, implementation_registry.ImplementationNotFound) as error:
                raise pytest.UsageError(str(error)) from error
            if not implementations:
                raise pytest.UsageError(
                    "nothing to judge: give --impl=NAME, or list implementations under "
                    "[tool.attention_conformance] in pyproject.toml"
                )
            self._runner = Runner(found, options=kernels.options)
            self._planned = run_plan.plan_run(
                implementations,
                level=option("--conformance-level"),
                seeds=(option("--conformance-seed"),),
                query=option("--conformance-cases"),
            )
            if not self._planned.jobs:
                raise pytest.UsageError(
                    f"no case of the grid matches --conformance-cases={option('--conformance-cases')!r} "
                    f"(see `python -m conformance list cases`)"
                )
        return self._planned

    def _described(self) -> Run:
        """What holds for all records of this run."""
        if self._run is None:
            from conformance.commands.gate import described

            planned, option = self._plan(), self._config.getoption
            assert self._settings is not None
            self._run = described(
                planned,
                self._settings,
                arguments=[str(argument) for argument in self._config.invocation_params.args],
                level=option("--conformance-level"),
                seed=option("--conformance-seed"),
                narrowed=self._narrowed_to(),
                shard=option("--conformance-shard") or "",
                kernels=gate.kernels(self._config),
            )
        return self._run

    def _take_up(self) -> None:
        """Go on with a file of records."""
        from conformance.commands.gate import kept_from

        place = Path(self._config.getoption("--conformance-resume"))
        try:
            self._run, self._kept = kept_from(place, self._described())
        except ValueError as error:
            raise pytest.UsageError(f"--conformance-resume: {error}") from error

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Know which tests workers are to run: this process collects none."""
        if self._planned is not None:
            from conformance.judging.runner import find_platform

            known = {self._id(job, find_platform(job.implementation)) for job in self._planned.jobs}
            self._selected.update(test for test in ids if test.partition("[")[2].removesuffix("]") in known)

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected.update(item.nodeid for item in session.items if gate.job_of(item) is not None)
        if self._planned is not None:
            from conformance import environment

            environment.collect_garbage_rarely()

    def judge(self, item: pytest.Item, job: Job) -> list[Record]:
        """Judge a job for the test `item`; its records travel with the test's report."""
        number = next((n for n, planned in enumerate(self._plan().jobs) if planned == job), None)
        found = self._known(number)
        if found is None:
            assert self._runner is not None
            found = self._runner.judge(job)
        item.stash[_FOUND] = number, found
        item.user_properties += gate.properties(job, found)
        return found

    def _known(self, number: int | None) -> list[Record] | None:
        """The records of a job that is done already, in the file that is gone on with."""
        place = self._config.getoption("--conformance-resume")
        if place is None or number is None:
            return None
        if self._kept is None:  # a worker: what it goes on with, the process that reports has looked at
            from conformance import runs

            self._kept = dict(runs.read_runs(Path(place))[0].done)
        return list(self._kept[number]) if number in self._kept else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" and _FOUND in item.stash:
            from conformance.records import serialize_record

            number, found = item.stash[_FOUND]
            # A plain attribute of strings: pytest-xdist carries it to the process that reports.
            setattr(report, _ATTRIBUTE, [json.dumps(number), *(serialize_record(record) for record in found)])
        return report

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines = getattr(report, _ATTRIBUTE, None)
        if report.skipped:
            self._skipped.add(report.nodeid)
        if lines is None or hasattr(self._config, "workerinput"):
            return
        from conformance.judging.journal import JournalWriteError
        from conformance.records import parse_record

        try:
            number, found = json.loads(lines[0]), [parse_record(line) for line in lines[1:]]
            self._records += found
            self._tests.add(report.nodeid)
            if number is not None:
                self._whole.add(number)
            written = self._begin()
            if self._kept is None or number not in self._kept:
                written.take(number, found)
        except JournalWriteError as error:
            kept = "; what was judged before is in it" if self._written is not None else ""
            pytest.exit(f"{error}{kept}", returncode=pytest.ExitCode.INTERRUPTED)
        except ValueError as error:
            pytest.exit(f"a report has a record that none can be: {error}", returncode=pytest.ExitCode.INTERRUPTED)

    def _begin(self) -> Written:
        """Begin the files of this run at the first record."""
        if self._written is None:
            from conformance.commands.gate import Written

            option = self._config.getoption
            report, place = option("--conformance-report"), option("--conformance-json")
            taken_up = option("--conformance-resume")
            self._written = Written(
                self._described(),
                self._plan(),
                report=Path(report) if report else None,
                json=Path(place or taken_up) if place or taken_up else None,
                kept=self._kept,
                baseline=self._baseline,
                suite=gate.suite_property(self._config),
            )
        return self._written

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return
        from conformance.judging import flag_share

        how, reason = exit_guard.describe_end(session)
        missing = self._missing() if not reason else set()
        if missing:
            from conformance import runs

            what = f"{len(missing):,} of {len(self._selected):,} jobs have no records, as {min(missing)}"
            how, reason = runs.INTERRUPTED, f"{what}: the process that judged it died, or its test was not run"
            self._add_failure("every_job_has_records", reason)
        if self._records and not reason:
            self._add_stale()
        for record in self._stale:
            self._add_failure(f"expectations[{record.implementation}-{record.case}]", record.reason)
        excess = flag_share.find_excess(self._records)
        self._records += excess
        for record in excess:
            self._add_failure(f"{record.check}[{record.implementation}]", record.reason)
        sentence = gate.nothing_judged(self._records, self._config.getoption("--require-platform"))
        if not (sentence or reason) and session.exitstatus == 0:
            sentence = gate.not_asked(self._config, self._planned, self._whole, self._records)
        if sentence:
            self._add_failure("something_is_judged", sentence)
        if (self._stale or excess or sentence) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._written is not None:
            self._finish(session, how, reason, [*self._stale, *excess])
        if missing and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._end_incomplete(session)

    def _missing(self) -> set[str]:
        """The tests of jobs that were to be run and left no records."""
        option = self._config.option
        if option.collectonly or option.setuponly or option.setupplan:
            return set()
        return self._selected - self._tests - self._skipped

    def _end_incomplete(self, session: pytest.Session) -> None:
        """Have a run that lacks a job end as one that could not be judged, unless what it has is wrong."""
        from conformance.records import RED

        if not any(record.verdict in RED for record in self._records):
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def _finish(self, session: pytest.Session, how: str, reason: str, more: list[Record]) -> None:
        from conformance.commands.command_errors import CannotJudge
        from conformance.judging.journal import JournalWriteError

        assert self._written is not None
        try:
            if not reason:
                assert self._runner is not None
                self._written.probe(self._runner, gate.seconds_beside(self._config), self._lent is not None)
            if worse := self._written.finish(how, reason, more):
                self._add_failure("baseline", worse)
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        except (JournalWriteError, CannotJudge) as error:
            self._add_failure("outputs", str(error))
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def _add_failure(self, name: str, reason: str) -> None:
        """A failure of the run as a whole: it is counted, summed up and written to files like one of a test."""
        module = min(self._tests, default=_GATE).partition("::")[0]
        report = pytest.TestReport(
            nodeid=f"{module}::{name}",
            location=(module, None, name),
            keywords={},
            outcome="failed",
            longrepr=reason,
            when="call",
        )
        self._config.hook.pytest_runtest_logreport(report=report)

    def _add_stale(self) -> None:
        """After a whole run: expected failures that nothing failed for turn it red."""
        import jax

        option = self._config.getoption
        partly = self._narrowed_to() or len(self._whole) < len(self._plan().jobs)
        if not (partly or option("--conformance-level") == "smoke" or option("--conformance-seed")):
            assert self._settings is not None
            self._stale = self._settings.stale(self._records, jax.__version__)
            self._records += self._stale

    def _narrowed_to(self) -> str:
        """To what options narrow what the level asks; tests that are left out by themselves are counted instead."""
        from conformance.judging.keyword_selection import mentions_checks

        found = []
        if (query := self._config.getoption("--conformance-cases")) is not None:
            found.append(f"--conformance-cases={shlex.quote(query)}")
        if mentions_checks(expression := self._config.option.keyword):
            found.append(f"-k {shlex.quote(expression)}")
        return " ".join(found)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._records:
            if self._planned is None and self._config.args_source != pytest.Config.ArgsSource.ARGS:
                for line in gate.reminder(self._config.rootpath):
                    terminalreporter.write_line(line)
            return
        terminalreporter.section("attention conformance")
        from conformance.commands.gate import told

        for line in told(self._records, gate.places(self._described()), self._written):
            terminalreporter.write_line(line)


@pytest.fixture
def conformance_judge(request: pytest.FixtureRequest) -> Callable[[Job], list[Record]]:
    """Judges a job of the plan, and keeps its records for the report."""
    judging = request.config.pluginmanager.get_plugin(_NAME)
    assert isinstance(judging, _Gate)
    return lambda job: judging.judge(request.node, job)
