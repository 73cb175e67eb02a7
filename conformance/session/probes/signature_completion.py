"""Complete a signature with cases that there was no time for: a kernel is right where no finding says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from cases.signature_cases import SIGNATURE_CASES
from conformance.records import JUDGED, Record
from conformance.sensitivity.failure_signatures import Signature, Sizes
from reports.causes.case_levels import Level, find_levels
from reports.causes.finding import Finding, get_result

_SIGNATURE_CHECKS = frozenset({"forward", "gradients", "residuals"})


def complete_signature(found: Signature, records: Sequence[Record], findings: Sequence[Finding]) -> Signature:
    """Add to a signature the cases that were not judged and that no finding concerns, as right.

    A case is added if the run judged each feature, mask and dtype that it has. A finding that does not say which levels
    it needs may concern any case; then nothing is added.

    Args:
      found: the signature, of the cases that were judged.
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
    """Return the levels that a case asks for by itself, without sizes and levels that follow from others."""
    return frozenset(level for level in levels if not level.odds)
