"""What a run tells of cases that there was no time for: a kernel is right where no finding says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from cases.signature_cases import SIGNATURE_CASES
from conformance.records import JUDGED, Record
from conformance.sensitivity.signatures import Signature, Sizes
from reports.causes.finding import Finding, result_of
from reports.causes.levels import Level, levels_of

_CHECKS = frozenset({"forward", "gradients", "residuals"})


def presumed(found: Signature, records: Sequence[Record], findings: Sequence[Finding]) -> Signature:
    """A signature with the cases that were not asked, and that no finding concerns, as right.

    A case counts if the run judged each feature, mask and dtype that it has. Where a finding does not say which levels
    it needs, any case may fail by it, and nothing is added.

    Args:
      found: the signature, of the cases that were asked.
      records: those of the kernel in the run.
      findings: those of the kernel.
    """
    if not findings or not all(finding.levels for finding in findings):
        return found
    needed = [frozenset(finding.levels or ()) for finding in findings]
    judged = [record for record in records if record.verdict in JUDGED and record.check in _CHECKS]
    known = {level for case in {record.case for record in judged} for level in _features(levels_of(case))}
    right: Sizes = dict.fromkeys(sorted({result_of(record.observable) for record in judged}))
    sizes = dict(found.sizes)
    for asked in SIGNATURE_CASES:
        levels = levels_of(asked.case.id)
        if not any(levels >= one for one in needed) and _features(levels) <= known:
            sizes.setdefault(asked.case.id, right)
    return Signature(sizes)


def _features(levels: frozenset[Level]) -> frozenset[Level]:
    """What a case asks for, without its sizes and what follows from other levels."""
    return frozenset(level for level in levels if not level.odds)
