"""Define the pytest plugin of the gate: one test for each job, which is one implementation on one case.

    pytest                                                   # the implementations that pyproject.toml lists
    pytest --pyargs conformance --impl=my.module:attention   # your own kernel, from your own repository
    pytest -k "block_flash and softcap" -n auto

The plugin plans jobs with a `Session`, as the command line does, and collects their records in the main process. pytest
loads this module in every run where the package is installed, so it imports nothing heavy when it is loaded.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from conformance import interrupts, packages
from conformance.fork_server import shared_server
from conformance.gate import gate_options
from conformance.judging import exit_guard, plugin_warnings, stop_signals
from conformance.session.failures import CannotJudge

if TYPE_CHECKING:
    from conformance.judging.job import Job
    from conformance.records import Record
    from conformance.session.session import Session, SessionResult

_PLUGIN_NAME = "attention-conformance-gate"
_GATE_MODULE = "conformance/test_gate.py"
_RECORDS_ATTRIBUTE = "attention_conformance_records"
_HANDSHAKES = "attention-conformance-handshakes"
_JUDGED: pytest.StashKey[tuple[int | None, list[Record]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of the gate, and the plugins that must come before any `conftest.py`."""
    gate_options.add_options(parser)
    # These plugins must be registered here: pytest imports every `conftest.py` before it calls the next hook.
    pluginmanager.register(exit_guard.ExitGuard(_PLUGIN_NAME), exit_guard.PLUGIN_NAME)
    pluginmanager.register(stop_signals.StopSignals(), stop_signals.PLUGIN_NAME)
    pluginmanager.register(plugin_warnings.PluginWarnings())


def pytest_configure(config: pytest.Config) -> None:
    """Register the gate, and refuse options that cannot be carried out."""
    gate = _Gate(config)
    config.pluginmanager.register(gate, _PLUGIN_NAME)
    if not hasattr(config, "workerinput"):  # the main process; workers rely on its check
        gate.check_options()
    elif gate.is_requested():  # a worker imports the gate's module before it plans
        packages.claim_names()
        if address := config.workerinput[_PLUGIN_NAME]:
            shared_server.join_server(address)


class _Gate:
    """The gate of one pytest process: plans and judges jobs, and in the main process collects the records of all."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._options = gate_options.read_options(config)
        self._is_worker = hasattr(config, "workerinput")
        self._session: Session | None = None
        self._result: SessionResult | None = None
        self._shared_address: str | None = None
        self._said: list[str] = []
        self._records: list[Record] = []
        self._tests: set[str] = set()
        self._judged: set[int] = set()  # numbers of the jobs that were judged by all of their checks
        self._selected: set[str] = set()  # ids of the selected tests that judge jobs
        self._skipped: set[str] = set()  # ids of tests that something else than the gate has skipped

    def check_options(self) -> None:
        """Refuse options that cannot be carried out, before anything is collected or judged."""
        options = self._options
        if options.report or options.json:
            from conformance.session.run_outputs import check_outputs  # imported late: few runs have outputs

            try:
                check_outputs(report=options.report, json=options.json, prefix=options.option_prefix)
            except CannotJudge as error:
                raise pytest.UsageError(str(error)) from error
        if self.is_requested() or options.resume is not None or options.baseline is not None:
            self._plan()

    def is_requested(self) -> bool:
        """Return whether the arguments of pytest ask for any judgement."""
        option = self._config.getoption
        return exit_guard.is_requested(self._config.args, option("--impl"), option("--conformance-cases"))

    @property
    def found(self) -> list[Record]:
        """The records received so far from all processes."""
        return self._records

    def _plan(self) -> Session:
        """Return the session. The first call creates it, and so plans the jobs."""
        if self._session is None:
            with stop_signals.leave_on_signals(self._config):
                gate_options.prepare_gate(self._config)
                from conformance.session.session import Session  # imported late: it loads JAX

            options = dataclasses.replace(
                self._options, selection=gate_options.describe_keyword(self._config.option.keyword)
            )
            handshakes = getattr(self._config, "workerinput", {}).get(_HANDSHAKES, ())
            try:
                with interrupts.raise_on_signal():
                    interrupts.raise_if_stopped()
                    self._session = Session(
                        options,
                        folder=self._config.rootpath,
                        handshakes=[(name, text) for name, text in handshakes],
                        is_worker=self._is_worker,
                    )
            except CannotJudge as error:
                raise pytest.UsageError(str(error)) from error
        return self._session

    @pytest.hookimpl
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "conformance_job" in metafunc.fixturenames:
            jobs = self._plan().jobs
            metafunc.parametrize("conformance_job", jobs, ids=[_build_test_id(job) for job in jobs])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select checks by `-k`: `-k forward` runs only the check `forward`, on every case that has this check."""
        expression = self._config.option.keyword
        if not expression or self._session is None:
            return
        from conformance.judging.keyword_selection import find_target_platform, select_checks

        deselected = []
        for item in items:
            job = _get_job(item)
            if job is None:
                continue
            selected = select_checks(expression, job, [*item.keywords, item.name])
            if not selected:
                deselected.append(item)
            elif selected != job.checks:
                _set_job(item, dataclasses.replace(job, checks=selected))
            item.extra_keyword_matches.update([find_target_platform(job), *(check.name for check in selected)])
        if deselected:
            self._config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if item not in deselected]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass this process's fork server, and the declarations that kernels made here, to a worker of pytest-xdist."""
        if self._shared_address is None:
            self._shared_address = shared_server.share_server()
        node.workerinput[_PLUGIN_NAME] = self._shared_address
        if self._session is not None:
            node.workerinput[_HANDSHAKES] = [list(one) for one in self._session.handshakes]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Note the tests that workers collected; the main process collects none itself."""
        if self._session is not None:
            known = {_build_test_id(job) for job in self._session.plan.jobs}
            self._selected.update(test for test in ids if test.partition("[")[2].removesuffix("]") in known)

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected.update(item.nodeid for item in session.items if _get_job(item) is not None)
        if self._session is not None:
            from conformance import environment

            environment.collect_garbage_rarely()

    def judge(self, item: pytest.Item, job: Job) -> list[Record]:
        """Judge a job for the test `item`, and attach its records to the test's report.

        A job that the file of `--conformance-resume` has finished is not judged again.
        """
        from conformance.gate.gate_summary import list_test_properties

        session = self._plan()
        number = session.find_number(job)
        found = session.find_finished(number)
        if found is None:
            found = session.judge(job)
        item.stash[_JUDGED] = number, found
        item.user_properties += list_test_properties(job, found)
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" and _JUDGED in item.stash:
            from conformance.records import serialize_record

            number, found = item.stash[_JUDGED]
            # pytest-xdist sends this attribute to the main process, since it is a plain list of strings.
            setattr(report, _RECORDS_ATTRIBUTE, [json.dumps(number), *map(serialize_record, found)])
        return report

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines = getattr(report, _RECORDS_ATTRIBUTE, None)
        if report.skipped:
            self._skipped.add(report.nodeid)
        if lines is None or self._is_worker:
            return
        from conformance.judging.journal import JournalWriteError
        from conformance.records import parse_record

        session = self._plan()
        had_begun = session.has_begun
        try:
            number, found = json.loads(lines[0]), [parse_record(line) for line in lines[1:]]
            self._records += found
            self._tests.add(report.nodeid)
            if number is not None:
                self._judged.add(number)
            if not had_begun:
                session.begin()
            if session.find_finished(number) is None:
                session.record(number, found)
        except JournalWriteError as error:
            kept = "; what was judged before is in it" if had_begun else ""
            pytest.exit(f"{error}{kept}", returncode=pytest.ExitCode.INTERRUPTED)
        except ValueError as error:
            pytest.exit(f"a report has an impossible record: {error}", returncode=pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_worker:
            return
        how, reason = exit_guard.describe_end(session)
        missing = self._find_missing_tests() if not reason else set()
        if missing:
            from conformance import runs

            what = f"{len(missing):,} of {len(self._selected):,} jobs have no records, such as {min(missing)}"
            how, reason = runs.INTERRUPTED, f"{what}: the process that judged it died, or its test was not run"
            self._add_failure("every_job_has_records", reason)
        if self._session is not None and self._session.has_begun:
            self._finish(session, how, reason)
        if sentence := self._describe_incompleteness(session, reason):
            self._add_failure("something_is_judged", sentence)
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if missing and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._end_incomplete(session)

    def _find_missing_tests(self) -> set[str]:
        """Return the selected tests of jobs that were not skipped and yet produced no records."""
        option = self._config.option
        if option.collectonly or option.setuponly or option.setupplan:
            return set()
        return self._selected - self._tests - self._skipped

    def _describe_incompleteness(self, session: pytest.Session, reason: str) -> str:
        """Return a sentence on planned jobs that were not judged; empty without any, or if the run was stopped."""
        required = self._options.require_platform
        if not (self._records or required or self._session is not None):
            return ""
        from conformance.gate import completeness

        if sentence := completeness.find_missing_judgements(self._records, required):
            return sentence
        if reason or session.exitstatus != pytest.ExitCode.OK:
            return ""
        return completeness.find_omitted_jobs(self._config, self._session, self._judged, self._records)

    def _end_incomplete(self, session: pytest.Session) -> None:
        """Set the exit status of a run that lacks records: interrupted, unless its records have failures."""
        from conformance.records import RED

        if not any(record.verdict in RED for record in self._records):
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def _finish(self, session: pytest.Session, how: str, reason: str) -> None:
        """Follow up on findings, complete the output files, and add failures of the run as a whole."""
        from conformance.gate import gate_summary
        from conformance.judging.journal import JournalWriteError
        from conformance.runs import FAILED

        ours = self._session
        assert ours is not None
        try:
            if not reason and self._can_follow_up(ours):
                ours.follow_up(self._said.append)
            self._result = result = ours.finish(how, reason)
            self._add_run_failures(session, result)
            if result.how == FAILED:
                raise CannotJudge(result.reason)
            if (add_property := gate_summary.find_suite_property(self._config)) is not None:
                for name, value in gate_summary.list_suite_properties(result):
                    add_property(name, value)
            ours.write_outputs(result)
            self._result = result = ours.compare_with_baseline(result)
        except (JournalWriteError, CannotJudge) as error:
            self._add_failure("outputs", str(error))
            session.exitstatus = pytest.ExitCode.INTERRUPTED
            return
        if result.comparison is not None and (worse := gate_summary.format_regressions(result.comparison)):
            self._add_failure("baseline", worse)
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def _can_follow_up(self, session: Session) -> bool:
        """Return whether this process can judge further cases: not while workers hold the accelerator.

        If it cannot and the run is red, add a line about this to the summary.
        """
        import jax

        from conformance.records import RED

        backend = jax.default_backend()
        if self._shared_address is None or backend == "cpu":
            return True
        if any(record.verdict in RED for record in session.recorded.records):
            self._said.append(
                f"findings are neither confirmed nor diagnosed: workers hold the {backend} (-n 0 does both)"
            )
        return False

    def _add_run_failures(self, session: pytest.Session, result: SessionResult) -> None:
        """Add a failure for each known failure that passed, and each kernel whose results depend on compiler flags."""
        for record in result.stale:
            self._add_failure(f"expectations[{record.implementation}-{record.case}]", record.reason)
        for record in result.flag_excess:
            self._add_failure(f"{record.check}[{record.implementation}]", record.reason)
        self._records += [*result.stale, *result.flag_excess]
        if (result.stale or result.flag_excess) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _add_failure(self, name: str, reason: str) -> None:
        """Add a failure of the run as a whole. pytest counts and reports it like the failure of a test."""
        module = min(self._tests, default=_GATE_MODULE).partition("::")[0]
        report = pytest.TestReport(
            nodeid=f"{module}::{name}",
            location=(module, None, name),
            keywords={},
            outcome="failed",
            longrepr=reason,
            when="call",
        )
        self._config.hook.pytest_runtest_logreport(report=report)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._records:
            if self._session is None and self._config.args_source != pytest.Config.ArgsSource.ARGS:
                for line in gate_options.format_reminder(self._config.rootpath):
                    terminalreporter.write_line(line)
            return
        terminalreporter.section("attention conformance")
        from conformance.gate.gate_summary import format_terminal_summary

        session = self._plan()
        for line in format_terminal_summary(
            self._records,
            session.run,
            self._result,
            report=self._options.report or "",
            said=self._said,
            notes=session.notes,
        ):
            terminalreporter.write_line(line)


def _build_test_id(job: Job) -> str:
    """Return the pytest id of a job: implementation, platform, checks, case.

    The id leaves out the checks if they are the usual ones, which every case of the grid gets.
    """
    from conformance.judging.runner import find_platform

    name = job.implementation.name
    return f"{name}-{find_platform(job.implementation)}{job.id.removeprefix(name)}"


def _get_job(item: pytest.Item) -> Job | None:
    """Return the job that a test judges; None for a test that is not of the gate."""
    callspec = getattr(item, "callspec", None)
    found: Job | None = callspec.params.get("conformance_job") if callspec is not None else None
    return found


def _set_job(item: pytest.Item, job: Job) -> None:
    """Replace the job that a pytest item judges."""
    item.callspec.params["conformance_job"] = job  # type: ignore[attr-defined] # `_get_job` found it there


@pytest.fixture
def conformance_judge(request: pytest.FixtureRequest) -> Callable[[Job], list[Record]]:
    """Return the function with which a test judges a planned job, and stores its records for the report."""
    gate = request.config.pluginmanager.get_plugin(_PLUGIN_NAME)
    assert isinstance(gate, _Gate)
    return lambda job: gate.judge(request.node, job)
