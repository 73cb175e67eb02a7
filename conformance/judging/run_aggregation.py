"""Merge recorded runs into the data of a report: records, coverage, completeness, limits and environment.

Everything comes from the recorded runs, so a run and a report of its file say the same. Runs of different provenance
stay separate: records of one never count for the other. Facts that no run record has are shown as unknown.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from conformance.checks import CHECKS
from conformance.judging.block_coverage import describe_block_counts
from reports import records
from reports.records import (
    COMPLETE,
    JUDGED,
    Extent,
    Kernel,
    Proposal,
    Record,
    RecordedRun,
    Run,
    RunInfo,
    list_differences,
)

UNKNOWN = "unknown"
EXPLORATION_LEVEL = "explore"
"""The level in the run record of an exploration, whose cases are drawn."""
_MAX_LABEL_FACTS = 2  # the largest number of facts in a label that distinguishes runs of one kernel
_MAX_VALUE_LENGTH = 24
_UNLABELLED = frozenset({"declared", "tolerances"})  # facts whose values are tables, too long for a label


@dataclasses.dataclass(frozen=True)
class _ProvenanceGroup:
    """The runs of one provenance that judged an implementation on a platform, and their records.

    Attributes:
      implementation: the name of the implementation.
      platform: the platform on which it was judged.
      label: a few words that distinguish this provenance from others; empty if there is only one.
      runs: the runs. `run` of each is None if the file has no run record: then the provenance is unknown.
      records: the records of this implementation and platform.
      probes: the records of its probes.
      proposal: the declarations that its runs tried on findings; None if they tried none.
    """

    implementation: str
    platform: str
    label: str
    runs: tuple[RecordedRun, ...]
    records: tuple[Record, ...]
    probes: tuple[Record, ...] = ()
    proposal: Proposal | None = None

    @property
    def name(self) -> str:
        """The name of the group in reports: `implementation (platform, label)`."""
        return f"{self.implementation} ({', '.join(filter(None, (self.platform, self.label)))})"

    @property
    def judged(self) -> tuple[str, str]:
        """The implementation and platform. Groups of other provenance may have the same."""
        return self.implementation, self.platform

    @property
    def sources(self) -> set[str]:
        """The files that contain the group's runs."""
        return {one.source for one in self.runs if one.source}

    @property
    def kernel(self) -> Kernel | None:
        """The facts that the first run records about the implementation; None if it records none."""
        run = self.runs[0].run
        return run.kernels.get(self.implementation) if run is not None else None


def aggregate_runs(
    recorded: Sequence[RecordedRun], *, command: str, detection: dict[str, Any] | None = None
) -> tuple[list[Record], RunInfo]:
    """Merge the records of runs, and collect the other facts that a report shows.

    Args:
      recorded: the runs, read from files or judged by this process.
      command: the command line that requested the report.
      detection: the planted bugs that the gate detects (`conformance.sensitivity.detection_table`).
    """
    groups = _group_by_provenance(recorded)
    merged = records.merge_records(*(group.records for group in groups))
    extents = {group.name: _compute_extent(group) for group in groups}
    kernels = [(group.name, group, group.kernel) for group in groups]
    return merged, RunInfo(
        command=command,
        level=", ".join(dict.fromkeys(one.run.level if one.run is not None else UNKNOWN for one in recorded)),
        environment=_merge_environments(recorded),
        tolerances=_merge_tolerances(recorded),
        coverage=_compute_coverage(groups),
        seconds=_sum_seconds(recorded),
        interrupted=any(one.run is not None and not one.is_complete for one in recorded)
        and (not extents or any(extent.stopped for extent in extents.values())),
        notes=_build_notes(recorded, extents),
        detection=detection,
        declared={
            name: list(kernel.asks_less) for name, _, kernel in kernels if kernel is not None and kernel.asks_less
        },
        open_questions={
            name: kernel.open_questions for name, _, kernel in kernels if kernel is not None and kernel.open_questions
        },
        unasked={name: kernel.unasked for name, _, kernel in kernels if kernel is not None and kernel.unasked},
        few_blocks={
            name: words
            for name, group, kernel in kernels
            if kernel is not None
            and extents[name].is_whole
            and group.runs[0].run is not None
            and kernel.arrays
            and (words := describe_block_counts(kernel.block_lengths, group.records))
        },
        extents=extents,
        probes=records.merge_records(*(group.probes for group in groups)),
        proposals={group.name: group.proposal for group in groups if group.proposal is not None},
        unsandboxed={name: True for name, _, kernel in kernels if kernel is not None and kernel.is_unsandboxed},
        check_meanings={check.name: check.about for check in CHECKS},
        files={group.name: sorted(group.sources) for group in groups if group.label},
        runs={group.name: marks for group in groups if (marks := _list_marks(group, groups))},
    )


def _list_marks(group: _ProvenanceGroup, groups: Iterable[_ProvenanceGroup]) -> list[str]:
    """List the marks that distinguish the group's runs from runs of the same kernel in other groups.

    The list is empty unless another group has runs of this kernel in the same file.
    """
    others = (other for other in groups if other is not group and other.judged == group.judged)
    if not any(group.sources & other.sources for other in others):
        return []
    return list(dict.fromkeys(one.run.identity_mark if one.run is not None else "" for one in group.runs))


def _group_by_provenance(recorded: Sequence[RecordedRun]) -> list[_ProvenanceGroup]:
    """Group records by implementation, platform and provenance."""
    groups: dict[tuple[str, str], list[tuple[dict[str, str] | None, list[Record]]]] = {}
    for one in recorded:
        by_implementation: dict[tuple[str, str], list[Record]] = {}
        for record in one.records:
            by_implementation.setdefault((record.implementation, record.platform), []).append(record)
        for key, its_records in by_implementation.items():
            provenance = _find_provenance(one, key[0])
            existing = next((group for group in groups.setdefault(key, []) if group[0] == provenance), None)
            if existing is None:
                groups[key].append((provenance, its_records))
            else:
                existing[1].extend(its_records)
    result = []
    for (implementation, platform), by_provenance in sorted(groups.items()):
        runs_by_provenance = [
            [one for one in recorded if _has_provenance(one, implementation, provenance)]
            for provenance, _ in by_provenance
        ]
        sources = [
            ", ".join(dict.fromkeys(one.source or "this run" for one in its_runs)) for its_runs in runs_by_provenance
        ]
        labels = _build_labels([provenance for provenance, _ in by_provenance], sources)
        # Runs without records are included, since they may have planned jobs and finished none.
        for label, (_, its_records), its_runs in zip(labels, by_provenance, runs_by_provenance, strict=True):
            labelled = _label_records(its_records, label)
            judged = labelled[0].key[:2]
            probes = (x for one in its_runs for x in one.probes if (x.implementation, x.platform) == judged)
            proposals = (x for one in its_runs for x in one.proposals if (x.implementation, x.platform) == judged)
            result.append(
                _ProvenanceGroup(
                    implementation,
                    platform,
                    label,
                    tuple(its_runs),
                    labelled,
                    _label_records(probes, label),
                    _merge_proposals(list(proposals)),
                )
            )
    return result


def _merge_proposals(proposals: Sequence[Proposal]) -> Proposal | None:
    """Merge the proposals of several runs, such as shards; None if there is none."""
    if len(proposals) < 2:
        return proposals[0] if proposals else None
    every = itertools.chain.from_iterable
    return msgspec.structs.replace(
        proposals[0],
        declarations=tuple(dict.fromkeys(every(one.declarations for one in proposals))),
        wrappers=tuple(dict.fromkeys(every(one.wrappers for one in proposals))),
        loosens={name: text for one in proposals for name, text in one.loosens.items()},
        trials=tuple(every(one.trials for one in proposals)),
    )


def _label_records(found: Iterable[Record], label: str) -> tuple[Record, ...]:
    """Return the records with the label of their group, if it has one."""
    return tuple(msgspec.structs.replace(record, run=label) for record in found) if label else tuple(found)


def _find_provenance(one: RecordedRun, implementation: str) -> dict[str, str] | None:
    """Return the provenance of an implementation in a run, or None if it is unknown."""
    return one.run.provenance(implementation) if one.run is not None else None


def _has_provenance(one: RecordedRun, implementation: str, provenance: dict[str, str] | None) -> bool:
    """Tell whether a run judged, or planned to judge, an implementation under this provenance."""
    if one.run is None:
        return provenance is None and any(record.implementation == implementation for record in one.records)
    return implementation in one.run.kernels and one.run.provenance(implementation) == provenance


def _build_labels(provenances: Sequence[dict[str, str] | None], sources: Sequence[str]) -> list[str]:
    """Build a label for each provenance: a few words about the facts that differ. A single one gets an empty label."""
    if len(provenances) == 1:
        return [""]
    known_provenances = [provenance for provenance in provenances if provenance is not None]
    differing = list(
        dict.fromkeys(
            name for one, other in itertools.pairwise(known_provenances) for name in list_differences(one, other)
        )
    )
    named = [
        name
        for name in differing
        if name == "place" or all(len(one.get(name, "")) <= _MAX_VALUE_LENGTH for one in known_provenances)
    ]
    labels = []
    for provenance, source in zip(provenances, sources, strict=True):
        if provenance is None:
            labels.append("of unknown origin")
        else:
            words = [_format_fact(name, provenance.get(name, "")) for name in named if name not in _UNLABELLED][
                :_MAX_LABEL_FACTS
            ]
            labels.append(", ".join(words) or source)
    distinct = len(set(labels)) == len(labels)
    return labels if distinct else [f"{label}, run {place}" for place, label in enumerate(labels, 1)]


def _format_fact(name: str, value: str) -> str:
    """Format one fact of a provenance for a label.

    The sentence about the place where a kernel ran is cut to its first part.
    """
    if name == "place":
        return re.split(r" \(|[:,]", value.removeprefix("ran "))[0] if value else "confined"
    return f"{name} {value or 'none'}"


def _compute_extent(group: _ProvenanceGroup) -> Extent:
    """Compute how much of an implementation was judged, by the plan that covers most, with all its shards.

    An unfinished run of a whole level comes before all others, so that a report never hides it.
    """
    if any(one.run is None for one in group.runs):
        return Extent(known=False)
    by_plan: dict[tuple[str, str, tuple[int, ...]], list[RecordedRun]] = {}
    for one in group.runs:
        assert one.run is not None
        by_plan.setdefault((one.run.level, one.run.narrowed, one.run.seeds), []).append(one)
    extents = [_compute_plan_extent(group, key[0], key[1], its_runs) for key, its_runs in by_plan.items()]
    unfinished = [extent for extent in extents if not extent.narrowed and extent.is_partial]
    if unfinished:
        return unfinished[0]
    if whole := [extent for extent in extents if extent.is_whole]:
        return whole[-1]
    if len(extents) == 1:
        return extents[0]
    return Extent(
        level="smoke" if any(extent.level == "smoke" for extent in extents) else extents[0].level,
        narrowed="; ".join(dict.fromkeys(extent.narrowed for extent in extents if extent.narrowed)),
        stopped=any(extent.stopped for extent in extents),
    )


def _compute_plan_extent(group: _ProvenanceGroup, level: str, narrowed: str, its_runs: Sequence[RecordedRun]) -> Extent:
    """Compute the extent of runs with the same plan: shards of one run, or the same run twice."""
    implementation = group.implementation
    if level == EXPLORATION_LEVEL:  # the cases of an exploration are drawn, not planned
        cases = {record.case for record in group.records if record.verdict in JUDGED}
        narrowed = f"{len(cases):,} {narrowed}"
    planned = {job.key for one in its_runs if one.run for job in one.run.jobs if job.implementation == implementation}
    # A job without records judged nothing, even if the file has the line that closes the job.
    done = {
        one.run.jobs[n].key for one in its_runs if one.run for n, its_records in one.done.items() if its_records
    } & planned
    whole = next(
        (one.run.whole[implementation] for one in its_runs if one.run and implementation in one.run.whole), None
    )
    return Extent(
        level=level,
        narrowed=narrowed,
        planned=len(planned) if planned else None,
        done=len(done),
        whole=whole,
        stopped=(not planned or len(done) < len(planned)) and not all(one.is_complete for one in its_runs),
    )


def _compute_coverage(groups: Iterable[_ProvenanceGroup]) -> list[dict[str, Any]]:
    """Compute how much of the covering arrays the judged cases cover; one table row for each group."""
    rows = []
    for group in groups:
        kernel = group.kernel
        if kernel is None or not kernel.arrays:
            continue
        judged = {record.case for record in group.records if record.verdict in JUDGED}
        cases, covered = set[str](), [set[Any]() for _ in kernel.arrays]
        planned = set[str]()
        for one in group.runs:
            assert one.run is not None
            its_jobs = [job for job in one.run.jobs if job.implementation == group.implementation and job.rows]
            planned |= {job.case for job in its_jobs}
            for job in its_jobs:
                if job.case not in judged:
                    continue
                cases.add(job.case)
                for place, array in enumerate(kernel.arrays):
                    covered[place].update(itertools.combinations(enumerate(job.rows[place]), array.strength))
        rows.append(
            {
                "implementation": group.name,
                "level": ", ".join(dict.fromkeys(one.run.level for one in group.runs if one.run)),
                "strength": kernel.arrays[0].strength,
                "cases planned": len(planned),
                "cases judged": len(cases),
                "declined": kernel.declined,
                "combinations": sum(array.combinations for array in kernel.arrays),
                "covered": sum(map(len, covered)),
                **_count_declined_pairs(kernel),
            }
        )
    return [row for row in rows if row["cases judged"]]


def _count_declined_pairs(kernel: Kernel) -> dict[str, int]:
    """Count the pairs of an operand and a mask that the kernel supports singly but not together, and all pairs.

    The result is empty unless the kernel declines more than half of the pairs.
    """
    declined, pairs = kernel.parted
    return {"pairs declined": declined, "pairs": pairs} if 2 * declined > pairs else {}


def _merge_environments(recorded: Sequence[RecordedRun]) -> dict[str, str]:
    """Return each fact of the environments once. If files differ in a fact, list its values with their files."""
    sources = [one.source or "this run" for one in recorded]
    facts = [_list_facts(one.run) if one.run is not None else None for one in recorded]
    names = dict.fromkeys(itertools.chain.from_iterable(fact for fact in facts if fact is not None))
    merged = {} if names else {"environment": UNKNOWN}
    for name in names:
        values = [UNKNOWN if fact is None else fact.get(name, "") for fact in facts]
        merged[name] = values[0] if len(set(values)) == 1 else _format_by_file(values, sources)
    return merged if sources == ["this run"] else merged | {"rendered from": ", ".join(dict.fromkeys(sources))}


def _list_facts(run: Run) -> dict[str, str]:
    """Return the facts of one run's environment, with the kernels' packages and sources, times and seeds."""
    facts = dict(run.environment)
    for name, kernel in run.kernels.items():
        if origin := ", ".join(filter(None, (kernel.package, kernel.source and f"source {kernel.source}"))):
            facts[name] = origin
    facts["started"] = run.started
    if run.resumed:
        facts["resumed"] = ", ".join(run.resumed)
    if run.seeds:
        facts["seeds"] = ", ".join(map(str, run.seeds))
    return facts


def _format_by_file(values: Sequence[str], sources: Sequence[str]) -> str:
    """Format each distinct value with the names of the files that have it."""
    by_value: dict[str, list[str]] = {}
    for value, source in zip(values, sources, strict=True):
        by_value.setdefault(value or "none", []).append(source)
    return "; ".join(f"{value} ({', '.join(dict.fromkeys(names))})" for value, names in by_value.items())


def _merge_tolerances(recorded: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the rows of limits in force. If files differ in their limits, each row names its file."""
    tables = [(one.source, one.run.tolerances) for one in recorded if one.run is not None]
    if len({records.serialize_strict_json({"": list(rows)}) for _, rows in tables}) <= 1:
        return [dict(row) for row in tables[0][1]] if tables else []
    return [{"file": source, **row} for source, rows in tables for row in rows]


def _sum_seconds(recorded: Iterable[RecordedRun]) -> float:
    """Sum the durations of runs, in seconds. For a run without an end, the times of its records are summed."""
    spent = (
        one.end.seconds if one.end is not None else math.fsum(record.seconds for record in one.records)
        for one in recorded
    )
    return round(math.fsum(spent), 1)


def _build_notes(recorded: Sequence[RecordedRun], extents: Mapping[str, Extent]) -> list[str]:
    """Build the notes of a report: what is missing, stopped or not judged, and where it ran."""
    notes = [one.note for one in recorded if one.note]
    for one in recorded:
        where = f"{one.source}: " if one.source else ""
        if one.run is None:
            lacking = "coverage, completeness, limits, declarations and environment are unknown"
            notes.append(f"{where}no run record (older versions wrote none): {lacking}")
        elif one.end is None:
            notes.append(f"{where}the run was killed or still goes on: {len(one.done):,} of its jobs are done")
        elif one.end.how != COMPLETE:
            notes.append(f"{where}{one.end.how}{f', {one.end.reason}' if one.end.reason else ''}")
    kernels = [each for one in recorded if one.run for each in one.run.kernels.items()]
    notes += dict.fromkeys(f"{name} {kernel.place}" for name, kernel in kernels if kernel.place)
    notes += find_missing_shards(recorded)
    if hosts := sorted({record.host for one in recorded for record in one.records} - {""}):
        notes.append(f"judged on {', '.join(hosts)}")
    judged = {record.implementation for one in recorded for record in one.records}
    planned = dict.fromkeys(job.implementation for one in recorded if one.run for job in one.run.jobs)
    notes += [f"{name}: none of its jobs was judged" for name in planned if name not in judged]
    partial = {name: extent for name, extent in extents.items() if extent.is_partial and not extent.stopped}
    notes += [f"{name}: {e.done:,} of {e.planned:,} jobs were judged" for name, e in partial.items()]
    return notes


def find_missing_shards(recorded: Iterable[RecordedRun]) -> list[str]:
    """Return a line for each missing shard of a run that was split into shards."""
    present: dict[tuple[int, str], set[int]] = {}
    for one in recorded:
        if one.run is not None and one.run.shard:
            shard, _, shards = one.run.shard.partition("/")
            what = f"{sorted(one.run.kernels)} {one.run.level} {one.run.narrowed} {one.run.seeds}"
            backend = one.run.environment.get("backend", "")
            present.setdefault((int(shards), f"{what} {backend}"), set()).add(int(shard))
    return list(
        dict.fromkeys(
            f"shard {shard} of {shards} is missing"
            for (shards, _), present_shards in sorted(present.items())
            for shard in range(1, shards + 1)
            if shard not in present_shards
        )
    )
