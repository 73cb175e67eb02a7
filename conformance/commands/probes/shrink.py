"""Shrinking findings at the end of a run, if that is asked for."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from rich.console import Console

from cases.case import Case, parse
from conformance.asking.scopes import GRID
from conformance.checks import BY_NAME
from conformance.commands.probes import confirm
from conformance.contract import Implementation
from conformance.judging.journal import Journal
from conformance.judging.probing import shrinking
from conformance.judging.probing.allowance import Allowance
from conformance.judging.probing.confirming import Prober
from conformance.judging.runner import Runner
from reports.causes import roots
from reports.causes.levels import Level, levels_of

MOST_SHRUNK = 3
"""Findings that `--shrink` shrinks, the foremost."""
SHRINK_SECONDS = 60.0
"""For each of them, at most."""


def shrink(
    journal: Journal, implementations: Sequence[Implementation], runner: Runner, console: Console
) -> Iterator[str]:
    """Shrink what shows the first findings, and say what the smallest cases are; they are written down as well."""
    kernels = {implementation.name: implementation for implementation in implementations}
    prober = Prober(Allowance(runner, math.inf), implementations, math.inf, journal.probe)
    for number, finding in enumerate(roots.of(journal.recorded.records, journal.recorded.probes)[:MOST_SHRUNK], 1):
        smallest = finding.smallest
        if smallest.check not in BY_NAME or BY_NAME[smallest.check].scope is not GRID:
            yield f"finding {number} is not shrunk: {smallest.check} is not asked of any case"
            continue
        console.print(f"shrinking finding {number}; Ctrl-C stops with the smallest case so far", highlight=False)
        shrunk = shrinking.shrink(
            kernels[smallest.implementation],
            runner,
            parse(smallest.case),
            smallest,
            seconds=SHRINK_SECONDS,
            keeps=functools.partial(_has, frozenset(finding.levels or ())),
        )
        stopped = "" if shrunk.to_the_end else ", stopped before the end"
        yield f"smallest of finding {number}: {shrunk.case} ({shrunk.tried} others tried{stopped})"
        yield from (record.reproduce for record in shrunk.records[:1])
        if shrunk.tried:
            journal.probe(shrunk.records)
        if shrunk.tried and finding.levels:
            prober.know([*journal.recorded.records, *journal.recorded.probes])
            prober.beside(dataclasses.replace(confirm.suspicion(finding), failing=shrunk.case.id))


def _has(levels: frozenset[Level], case: Case) -> bool:
    return levels <= levels_of(case.id)
