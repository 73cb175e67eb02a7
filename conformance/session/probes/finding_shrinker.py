"""Shrink findings at the end of a run (`--shrink`): search for the smallest case that fails in the same way."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from cases.case import Case
from cases.case_id import parse_case_id
from conformance.check_api.scopes import GRID
from conformance.checks import CHECKS_BY_NAME
from conformance.judging.failure_probes import shrinker
from conformance.judging.failure_probes.confirmation import Prober
from conformance.judging.failure_probes.probe_budget import ProbeBudget
from conformance.judging.journal import Journal
from conformance.judging.runner import Runner
from conformance.session.probes import finding_confirmation
from impls.contract.implementation import Implementation
from reports.causes import root_causes
from reports.causes.case_levels import Level, find_levels

MAX_SHRUNK = 3
"""The number of findings that `--shrink` shrinks: the first ones of the report."""
SHRINK_SECONDS = 60.0
"""The most seconds for shrinking one finding."""


def shrink_findings(
    journal: Journal, implementations: Sequence[Implementation], runner: Runner, say: Callable[[str], None]
) -> Iterator[str]:
    """Shrink the smallest failing cases of the first findings further, and yield lines that describe the results.

    The records of the shrunk cases are added to the journal as probes, which are not counted.

    Args:
      journal: the journal of the run, which has its records and gets the probes.
      implementations: the implementations of the run.
      runner: judges the cases.
      say: called with lines for the user while this goes on.
    """
    kernels = {implementation.name: implementation for implementation in implementations}
    prober = Prober(ProbeBudget(runner, math.inf), implementations, math.inf, journal.add_probes)
    for number, finding in enumerate(
        root_causes.find_root_causes(journal.recorded.records, journal.recorded.probes)[:MAX_SHRUNK], 1
    ):
        smallest = finding.smallest
        if smallest.check not in CHECKS_BY_NAME or CHECKS_BY_NAME[smallest.check].scope is not GRID:
            yield f"finding {number} is not shrunk: {smallest.check} runs on cases of its own only"
            continue
        say(f"shrinking finding {number}; Ctrl-C stops with the smallest case so far")
        shrunk = shrinker.shrink(
            kernels[smallest.implementation],
            runner,
            parse_case_id(smallest.case),
            smallest,
            seconds=SHRINK_SECONDS,
            keeps=functools.partial(_has_levels, frozenset(finding.levels or ())),
        )
        stopped = "" if shrunk.is_finished else ", stopped before the end"
        yield f"smallest of finding {number}: {shrunk.case} ({shrunk.tried} others tried{stopped})"
        yield from (record.reproduce for record in shrunk.records[:1])
        if shrunk.tried:
            journal.add_probes(shrunk.records)
        if shrunk.tried and finding.levels:
            prober.remember([*journal.recorded.records, *journal.recorded.probes])
            prober.confirm_failing_case(
                dataclasses.replace(finding_confirmation.build_suspicion(finding), failing=shrunk.case.id)
            )


def _has_levels(levels: frozenset[Level], case: Case) -> bool:
    return levels <= find_levels(case.id)
