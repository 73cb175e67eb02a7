"""Define the pytest plugin of the gate: one test for each job, which is one implementation on one case.

    pytest                                                   # the implementations that pyproject.toml lists
    pytest --pyargs conformance --impl=my.module:attention   # your own kernel, from your own repository
    pytest -k "block_flash and softcap" -n auto
    pytest test_flash.py                                     # a file with `conformance.testing.conformance_tests`

The plugin plans jobs as the command line does, and collects their records in the main process. Each
`conformance_tests` of a test file has a session of its own. pytest loads this module in every run where the package is
installed, so it imports nothing heavy when it is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance import interrupts, packages, temporary_folders
from conformance.fork_server import shared_server
from conformance.gate import exit_guard, gate_options, kernel_suite, node_ids, stop_signals
from conformance.session.failures import CannotJudge

if TYPE_CHECKING:
    from conformance.gate.gate_run import PlannedTests, SuiteResult, SuiteRun
    from conformance.judging.job import Job
    from conformance.judging.journal import Journal
    from conformance.session.planned_run import PlannedRun
    from conformance.session.run_result import SessionResult
    from reports.records import Record

_PLUGIN_NAME = "attention-conformance-gate"
_MUTANTS = "--conformance-mutants"
_RECORDS_ATTRIBUTE = "attention_conformance_records"
_RUN_ATTRIBUTE = "attention_conformance_run"
_HANDSHAKES = "attention-conformance-handshakes"
_EARLY_ENDS = "attention-conformance-early-ends"
_JUDGED: pytest.StashKey[tuple[int | None, list[Record]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of the gate, and the plugins that must come before any `conftest.py`."""
    gate_options.add_options(parser)
    parser.getgroup("attention conformance: mutants").addoption(
        _MUTANTS,
        metavar="NAME",
        help="measure which wrong versions of a function (module:function, as the tests import it) these tests catch",
    )
    # These plugins must be registered here: pytest imports every `conftest.py` before it calls the next hook.
    pluginmanager.register(exit_guard.ExitGuard(), exit_guard.PLUGIN_NAME)
    pluginmanager.register(stop_signals.StopSignals(), stop_signals.PLUGIN_NAME)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Measure these tests in place of running them, if asked to (`python -m conformance mutants`)."""
    function = config.getoption(_MUTANTS)
    if function is None or hasattr(config, "workerinput"):
        return None
    arguments = [str(one) for one in config.invocation_params.args if not str(one).startswith(f"{_MUTANTS}=")]
    if _MUTANTS in arguments:  # its value is the next argument
        place = arguments.index(_MUTANTS)
        del arguments[place : place + 2]
    command = [sys.executable, "-m", "conformance", "mutants", f"--replace={function}"]
    return subprocess.run([*command, "--", sys.executable, "-m", "pytest", *arguments], check=False).returncode


def pytest_configure(config: pytest.Config) -> None:
    """Register the gate, and refuse options that cannot be carried out."""
    config.args[:] = node_ids.resolve_arguments(config.args, config.invocation_params.dir)
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
        self._named = node_ids.list_gate_jobs(config.args, config.invocation_params.dir)
        if self._named:  # pasted ids say what is judged
            names = tuple(dict.fromkeys(one.implementation for one in self._named))
            self._options = dataclasses.replace(self._options, implementations=names)
        self._is_worker = hasattr(config, "workerinput")
        self._journal: Journal | None = None  # the files of records of the gate's own session
        self._planned: dict[str, PlannedTests] = {}  # by the id of the test function; the gate's own is ""
        self._suites: dict[str, SuiteRun] = {}  # likewise
        self._suite_results: dict[str, SuiteResult] = {}
        self._resources = contextlib.ExitStack()  # the files of sandboxed kernels of test files
        self._sent_runs: set[str] = set()
        self._result: SessionResult | None = None
        self._shared_address: str | None = None
        self._ends_folder = ""  # has a file for each kernel whose jobs have ended early, for workers to see
        self._said: list[str] = []
        guard: exit_guard.ExitGuard | None = config.pluginmanager.get_plugin(exit_guard.PLUGIN_NAME)
        self._records: list[Record] = [] if guard is None else guard.records
        self._tests: set[str] = set()
        self._judged: set[int] = set()  # numbers of the jobs that were judged by all of their checks
        self._selected: set[str] = set()  # ids of the selected tests that judge jobs
        self._skipped: set[str] = set()  # ids of tests that something else than the gate has skipped

    def check_options(self) -> None:
        """Refuse options that cannot be carried out, before anything is collected or judged."""
        options = self._options
        if self.is_requested() or options.named_files:
            try:
                packages.claim_names()
            except packages.NameTaken as error:
                raise pytest.UsageError(str(error)) from error
        if options.report or options.json:
            from conformance.session.run_outputs import check_outputs  # imported late: few runs have outputs

            try:
                check_outputs(report=options.report, json=options.json, prefix=options.option_prefix)
            except CannotJudge as error:
                raise pytest.UsageError(str(error)) from error
        is_of_gate = self._is_gate_named() or options.resume is not None or options.baseline is not None
        if is_of_gate:
            self._plan()

    def _is_gate_named(self) -> bool:
        """Return whether the arguments name the gate or what it judges; cases alone may be those of a test file."""
        return node_ids.is_requested(self._config.args, self._options.implementations, None)

    def is_requested(self) -> bool:
        """Return whether the arguments of pytest ask for any judgement."""
        return node_ids.is_requested(self._config.args, self._options.implementations, self._options.cases)

    def _plan(self) -> PlannedTests:
        """Return the tests of the gate. The first call plans them."""
        if "" not in self._planned:
            with stop_signals.leave_on_signals(self._config):
                gate_options.prepare_gate(self._config, self._options.implementations)
                from conformance.gate.gate_run import PlannedTests  # imported late: it loads JAX
                from conformance.session.planned_run import plan_jobs
                from conformance.session.resolved_run import Caller, resolve_run

            keyword = self._config.option.keyword
            options = dataclasses.replace(self._options, selection=gate_options.describe_keyword(keyword))
            handshakes = getattr(self._config, "workerinput", {}).get(_HANDSHAKES, ())
            try:
                with interrupts.raise_on_signal():
                    interrupts.raise_if_stopped()
                    caller = Caller(
                        folder=self._config.rootpath,
                        handshakes=[(name, text) for name, text in handshakes],
                        is_worker=self._is_worker,
                    )
                    planned = PlannedTests(plan_jobs(resolve_run(options, caller)), _build_test_id)
                    if self._named:
                        planned.add_named_jobs(self._named, only=True)
                    if options.selection:
                        planned.narrow(keyword, [node_ids.GATE_PATH, "test_conforms"])
                    planned.load_resumed()
                    self._planned[""] = planned
            except CannotJudge as error:
                raise pytest.UsageError(str(error)) from error
        return self._planned[""]

    @property
    def _own(self) -> PlannedRun | None:
        """The run of the gate itself; None if nothing has asked for it."""
        return self._planned[""].planned if "" in self._planned else None

    def _plan_suite(self, key: str, file: Path, suite: kernel_suite.KernelSuite) -> PlannedTests:
        """Plan the tests of a kernel in a test file.

        Args:
          key: the id of the test function.
          file: the test file.
          suite: the tests that the function asks for.

        Raises:
          pytest.Collector.CollectError: if the kernel cannot be judged.
        """
        path, *names = key.split("::")
        keyword, folder = self._config.option.keyword, self._config.invocation_params.dir
        shown = "::".join((os.path.relpath(file, folder), *names))

        def format_repetition(record: Record) -> str:
            return _format_test_command(self._planned[key], shown, record)

        try:
            selection = gate_options.describe_keyword(keyword)
            run = kernel_suite.plan_suite(
                suite,
                dataclasses.replace(self._options, selection=selection),
                resources=self._resources,
                folder=self._config.rootpath,
                format_repetition=format_repetition,
                is_worker=self._is_worker,
            )
            from conformance.gate.gate_run import PlannedTests  # imported late: it loads JAX

            planned = PlannedTests(run, _build_suite_test_id)
            named = node_ids.list_kernel_jobs(self._config.args, folder, file, names)
            planned.add_named_jobs(named, only=False)
            if selection:
                planned.narrow(keyword, [path, *names])
        except CannotJudge as error:
            raise pytest.Collector.CollectError(f"{names[-1]}: {error}") from error
        self._planned[key] = planned
        return planned

    @pytest.hookimpl
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "conformance_job" not in metafunc.fixturenames:
            return
        suite = kernel_suite.find_suite(metafunc.function)
        if suite is None:
            planned = self._plan()
        else:
            planned = self._plan_suite(metafunc.definition.nodeid, metafunc.definition.path, suite)
        metafunc.parametrize("conformance_job", planned.jobs, ids=planned.ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        """Give the tests of the gate the same ids in every project."""
        if module_path.name != node_ids.GATE_FILE.name or module_path.resolve() != node_ids.GATE_FILE:
            return None
        found: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=node_ids.GATE_PATH)
        return found

    @pytest.hookimpl
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Let editors find a test of a kernel at the line of the test file that asks for it."""
        suite = kernel_suite.find_suite(getattr(item, "function", None))
        if suite is not None:
            item.location = (item.nodeid.partition("::")[0], suite.line, item.location[2])

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Select checks by `-k`: `-k forward` runs only the check `forward`, on every case that has this check."""
        expression = self._config.option.keyword
        if not expression or not self._planned:
            return
        from conformance.gate.keyword_selection import find_target_platform

        deselected = []
        for item in items:
            job = _get_job(item)
            if job is None:
                continue
            narrowed = self._planned[_get_run_key(item)].narrow_job(job, [*item.keywords, item.name], expression)
            if narrowed is None:
                deselected.append(item)
                continue
            _set_job(item, narrowed)
            item.extra_keyword_matches.update([find_target_platform(job), *(check.name for check in narrowed.checks)])
        if deselected:
            self._config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if item not in deselected]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass this process's fork server, and the declarations that kernels made here, to a worker of pytest-xdist."""
        if self._shared_address is None:
            self._shared_address = shared_server.share_server()
            self._ends_folder = self._resources.enter_context(temporary_folders.use_temporary_folder("early-ends")).path
        node.workerinput[_PLUGIN_NAME] = self._shared_address
        node.workerinput[_EARLY_ENDS] = self._ends_folder
        if self._own is not None:
            from conformance.sandbox.sandboxed_executor import collect_handshakes

            node.workerinput[_HANDSHAKES] = [
                list(one) for one in collect_handshakes(self._own.resolved.implementations)
            ]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Note the tests that workers collected; the main process collects none itself."""
        if self._own is not None:
            known = set(self._planned[""].ids)
            self._selected.update(test for test in ids if test.partition("[")[2].removesuffix("]") in known)

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        ours = (item for item in session.items if _get_job(item) is not None)
        self._selected.update(item.nodeid for item in ours if not _get_run_key(item))
        if self._own is not None:
            from conformance import environment

            environment.collect_garbage_rarely()

    def judge(self, item: pytest.Item, job: Job) -> list[Record]:
        """Judge a job for the test `item`, and attach its records to the test's report.

        A job that the file of `--conformance-resume` has finished is not judged again.
        """
        from conformance.gate.gate_summary import list_test_properties

        key = _get_run_key(item)
        if reason := self._describe_early_end(key, job):
            pytest.skip(reason)
        if not key:
            number, found = self._plan().judge(job)
        else:
            from conformance.session.process_setup import isolate_settings

            with isolate_settings():  # the process is the user's
                number, found = self._planned[key].judge(job)
        item.stash[_JUDGED] = number, found
        item.user_properties += list_test_properties(job, found)
        return found

    def _describe_early_end(self, key: str, job: Job) -> str:
        """Return why a job is not judged, if the jobs of its kernel have ended early; empty if it is."""
        if not self._is_worker:
            return (self._planned[key] if key else self._plan()).describe_end(job)
        from conformance.gate.gate_run import describe_unjudged

        folder = getattr(self._config, "workerinput", {})[_EARLY_ENDS]
        mark = Path(folder, _name_mark(job.implementation.name))
        return describe_unjudged("") if not key and mark.exists() else ""

    def _note_judged(self, key: str, number: int | None, found: list[Record]) -> None:
        """Note the records of a job. If the jobs of its kernel end early, tell the workers of the gate's own run.

        A kernel of a test file that workers judge is judged by all cases, since nothing here has planned them.
        """
        if key in self._planned and (name := self._planned[key].note_judged(number, found)) and self._ends_folder:
            Path(self._ends_folder, _name_mark(name)).touch()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        suite = kernel_suite.find_suite(getattr(item, "function", None))
        if suite is not None and report.skipped and isinstance(report.longrepr, tuple):
            # pytest names the line that skips, which is ours.
            report.longrepr = (str(item.path), (suite.line or 0) + 1, report.longrepr[2])
        if call.when == "call" and _JUDGED in item.stash:
            from reports.records import serialize_record, serialize_run

            number, found = item.stash[_JUDGED]
            key = _get_run_key(item)
            # pytest-xdist sends these attributes to the main process, since they are plain strings.
            setattr(report, _RECORDS_ATTRIBUTE, [json.dumps([key, number]), *map(serialize_record, found)])
            if key and key not in self._sent_runs:
                self._sent_runs.add(key)
                setattr(report, _RUN_ATTRIBUTE, serialize_run(self._planned[key].planned.run))
        return report

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines = getattr(report, _RECORDS_ATTRIBUTE, None)
        if report.skipped:
            self._skipped.add(report.nodeid)
        if lines is None or self._is_worker:
            return
        packages.claim_names()  # where workers judge, nothing here has asked for them yet
        from conformance.judging.journal import JournalWriteError
        from conformance.session.job_judging import open_journal
        from reports.records import parse_record

        had_begun = self._journal is not None
        try:
            (key, number), found = json.loads(lines[0]), [parse_record(line) for line in lines[1:]]
            if key:
                self._get_suite(key, getattr(report, _RUN_ATTRIBUTE, "")).add(report.nodeid, number, found)
                self._note_judged(key, number, found)
                return
            planned = self._plan().planned
            self._records += found
            self._tests.add(report.nodeid)
            if number is not None:
                self._judged.add(number)
            if self._journal is None:
                self._journal = open_journal(planned)
            if number is None or number not in planned.finished:
                self._journal.add(number, found)
            self._note_judged(key, number, found)
        except JournalWriteError as error:
            kept = "; what was judged before is in it" if had_begun else ""
            pytest.exit(f"{error}{kept}", returncode=pytest.ExitCode.INTERRUPTED)
        except ValueError as error:
            pytest.exit(f"a report has an impossible record: {error}", returncode=pytest.ExitCode.INTERRUPTED)

    def _get_suite(self, key: str, run: str) -> SuiteRun:
        """Return the run of a kernel of a test file. The first report of each process has the run record."""
        from conformance.gate.gate_run import SuiteRun
        from reports.records import parse_run

        if key not in self._suites:
            planned = self._planned.get(key)  # where workers judge, this process has planned nothing
            own = None if planned is None else planned.planned
            self._suites[key] = SuiteRun(parse_run(run) if own is None else own.run, own)
        return self._suites[key]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_worker:
            return
        reason = exit_guard.describe_stop(session)
        missing = self._find_missing_tests() if not reason else set()
        if missing:
            what = f"{len(missing):,} of {len(self._selected):,} jobs have no records, such as {min(missing)}"
            reason = f"{what}: the process that judged it died, or its test was not run"
            self._add_failure("every_job_has_records", reason)
        if self._journal is not None:
            self._finish(session, reason, self._plan().planned, self._journal)
        self._finish_suites(session, reason)
        if sentence := self._describe_incompleteness(session, reason):
            self._add_failure("something_is_judged", sentence)
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if missing and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._end_incomplete(session)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        self._resources.close()

    def _find_missing_tests(self) -> set[str]:
        """Return the selected tests of jobs that were not skipped and yet produced no records."""
        return set() if self._runs_no_test() else self._selected - self._tests - self._skipped

    def _runs_no_test(self) -> bool:
        """Return whether the options ask pytest to show tests, and to run none."""
        option = self._config.option
        return bool(option.collectonly or option.setuponly or option.setupplan)

    def _describe_incompleteness(self, session: pytest.Session, reason: str) -> str:
        """Return a sentence on planned jobs that were not judged; empty without any, or if the run was stopped."""
        required = self._options.require_platform
        if not (self._records or required or self._own is not None):
            return ""
        from conformance.gate import completeness

        if required and not self._runs_no_test():
            of_suites = (record for result in self._suite_results.values() for record in result.records)
            unjudged = completeness.find_unjudged_platform([*self._records, *of_suites], required)
        else:
            unjudged = ""
        if sentence := unjudged or completeness.find_missing_judgements(self._records):
            return sentence
        if reason or session.exitstatus != pytest.ExitCode.OK:
            return ""
        return completeness.find_omitted_jobs(self._config, self._own, self._judged, self._records)

    def _end_incomplete(self, session: pytest.Session) -> None:
        """Set the exit status of a run that lacks records: interrupted, unless its records have failures."""
        from reports.records import RED

        if not any(record.verdict in RED for record in self._records):
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def _finish(self, session: pytest.Session, reason: str, planned: PlannedRun, journal: Journal) -> None:
        """Follow up on findings, complete the output files, and add failures of the run as a whole."""
        from conformance.gate import gate_summary
        from conformance.judging.journal import JournalWriteError
        from conformance.session.run_result import FollowedUp, compare_with_baseline, finish_run, follow_up_run
        from reports.records import FAILED

        followed = FollowedUp()
        try:
            if not reason and self._can_follow_up(journal):
                followed = follow_up_run(planned, journal, self._said.append)
            self._result = result = finish_run(planned, journal, exit_guard.name_end(reason), reason, followed)
            self._add_run_failures(session, result)
            if result.how == FAILED:
                raise CannotJudge(result.reason)
            if (add_property := gate_summary.find_suite_property(self._config)) is not None:
                for name, value in gate_summary.list_suite_properties(result):
                    add_property(name, value)
            planned.resolved.outputs.write(result.summary)
            self._result = result = compare_with_baseline(planned.resolved, result)
        except (JournalWriteError, CannotJudge) as error:
            self._add_failure("outputs", str(error))
            session.exitstatus = pytest.ExitCode.INTERRUPTED
            return
        if result.comparison is not None and (worse := gate_summary.format_regressions(result.comparison)):
            self._add_failure("baseline", worse)
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def _finish_suites(self, session: pytest.Session, reason: str) -> None:
        """Follow up on findings of the kernels of test files, and write the files of the whole run."""
        if not self._suites:
            return
        from conformance.gate.gate_run import write_outputs
        from conformance.judging.journal import JournalWriteError

        options = self._options
        for key, suite in self._suites.items():
            obstacle = ""
            if not reason:
                obstacle = self._continue_suite(session, key, suite) or self._find_obstacle()
            result = suite.finish(exit_guard.name_end(reason), reason, command=options.command, obstacle=obstacle)
            self._suite_results[key] = result
            for name, sentence in result.failures.items():
                self._add_failure(name, sentence, key.partition("::")[0])
                session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
        runs_before = [self._result.recorded] if self._result is not None else []
        runs_here = [result.recorded for result in self._suite_results.values()]
        try:
            write_outputs(runs_before, runs_here, options)
        except (JournalWriteError, CannotJudge) as error:
            self._add_failure("outputs", str(error))
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def _continue_suite(self, session: pytest.Session, key: str, suite: SuiteRun) -> str:
        """Plan the tests of a kernel that workers judged in this process too, which reports all results.

        Returns:
          Why this is not possible; empty if it is.
        """
        if suite.is_planned:
            return ""
        path, *names = key.split("::")
        file = self._config.rootpath / path
        try:
            found: Any = pytest.Module.from_parent(session, path=file).obj  # imported as pytest imports test files
            for name in names:
                found = getattr(found, name)
            described = kernel_suite.find_suite(found)
            assert described is not None
            suite.continue_in(self._plan_suite(key, file, described).planned)
        except Exception as error:  # whatever a user's file raises here, the results of the workers are reported
            return f"{path} cannot be loaded after the workers: {type(error).__name__}: {error}"
        return ""

    def _can_follow_up(self, journal: Journal) -> bool:
        """Return whether this process can judge further cases. If not, and the run is red, add a line that says why."""
        from reports.records import RED

        obstacle = self._find_obstacle()
        if obstacle and any(record.verdict in RED for record in journal.recorded.records):
            self._said.append(f"findings are neither confirmed nor diagnosed: {obstacle} (-n 0 does both)")
        return not obstacle

    def _find_obstacle(self) -> str:
        """Return why this process cannot judge further cases: workers hold the accelerator. Empty if it can."""
        import jax

        backend = jax.default_backend()
        return "" if self._shared_address is None or backend == "cpu" else f"workers hold the {backend}"

    def _add_run_failures(self, session: pytest.Session, result: SessionResult) -> None:
        """Add failures of the run as a whole.

        These are known failures that passed, kernels whose results depend on compiler flags, and kernels of which a
        parameter that is probably an operand got nothing.
        """
        from reports.conformity import describe_uncalled

        uncalled = describe_uncalled(result.summary.implementations)
        for name, sentence in uncalled.items():
            self._add_failure(name, sentence)
        for record in result.stale:
            self._add_failure(f"expectations[{record.implementation}-{record.case}]", record.reason)
        for record in result.flag_excess:
            self._add_failure(f"{record.check}[{record.implementation}]", record.reason)
        self._records += [*result.stale, *result.flag_excess]
        if (result.stale or result.flag_excess or uncalled) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _add_failure(self, name: str, reason: str, module: str = node_ids.GATE_PATH) -> None:
        """Add a failure of the run as a whole. pytest counts and reports it like the failure of a test."""
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
        if not (self._records or self._suite_results):
            if self._own is None and self._config.args_source != pytest.Config.ArgsSource.ARGS:
                for line in gate_options.format_reminder(self._config.rootpath):
                    terminalreporter.write_line(line)
            elif self._own is not None:
                for line in self._own.notes:
                    terminalreporter.write_line(line)
            return
        terminalreporter.section("attention conformance")
        from conformance.gate.gate_summary import format_suite_summary, format_terminal_summary
        from conformance.session.planned_run import describe_unasked

        lines: list[str] = []
        report = self._options.report or ""
        if self._records:
            planned = self._plan().planned
            notes = [*planned.notes, *describe_unasked(planned.resolved.implementations)]
            lines += format_terminal_summary(
                self._records, planned.run, self._result, report=report, said=self._said, notes=notes
            )
        for result in self._suite_results.values():
            lines += format_suite_summary(result, report)
        for line in lines:
            terminalreporter.write_line(line)


def _name_mark(implementation: str) -> str:
    """Return the name of the file that tells workers that the jobs of an implementation have ended early."""
    return hashlib.sha256(implementation.encode()).hexdigest()


def _build_test_id(job: Job) -> str:
    """Return the pytest id of a job: implementation, platform, checks, case.

    The id leaves out the checks if they are the usual ones, which every case of the grid gets.
    """
    from conformance.judging.runner import find_platform

    name = job.implementation.name
    return f"{name}-{find_platform(job.implementation)}{job.id.removeprefix(name)}"


def _build_suite_test_id(job: Job) -> str:
    """Return what stands in brackets in the id of a test of a test file: the case, with the checks if unusual."""
    return job.id.removeprefix(f"{job.implementation.name}-")


def _format_test_command(planned: PlannedTests, function: str, record: Record) -> str:
    """Return the command that repeats a record by the test that made it.

    Args:
      planned: the tests of the function.
      function: the id of the test function, from the current folder.
      record: the record.
    """
    from conformance.checks import CHECKS_BY_NAME

    if record.case == "*":  # it is of the run as a whole
        return f"python -m pytest {shlex.quote(function)}"
    test = f"{function}[{planned.find_id(record.case, record.check)}]"
    narrowing = f" -k {record.check}" if record.check in CHECKS_BY_NAME else ""
    return f"python -m pytest {shlex.quote(test)}{narrowing}"


def _get_run_key(item: pytest.Item) -> str:
    """Return the id of the test function of a kernel's test in a test file; empty for a test of the gate."""
    if kernel_suite.find_suite(getattr(item, "function", None)) is None:
        return ""
    return item.nodeid.partition("[")[0]


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
