"""Evaluate the plainest case of each finding in float64, to tell what rounds too much from what is wrong exactly."""

from __future__ import annotations

from collections.abc import Sequence

from cases.case_id import parse_case_id
from conformance.checks import CHECKS_BY_NAME
from conformance.follow_up.probe_budget import ProbeBudget
from conformance.judging.job import Job
from conformance.judging.journal import Journal
from impls.contract.implementation import Implementation
from reports.causes import root_causes
from reports.causes.finding import ALGORITHM, FORWARD, GRADIENTS

_MAX_EVALUATED = 6  # each evaluation compiles a program


def evaluate_findings(journal: Journal, implementations: Sequence[Implementation], allowed: ProbeBudget) -> None:
    """Judge the plainest case of findings by the check `algorithm`, and record it in the journal as probes."""
    by_name = {implementation.name: implementation for implementation in implementations}
    recorded = journal.recorded
    evaluated = {(r.implementation, r.case) for r in (*recorded.records, *recorded.probes) if r.check == ALGORITHM}
    wanted = [
        (finding.smallest.implementation, finding.smallest.case)
        for finding in root_causes.find_root_causes(recorded.records, recorded.probes)
        if finding.kind in (FORWARD, GRADIENTS) and finding.smallest.implementation in by_name
    ]
    for name, case in list(dict.fromkeys(one for one in wanted if one not in evaluated))[:_MAX_EVALUATED]:
        judged = allowed.judge(Job(by_name[name], parse_case_id(case), (CHECKS_BY_NAME[ALGORITHM],)))
        if judged is not None:
            journal.add_probes(judged)
