"""Build the plain data that reports show, from the records of a run and its run record (`RunInfo`).

The records are grouped once (`reports.record_groups`). `Summary` is what every report shows, and all that the terminal
and the Markdown summary need. `Page` adds what only the HTML page shows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from reports import section_summaries
from reports.causes.finding import classify_record
from reports.causes.finding_text import FindingText, describe_finding, list_evidence
from reports.causes.proposal_text import ProposalText, describe_proposals
from reports.causes.root_causes import find_implementation_causes
from reports.compiled_section import CompiledSection, build_compiled_section
from reports.conformity import (
    ImplementationSummary,
    summarize_run,
)
from reports.detection_section import Detection, build_detection
from reports.glossary import Glossary, build_glossary
from reports.limit_distances import DistanceChart, build_distance_charts
from reports.matrices import Matrix, build_matrices
from reports.measures import Measures, build_measures
from reports.metrics import Counts, count_verdicts, rank_failure
from reports.record_groups import (
    JudgedImplementation,
    RecordGroups,
    group_by_implementation,
    group_by_result,
    group_records,
)
from reports.record_query import RecordFiles
from reports.records import EXPECTED_FAIL, FLAGS_DIFFER, JUDGED, Record, RunInfo
from reports.records.measurement import Measurement
from reports.section_summaries import SectionSummary
from reports.speed_section import SpeedPanel, build_speed_panels
from reports.text_format import format_count
from reports.unreached_branches import UnreachedBranches, find_unreached

SHOWN_PER_GROUP = 5
"""The most records of each group of a finding that the page shows if its script does not run."""
MAX_FAILURES = 200
"""The most rows in the tables of expected failures: enough to see every pattern, few enough to open on a phone."""
MAX_ROWS = 200
MAX_CASES = 3_000
"""The most cases that have an HTML anchor on the page."""
_SHAPE = re.compile(r"B(\d+)\.T(\d+)\.S(\d+)\.N(\d+)\.K\d+\.H(\d+)\.V\d+")


@dataclasses.dataclass(frozen=True)
class UndecidedRows:
    """Rows of an implementation's results that were not judged: rounding could change which keys their queries select.

    Attributes:
      implementation: the implementation.
      cases: how many cases have such rows.
      rows: how many such rows there are.
      of_rows: how many rows these cases have in total.
      worst_case: the case with the largest share of such rows.
    """

    implementation: JudgedImplementation
    cases: int
    rows: int
    of_rows: int
    worst_case: str

    @property
    def text(self) -> str:
        """A phrase that states how many rows were not judged, and why."""
        rows = f"{self.rows:,} of {self.of_rows:,} rows of {format_count(self.cases, 'case')}"
        return f"{rows} not judged: rounding could change which keys they choose"


@dataclasses.dataclass(frozen=True)
class FlagDifference:
    """Judgements of an implementation that differ between compiler flags. The judgements under JAX's own flags count.

    Attributes:
      implementation: the implementation.
      count: the number of these judgements.
      smallest: the record among them whose case is smallest.
    """

    implementation: JudgedImplementation
    count: int
    smallest: Record

    @property
    def text(self) -> str:
        """A phrase that states how many judgements depend on the compiler's flags."""
        differ = "1 judgement differs" if self.count == 1 else f"{self.count:,} judgements differ"
        return (
            f"{differ} by the compiler's flags, and the judgements under JAX's own flags count. "
            f"The smallest case is {self.smallest.case}"
        )


@dataclasses.dataclass(frozen=True)
class Summary:
    """What every report of a run shows.

    Attributes:
      run: the run record: level, versions and other facts about the whole run.
      groups: the records of the run, grouped.
      total: the number of records by verdict.
      headline: one sentence about the whole run.
      heading: the headline without the details of a single implementation.
      state: whether the run is complete, and to which part of its level it was narrowed.
      shortfall: a warning that planned jobs were not judged; empty if all were judged.
      implementations: the verdict on each implementation, in the order of their names.
      findings: the causes of all red records.
      proposals: for implementations with findings that pass under declarations, one decorator that covers them.
      undecided_rows: rows of results that were not judged, by implementation.
      flag_differences: judgements that depend on the compiler's flags, by implementation.
      unreached: branches of the kernels' source that no case reaches, by implementation.
    """

    run: RunInfo
    groups: RecordGroups
    total: Counts
    headline: str
    heading: str
    state: str
    shortfall: str
    implementations: tuple[ImplementationSummary, ...]
    findings: tuple[FindingText, ...]
    proposals: tuple[ProposalText, ...]
    undecided_rows: tuple[UndecidedRows, ...]
    flag_differences: tuple[FlagDifference, ...]
    unreached: tuple[UnreachedBranches, ...]


@dataclasses.dataclass(frozen=True)
class FailureGroup:
    """Records of one implementation, check, observable and verdict, worst first.

    Attributes:
      implementation, check, observable, verdict: those of the records.
      records: all records of the group.
      shown: how many of them the page shows if its script does not run.
      common_features: the features that all their cases have.
      evidence: error figures and reason of the worst record, one per line.
    """

    implementation: JudgedImplementation
    check: str
    observable: str
    verdict: str
    records: tuple[Record, ...]
    shown: int
    common_features: tuple[str, ...]
    evidence: tuple[str, ...]

    @property
    def hidden(self) -> int:
        """How many records of the group are not shown."""
        return len(self.records) - self.shown

    @property
    def common_reason(self) -> str:
        """The reason that all records of the group share; empty if reasons differ or there is only one record."""
        reasons = {record.reason for record in self.records}
        return self.records[0].reason if len(reasons) == 1 and len(self.records) > 1 else ""


@dataclasses.dataclass(frozen=True)
class FindingPanel:
    """A finding as the page shows it: its sentences, and its records by check and result."""

    text: FindingText
    groups: tuple[FailureGroup, ...]


@dataclasses.dataclass(frozen=True)
class ReasonGroup:
    """A reason why records of an implementation were not judged: `count` have it, the first in case `example`."""

    implementation: JudgedImplementation
    verdict: str
    reason: str
    count: int
    example: str


@dataclasses.dataclass(frozen=True)
class CaseCounts:
    """A case id, and the number of its records by verdict."""

    case: str
    counts: Counts


@dataclasses.dataclass(frozen=True)
class FreeTable:
    """A list of dictionaries as a table.

    Its columns are the union of the keys. `numeric` names the columns that hold only numbers. `hidden` rows are left
    out.
    """

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    numeric: frozenset[str]
    hidden: int


@dataclasses.dataclass(frozen=True)
class Page:
    """All that the HTML page shows.

    Attributes:
      summary: what other reports show too.
      files: the files of records that commands on the page read.
      findings: the findings with their records.
      expected: groups of expected failures.
      features, checks: the matrices of features by implementations, and of checks by implementations.
      cases: the cases that have an HTML anchor on the page; `cases_hidden` more have none.
      reasons: reasons why records were not judged; `reasons_hidden` more are left out.
      measures: tables of the spread of ratios, gradients, margins and cost.
      compiled: the section on kernels compiled for accelerators; None if nothing was compiled.
      speed: timings of implementations side by side, one panel for each case and phase.
      detection: the section on planted bugs that the checks detect; None if that was not measured.
      coverage, tolerances: tables of the run record.
      distances: how far each check stays from its limits.
      glossary: what the checks and terms of the page mean.
      folded: one line about each section that the page folds, by the address of the section.
    """

    summary: Summary
    files: RecordFiles
    findings: tuple[FindingPanel, ...]
    expected: tuple[FailureGroup, ...]
    features: Matrix
    checks: Matrix
    cases: tuple[CaseCounts, ...]
    cases_hidden: int
    reasons: tuple[ReasonGroup, ...]
    reasons_hidden: int
    measures: Measures
    compiled: CompiledSection | None
    speed: tuple[SpeedPanel, ...]
    detection: Detection | None
    coverage: FreeTable
    tolerances: FreeTable
    distances: tuple[DistanceChart, ...]
    glossary: Glossary
    folded: Mapping[str, SectionSummary]

    @functools.cached_property
    def case_addresses(self) -> frozenset[str]:
        """The ids of the cases that have an HTML anchor on the page."""
        return frozenset(line.case for line in self.cases)


def build_summary(records: Sequence[Record], run: RunInfo) -> Summary:
    """Build the summary that every report of a run shows, from the run's records."""
    groups = group_records(records)
    found = summarize_run(groups.by_implementation, run)
    causes = find_implementation_causes(groups.by_implementation, group_by_implementation(run.probes))
    option = spell_diagnose_option(run.command)
    findings = tuple(
        describe_finding(
            number,
            finding,
            run.diagnoses.get(finding.key),
            run.proposals.get(finding.implementation.label),
            option=option,
        )
        for number, finding in enumerate(causes, 1)
    )
    return Summary(
        run=run,
        groups=groups,
        total=count_verdicts(records),
        headline=found.headline,
        heading=found.heading,
        state=found.state,
        shortfall=found.shortfall,
        implementations=found.implementations,
        findings=findings,
        proposals=describe_proposals(findings, run),
        undecided_rows=_find_undecided_rows(groups),
        flag_differences=_find_flag_differences(groups),
        unreached=find_unreached(groups.by_implementation),
    )


def spell_diagnose_option(command: str) -> str:
    """Return the option, or argument in Python, with which a command has time to compare findings with planted bugs."""
    if command.startswith("conformance.check("):
        return "diagnose_seconds"
    return "--conformance-diagnose-seconds" if command.startswith("pytest") else "--diagnose-seconds"


def build_page(summary: Summary, measurements: Sequence[Measurement] = (), file: str = "*.jsonl") -> Page:
    """Build all that the HTML page shows.

    Args:
      summary: the summary of the run.
      measurements: timings from the command `bench`, to be shown beside the records.
      file: the files of records that commands on the page read, quoted for a shell. If the run record names the files
        of an implementation, the commands for that implementation read them instead.
    """
    groups, run = summary.groups, summary.run
    names = {label: " ".join(map(shlex.quote, paths)) for label, paths in run.files.items()}
    files = RecordFiles(file, names, run.runs)
    features, checks = build_matrices(groups)
    cases = _list_cases(groups)
    reasons = _list_reasons(groups)
    expected = group_by_result(record for record in groups.records if record.verdict == EXPECTED_FAIL)
    measures = build_measures(groups)
    compiled = build_compiled_section(groups.compilations)
    speed = build_speed_panels(measurements)
    detection = build_detection(run.detection)
    return Page(
        summary=summary,
        files=files,
        findings=tuple(_build_panel(text) for text in summary.findings),
        expected=build_failure_groups(expected, cap=MAX_FAILURES),
        features=features,
        checks=checks,
        cases=tuple(sorted(cases[:MAX_CASES], key=lambda line: line.case)),
        cases_hidden=max(0, len(cases) - MAX_CASES),
        reasons=reasons[:MAX_ROWS],
        reasons_hidden=max(0, len(reasons) - MAX_ROWS),
        measures=measures,
        compiled=compiled,
        speed=speed,
        detection=detection,
        coverage=build_free_table(run.coverage),
        tolerances=build_free_table(run.tolerances),
        distances=build_distance_charts(groups),
        glossary=(glossary := build_glossary(checks.rows, run.check_meanings)),
        folded={
            "reasons": section_summaries.summarize_reasons(groups, summary.total),
            "ratios": section_summaries.summarize_ratios(measures.distributions),
            "gradients": section_summaries.summarize_gradients(measures.gradients),
            "discrimination": section_summaries.summarize_margins(measures.margins),
            "compiled": section_summaries.summarize_compiled(compiled),
            "speed": section_summaries.summarize_speed(speed),
            "detection": section_summaries.summarize_detection(detection),
            "coverage": section_summaries.summarize_coverage(run.coverage),
            "tolerances": section_summaries.summarize_tolerances(run.tolerances),
            "environment": section_summaries.summarize_environment(run),
            "cost": section_summaries.summarize_cost(measures.cost),
            "words": section_summaries.summarize_glossary(glossary),
        },
    )


def build_failure_groups(
    groups: Mapping[tuple[JudgedImplementation, str, str, str], Sequence[Record]], *, cap: int
) -> tuple[FailureGroup, ...]:
    """Rank the records of each group, worst first, and choose at most `cap` records to be shown.

    The cap is shared out evenly, so that one noisy check cannot push the others out of the report.
    """
    ranked = {key: sorted(groups[key], key=rank_failure) for key in sorted(groups)}
    quotas = _distribute_quota(list(ranked.values()), cap)
    return tuple(
        FailureGroup(*key, tuple(records), quota, _find_common_features(records), tuple(list_evidence(records[0])))
        for (key, records), quota in zip(ranked.items(), quotas, strict=True)
    )


def build_free_table(rows: Sequence[Mapping[str, Any]]) -> FreeTable:
    """Build a table from dictionaries, columns in the order of first appearance."""
    columns = tuple(dict.fromkeys(str(column) for row in rows for column in row))
    numeric = frozenset(c for c in columns if all(isinstance(row.get(c, 0), int | float | None) for row in rows))
    return FreeTable(columns, tuple(rows[:MAX_ROWS]), numeric, max(0, len(rows) - MAX_ROWS))


def _build_panel(text: FindingText) -> FindingPanel:
    """Build the panel of a finding from all its records. Groups of the finding's own kind come first.

    Each group shows at most `SHOWN_PER_GROUP` records.
    """
    records = text.finding.records
    groups = [
        dataclasses.replace(group, shown=min(group.shown, SHOWN_PER_GROUP))
        for group in build_failure_groups(group_by_result(records), cap=len(records))
    ]
    groups.sort(key=lambda group: classify_record(group.records[0]) != text.finding.kind)
    return FindingPanel(text, tuple(groups))


def _list_reasons(groups: RecordGroups) -> tuple[ReasonGroup, ...]:
    """List the reasons why records were not judged, the most frequent of an implementation and verdict first."""
    found = groups.by_reason
    order = sorted(found, key=lambda key: (key[0], key[1], -len(found[key]), key[2]))
    return tuple(ReasonGroup(*key, count=len(found[key]), example=found[key][0].case) for key in order)


def _list_cases(groups: RecordGroups) -> list[CaseCounts]:
    """List the cases in the order of their ids, those with red records first."""
    lines = [CaseCounts(case, count_verdicts(records)) for case, records in groups.by_case.items()]
    return sorted(lines, key=lambda line: (not line.counts.red, line.case))


def _find_undecided_rows(groups: RecordGroups) -> tuple[UndecidedRows, ...]:
    """Find the rows of results that no record judges, for each implementation; each case counts once."""
    found = []
    for implementation, records in groups.by_implementation.items():
        cases = {
            record.case: (record.figures["undecided_rows"], record.figures["rows"])
            for record in records
            if record.verdict in JUDGED and "undecided_rows" in record.figures
        }
        if cases:
            rows, of_rows = (int(math.fsum(column)) for column in zip(*cases.values(), strict=True))
            worst = max(cases, key=lambda case: cases[case][0] / cases[case][1])
            found.append(UndecidedRows(implementation, len(cases), rows, of_rows, worst))
    return tuple(found)


def _find_flag_differences(groups: RecordGroups) -> tuple[FlagDifference, ...]:
    """Find the judgements of each implementation that differ by the compiler's flags."""
    found = []
    for implementation, records in groups.by_implementation.items():
        if differing := [record for record in records if FLAGS_DIFFER in record.figures]:
            smallest = min(differing, key=lambda record: (_compute_size(record.case), record.key))
            found.append(FlagDifference(implementation, len(differing), smallest))
    return tuple(found)


def _compute_size(case: str) -> float:
    """Return the product of B, T, S, N and H of a case id, or infinity if the id has no shape."""
    shape = _SHAPE.search(case)
    return math.prod(map(int, shape.groups())) if shape else math.inf


def _find_common_features(records: Sequence[Record]) -> tuple[str, ...]:
    common = set(records[0].features).intersection(*(record.features for record in records))
    return tuple(feature for feature in dict.fromkeys(records[0].features) if feature in common)


def _distribute_quota(groups: Sequence[Sequence[Record]], cap: int) -> list[int]:
    """Return how many records of each group to show.

    Groups take turns, one record each, the group with the worst record first.
    """
    order = sorted(range(len(groups)), key=lambda place: rank_failure(groups[place][0]))
    quotas = [0] * len(groups)
    while cap > 0 and (unfilled := [place for place in order if quotas[place] < len(groups[place])]):
        for place in unfilled[:cap]:
            quotas[place] += 1
        cap -= min(cap, len(unfilled))
    return quotas
