"""Complete the signature of a failing kernel with cases that there was no time to judge.

The signature, the error sizes on a fixed set of cases, is compared with those of planted bugs. A case that was not
judged is assumed to be right if no finding of the run concerns it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cases.signature_cases import SIGNATURE_CASES
from conformance.records import JUDGED, Record
from conformance.sensitivity.failure_signatures import Signature, Sizes
from reports.causes.case_levels import Level, find_levels
from reports.causes.finding import Finding, get_result

_SIGNATURE_CHECKS = frozenset({"forward", "gradients", "residuals"})


def complete_signature(found: Signature, records: Sequence[Record], findings: Sequence[Finding]) -> Signature:
    """Add to a signature, as right, the unjudged cases that no finding concerns.

    A case is added if the run judged each feature, mask and dtype of the case. A finding without levels may concern any
    case. If there is one, nothing is added.

    Args:
      found: the signature of the judged cases.
      records: the records of the kernel in the run.
      findings: the findings of the kernel.
    """
    if not findings or not all(finding.levels for finding in findings):
        return found
    needed = [frozenset(finding.levels or ()) for finding in findings]
    judged = [record for record in records if record.verdict in JUDGED and record.check in _SIGNATURE_CHECKS]
    known = {level for case in {record.case for record in judged} for level in _select_features(find_levels(case))}
    right: Sizes = dict.fromkeys(sorted({get_result(record.observable) for record in judged}))
    sizes = dict(found.sizes)
    for asked in SIGNATURE_CASES:
        levels = find_levels(asked.case.id)
        if not any(levels >= one for one in needed) and _select_features(levels) <= known:
            sizes.setdefault(asked.case.id, right)
    return Signature(sizes)


def _select_features(levels: frozenset[Level]) -> frozenset[Level]:
    """Return the levels of a case that are features, without sizes and without levels that others imply."""
    return frozenset(level for level in levels if not level.odds)
