"""List the signature cases that were not judged and are right all the same, since no finding concerns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cases.signature_cases import SIGNATURE_CASES
from conformance.sensitivity.failure_signatures import Sizes
from reports.causes.case_levels import Level, find_levels
from reports.causes.finding import FORWARD, GRADIENTS, RAISES, Finding, get_result
from reports.records import JUDGED, Record

_SIGNATURE_CHECKS = frozenset({"forward", "gradients", "residuals"})


def list_right_cases(records: Sequence[Record], findings: Sequence[Finding]) -> Mapping[str, Sizes]:
    """List the signature cases on which a kernel is right, with their results, by the findings of its run.

    A case is right if the run judged each feature, mask and dtype that it has, and no finding concerns it. A finding
    that does not say which levels it needs may concern any case; then no case is listed.

    Args:
      records: the records of the kernel in the run.
      findings: all findings of the kernel.
    """
    wrong = [finding for finding in findings if finding.kind in (RAISES, FORWARD, GRADIENTS)]
    if not wrong or not all(finding.levels for finding in wrong):
        return {}
    needed = [frozenset(finding.levels or ()) for finding in wrong]
    judged = [record for record in records if record.verdict in JUDGED and record.check in _SIGNATURE_CHECKS]
    known = {level for case in {record.case for record in judged} for level in _select_features(find_levels(case))}
    results: Sizes = dict.fromkeys(sorted({get_result(record.observable) for record in judged}))
    right: dict[str, Sizes] = {}
    for asked in SIGNATURE_CASES:
        levels = find_levels(asked.case.id)
        if not any(levels >= one for one in needed) and _select_features(levels) <= known:
            right[asked.case.id] = results
    return right


def _select_features(levels: frozenset[Level]) -> frozenset[Level]:
    """Return the levels that a case asks for by itself, without sizes and levels that follow from others."""
    return frozenset(level for level in levels if not level.odds)
