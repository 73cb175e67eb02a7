"""Say what a run of the gate was to judge and did not: a run of skips alone is no success."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from conformance.records import JUDGED, Record
from conformance.session.session import Session

# Options of pytest and of common plugins that leave out no test of a run that ends in success; ours are counted.
_SELECTING_NOTHING = (
    *("--conformance-", "--impl", "--require-platform", "--pyargs", "-n", "--numprocesses", "--maxprocesses", "--dist"),
    *("-q", "--quiet", "-v", "--verbose", "-s", "--capture", "-r", "--show", "-l", "--tb", "--color", "--full-trace"),
    *("--durations", "--no-header", "--no-summary", "--junit", "--report-log", "--html", "--log", "--cov", "--timeout"),
    *("-p", "-c", "-o", "--override-ini", "-W", "--disable-warnings", "--strict", "--rootdir", "--noconftest"),
    *("--import-mode", "--basetemp", "--cache-clear", "-x", "--exitfirst", "--maxfail", "--pdb"),
)


def find_missing_judgements(records: Iterable[Record], required: str | None) -> str:
    """Say in a sentence that nothing was judged, at all or on the required platform; empty if something was.

    A run without any record is not judged here: `find_omitted_jobs` is about it.
    """
    found = list(records)
    judged = {record.platform for record in found if record.verdict in JUDGED}
    if required and required not in judged:
        return f"--require-platform={required}: nothing was judged there"
    if found and not judged:
        return "nothing was judged: every case is unsupported or unjudged"
    return ""


def find_omitted_jobs(
    config: pytest.Config, session: Session | None, judged: Collection[int], records: Collection[Record]
) -> str:
    """Say in a sentence that jobs were planned and not judged, though no argument asks for that; empty if none were.

    Settings, a plugin or a `conftest.py` may have left out their tests, skipped them, or withheld their records.

    Args:
      config: of pytest.
      session: the session that planned the jobs, if one did.
      judged: the numbers of the jobs that were judged under all of their checks.
      records: all records that came.
    """
    arguments = [str(argument) for argument in config.invocation_params.args]
    if session is None or {"--collect-only", "--collectonly", "--co"} & set(arguments):
        return ""
    if not records:
        return "nothing was judged: no test was run (see addopts in the settings of pytest)"
    if any(map(_may_select, arguments)):
        return ""
    planned = len(session.jobs)
    missing = planned - len(judged)
    if missing <= 0:
        return ""
    why = "no argument asks for that: see addopts in the settings of pytest, plugins and conftest.py"
    return f"{missing:,} of {planned:,} jobs were planned and not judged, and {why}"


def _may_select(argument: str) -> bool:
    """Tell whether an argument may leave out tests, as an option that is not known here may."""
    if not argument.startswith("-"):
        return "::" in argument
    return not argument.startswith(_SELECTING_NOTHING)
