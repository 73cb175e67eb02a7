"""The pytest gate: one test for each implementation and case.

    pytest                                                   # what pyproject.toml lists
    pytest --pyargs conformance --impl=my.module:attention   # your own kernel, from your own repository
    pytest -k "block_flash and softcap" -n auto

This module is loaded in every pytest run where the package is installed, so it imports nothing heavy by itself.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conformance import packages
from conformance.judging.levels import LEVELS

if TYPE_CHECKING:
    from conformance.judging.job import Job
    from conformance.judging.plan import Plan
    from conformance.judging.runner import Runner
    from conformance.records import Record

_NAME = "attention-conformance-gate"
_GATE = "conformance/test_gate.py"
_ATTRIBUTE = "attention_conformance_records"
_FOUND: pytest.StashKey[list[Record]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the gate; all but `--impl` and `--require-platform` carry its name."""
    group = parser.getgroup("attention conformance")
    group.addoption(
        "--impl", action="append", default=[], metavar="NAME", help="judge this one, or this group; may be repeated"
    )
    group.addoption("--conformance-level", default="quick", choices=LEVELS, help="how much is judged (quick)")
    group.addoption("--conformance-cases", metavar="QUERY", help="only cases that match")
    group.addoption("--conformance-seed", type=int, default=0, metavar="N", help="base seed of the grid (0)")
    group.addoption(
        "--conformance-report", metavar="FILE.html", help="write the HTML report, and its records beside it"
    )
    group.addoption(
        "--require-platform", choices=("cpu", "gpu", "tpu"), help="fail if nothing was judged on this platform"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set up the collection of records."""
    gate = _Gate(config)
    config.pluginmanager.register(gate, _NAME)
    if not hasattr(config, "workerinput"):  # what the main process accepts, its workers need not check again
        gate.check_options()
    elif gate.is_asked_for():  # a worker imports the gate's module before it plans
        packages.claim()


class _Gate:
    """Plans the tests, and gathers the records of all processes in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._planned: Plan | None = None
        self._runner: Runner | None = None
        self._records: list[Record] = []
        self._stale: list[Record] = []
        self._tests: set[str] = set()
        self._started = time.perf_counter()

    @pytest.hookimpl
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "conformance_job" not in metafunc.fixturenames:
            return
        from conformance.judging.runner import platform_of  # imported late: it loads JAX

        jobs = self._plan().jobs
        ids = [self._id(job, platform_of(job.implementation)) for job in jobs]
        metafunc.parametrize("conformance_job", jobs, ids=ids)

    @staticmethod
    def _id(job: Job, platform: str) -> str:
        name = job.implementation.name
        return f"{name}-{platform}{job.id.removeprefix(name)}"

    def check_options(self) -> None:
        """Refuse options that cannot be carried out, before anything is collected or judged."""
        option = self._config.getoption
        if option("--conformance-seed") < 0:
            raise pytest.UsageError(f"--conformance-seed must not be negative, got {option('--conformance-seed')}")
        if (target := option("--conformance-report")) is not None:
            place = Path(target)
            if place.is_dir() or not place.absolute().parent.is_dir() or place.suffix == ".jsonl":
                raise pytest.UsageError(f"--conformance-report={target} is no file that can be written")
        if self.is_asked_for():
            self._plan()

    def is_asked_for(self) -> bool:
        """Whether this run is to judge, as far as its arguments say."""
        option = self._config.getoption
        named = any("conformance" in Path(argument.split("::")[0]).parts for argument in self._config.args)
        return bool(named or option("--impl") or option("--conformance-cases") is not None)

    def _plan(self) -> Plan:
        if self._planned is None:
            from conformance import environment

            environment.prepare()
            try:
                packages.claim()
            except packages.NameTaken as error:
                raise pytest.UsageError(str(error)) from error
            from conformance.calling import registry  # imported late: they load JAX
            from conformance.judging import plan, settings
            from conformance.judging.runner import Runner

            option = self._config.getoption
            try:
                found = settings.load(self._config.rootpath)
                names = found.members(option("--impl") or found.implementations)
                implementations = [registry.find(name) for name in names]
            except (settings.SettingsError, registry.ImplementationNotFound) as error:
                raise pytest.UsageError(str(error)) from error
            if not implementations:
                raise pytest.UsageError(
                    "nothing to judge: give --impl=NAME, or list implementations under "
                    "[tool.attention_conformance] in pyproject.toml"
                )
            self._runner = Runner(found)
            self._planned = plan.plan(
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

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        if self._planned is not None:
            from conformance import environment

            environment.collect_rarely()

    def judge(self, item: pytest.Item, job: Job) -> list[Record]:
        """Judge a job for the test `item`; its records travel with the test's report."""
        self._plan()
        assert self._runner is not None
        found = self._runner.judge(job)
        item.stash[_FOUND] = found
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" and _FOUND in item.stash:
            from conformance.records import to_json

            # A plain attribute of strings: pytest-xdist carries it to the process that reports.
            setattr(report, _ATTRIBUTE, [to_json(record) for record in item.stash[_FOUND]])
        return report

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lines = getattr(report, _ATTRIBUTE, None)
        if lines is not None:
            from conformance.records import from_json

            self._records += [from_json(line) for line in lines]
            self._tests.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workerinput"):
            return
        if self._records:
            self._add_stale()
        for record in self._stale:
            self._add_failure(f"expectations[{record.implementation}-{record.case}]", record.reason)
        if sentence := self._nothing_judged():
            self._add_failure("something_is_judged", sentence)
        if (self._stale or sentence) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._records and (target := self._config.getoption("--conformance-report")):
            self._write_report(Path(target))

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

        from conformance.judging import settings

        option = self._config.getoption
        partly = self._narrowed_to() or option("--conformance-level") == "smoke"
        if not (partly or option("--conformance-seed")):
            found = settings.load(self._config.rootpath)
            self._stale = found.stale(self._records, jax.__version__)
            self._records += self._stale

    def _nothing_judged(self) -> str:
        """What was to be judged and was not, as a sentence; a run of skips alone is no success."""
        from conformance.records import JUDGED

        judged = {record.platform for record in self._records if record.verdict in JUDGED}
        required = self._config.getoption("--require-platform")
        if required and required not in judged:
            return f"--require-platform={required}: nothing was judged there"
        if self._records and not judged:
            return "nothing was judged: every case is unsupported or unjudged"
        return ""

    def _narrowed_to(self) -> str:
        """What was judged where it is not all that the level asks; empty if it was."""
        if (query := self._config.getoption("--conformance-cases")) is not None:
            return f"--conformance-cases={shlex.quote(query)}"
        judged, planned = len(self._tests), len(self._plan().jobs)
        return f"{judged:,} of {planned:,} tests" if judged < planned else ""

    def _write_report(self, target: Path) -> None:
        from conformance import environment, records
        from conformance.calling.registry import find
        from conformance.judging import settings
        from conformance.judging.declarations import declared
        from conformance.judging.reach import few_blocks
        from conformance.judging.runner import hardware_records
        from conformance.sensitivity import detection
        from reports import html

        names = sorted({record.implementation for record in self._records})
        found = records.merge(self._records, hardware_records(find(name) for name in names))
        narrowed = self._narrowed_to()
        info = records.RunInfo(
            command="pytest " + " ".join(self._config.invocation_params.args),
            level=self._config.getoption("--conformance-level"),
            environment=environment.describe(),
            tolerances=settings.load(self._config.rootpath).tolerances.rows(),
            coverage=list(self._plan().coverage),
            seconds=round(time.perf_counter() - self._started, 1),
            detection=detection.load(),
            declared={name: declared(find(name)) for name in names},
            narrowed=narrowed,
            few_blocks={} if narrowed else {name: few_blocks(find(name), found) for name in names},
        )
        html.write(target, found, info)
        records.write_jsonl(target.with_suffix(".jsonl"), found)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._records:
            return
        terminalreporter.section("attention conformance")
        for line in _table(self._records):
            terminalreporter.write_line(line)


def _table(found: list[Record]) -> list[str]:
    """Counts of verdicts by implementation and platform, as aligned lines."""
    counts: dict[str, Counter[str]] = {}
    for record in found:
        counts.setdefault(f"{record.implementation} ({record.platform})", Counter())[record.verdict] += 1
    width = max(map(len, counts))
    return [
        f"{name:<{width}}  " + ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items()))
        for name, count in sorted(counts.items())
    ]


@pytest.fixture
def conformance_judge(request: pytest.FixtureRequest) -> Callable[[Job], list[Record]]:
    """Judges a job of the plan, and keeps its records for the report."""
    gate = request.config.pluginmanager.get_plugin(_NAME)
    assert isinstance(gate, _Gate)
    return lambda job: gate.judge(request.node, job)
