"""Build the verdicts and findings of a report as plain data, for programs that read them as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from reports.causes.finding_text import FindingText
from reports.conformity import ImplementationSummary
from reports.page_model import Summary
from reports.records import VERDICTS

SCHEMA = "attention-conformance/findings/1"


def build_findings_document(summary: Summary) -> dict[str, Any]:
    """Build the verdict on each implementation, and all findings, as data that JSON can write."""
    return {
        "schema": SCHEMA,
        "headline": summary.headline,
        "implementations": [_build_verdict(one) for one in summary.implementations],
        "findings": [_build_finding(text) for text in summary.findings],
        "proposals": [
            {"implementation": one.implementation.name, "platform": one.implementation.platform, "code": list(one.code)}
            for one in summary.proposals
        ],
    }


def _build_verdict(one: ImplementationSummary) -> dict[str, Any]:
    return {
        "implementation": one.implementation.name,
        "platform": one.implementation.platform,
        "verdict": one.conformity,
        "text": one.text,
        "reason": one.reason,
        "counts": {verdict: one.counts[verdict] for verdict in VERDICTS},
    }


def _build_finding(text: FindingText) -> dict[str, Any]:
    """Build a finding: its lines as reports print them, and the facts that they are made of."""
    finding, smallest = text.finding, text.finding.smallest
    diagnosis = text.diagnosis
    return {
        "number": text.number,
        "implementation": finding.implementation.name,
        "platform": finding.implementation.platform,
        "title": text.title,
        "sort": text.sort,
        "declarations": list(text.declarations),
        "facts": list(text.facts),
        "evidence": list(text.evidence),
        "resemblance": list(text.resemblance),
        "planted_bugs": None if diagnosis is None else [dataclasses.asdict(bug) for bug in diagnosis.bugs],
        "levels": None if finding.levels is None else [level.name for level in finding.levels],
        "case": smallest.case,
        "check": smallest.check,
        "observable": smallest.observable,
        "verdict": smallest.verdict,
        "ratio": smallest.ratio,
        "limit": smallest.limit,
        "failures": len(finding.records),
        "cases": len({record.case for record in finding.records}),
        "reproduce": smallest.reproduce,
    }
