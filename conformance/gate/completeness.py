"""Find jobs that a run of the gate should have judged and did not.

Otherwise a run in which pytest skips or deselects every test would count as a success.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from conformance.session.planned_run import PlannedRun
from reports.records import JUDGED, RED, Record

# Prefixes of options, of pytest and common plugins, that leave out no test of a successful run. Options of the gate are
# among them: jobs that they leave out are not planned.
_SELECTING_NOTHING = (
    *("--conformance-", "--impl", "--require-platform", "--pyargs", "-n", "--numprocesses", "--maxprocesses", "--dist"),
    *("-q", "--quiet", "-v", "--verbose", "-s", "--capture", "-r", "--show", "-l", "--tb", "--color", "--full-trace"),
    *("--durations", "--no-header", "--no-summary", "--junit", "--report-log", "--html", "--log", "--cov", "--timeout"),
    *("-p", "-c", "-o", "--override-ini", "-W", "--disable-warnings", "--strict", "--rootdir", "--noconftest"),
    *("--import-mode", "--basetemp", "--cache-clear", "-x", "--exitfirst", "--maxfail", "--pdb"),
)


def find_unjudged_platform(records: Iterable[Record], required: str) -> str:
    """Return a sentence if nothing was judged on the required platform; otherwise an empty string."""
    is_judged = any(record.platform == required and record.verdict in JUDGED for record in records)
    return "" if is_judged else f"--require-platform={required}: nothing was judged there"


def find_missing_judgements(records: Iterable[Record]) -> str:
    """Return a sentence if nothing was judged; otherwise an empty string.

    `find_omitted_jobs` reports a run without any record.
    """
    found = list(records)
    is_judged = any(record.verdict in JUDGED for record in found)
    is_red = any(record.verdict in RED for record in found)  # then tests fail already, and say why
    if found and not is_judged and not is_red:
        return "nothing was judged: every case is unsupported or unjudged"
    return ""


def find_omitted_jobs(
    config: pytest.Config, planned: PlannedRun | None, judged: Collection[int], records: Collection[Record]
) -> str:
    """Return a sentence if planned jobs were not judged although no argument deselects any; otherwise an empty string.

    Settings, a plugin or a `conftest.py` may have left out or skipped the tests of such jobs, or withheld their
    records.

    Args:
      config: the configuration of pytest.
      planned: the run; None if no jobs were planned.
      judged: the numbers of the jobs that were judged by all of their checks.
      records: all records of the run.
    """
    arguments = [str(argument) for argument in config.invocation_params.args]
    if planned is None or {"--collect-only", "--collectonly", "--co"} & set(arguments):
        return ""
    if not records:
        return "nothing was judged: no test was run (see addopts in the settings of pytest)"
    if any(map(_may_select, arguments)):
        return ""
    total = len(planned.jobs)
    missing = total - len(judged)
    if missing <= 0:
        return ""
    why = "no argument asks for that: see addopts in the settings of pytest, plugins and conftest.py"
    return f"{missing:,} of {total:,} jobs were planned and not judged, and {why}"


def _may_select(argument: str) -> bool:
    """Return whether a command-line argument may leave out tests. Unknown options count as such."""
    if not argument.startswith("-"):
        return "::" in argument
    return not argument.startswith(_SELECTING_NOTHING)
