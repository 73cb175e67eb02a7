"""What runs say together: their records, and what a report tells of coverage, completeness, limits and environment.

Everything here is made of what is recorded, so that a run and a report of its file say the same. Runs of different
provenance stay apart: their records never answer for each other. What no run record says is unknown.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conformance import records, runs
from conformance.judging.block_coverage import describe_block_counts
from conformance.records import JUDGED, Extent, Record, RunInfo
from conformance.runs import Kernel, RecordedRun, Run

UNKNOWN = "unknown"
EXPLORATION_LEVEL = "explore"
"""The level of an exploration."""
_MAX_LABEL_FACTS = 2  # differences that tell two runs of a kernel apart in a label
_MAX_VALUE_LENGTH = 24
_UNLABELLED = frozenset({"declared", "tolerances"})  # whose values are tables


@dataclasses.dataclass(frozen=True)
class _ProvenanceGroup:
    """What the runs of one provenance say of an implementation on a platform; `run` is none where that is unknown."""

    implementation: str
    platform: str
    label: str
    runs: tuple[RecordedRun, ...]
    records: tuple[Record, ...]
    probes: tuple[Record, ...] = ()

    @property
    def name(self) -> str:
        """As reports name the contender."""
        return f"{self.implementation} ({', '.join(filter(None, (self.platform, self.label)))})"

    @property
    def contender(self) -> tuple[str, str]:
        """What other provenances may have judged too."""
        return self.implementation, self.platform

    @property
    def sources(self) -> set[str]:
        """The files that its runs are in."""
        return {one.source for one in self.runs if one.source}

    @property
    def kernel(self) -> Kernel | None:
        run = self.runs[0].run
        return run.kernels.get(self.implementation) if run is not None else None


def aggregate_runs(
    recorded: Sequence[RecordedRun], *, command: str, detection: dict[str, Any] | None = None
) -> tuple[list[Record], RunInfo]:
    """The records of runs, and what a report says beside them."""
    parts = _group_by_provenance(recorded)
    found = records.merge_records(*(part.records for part in parts))
    extents = {part.name: _compute_extent(part) for part in parts}
    known = [(part.name, part, part.kernel) for part in parts]
    return found, RunInfo(
        command=command,
        level=", ".join(dict.fromkeys(one.run.level if one.run is not None else UNKNOWN for one in recorded)),
        environment=_merge_environments(recorded),
        tolerances=_merge_tolerances(recorded),
        coverage=_compute_coverage(parts),
        seconds=_sum_seconds(recorded),
        interrupted=any(one.run is not None and not one.is_complete for one in recorded)
        and (not extents or any(extent.stopped for extent in extents.values())),
        notes=_build_notes(recorded, extents),
        detection=detection,
        declared={name: list(kernel.asks_less) for name, _, kernel in known if kernel is not None and kernel.asks_less},
        few_blocks={
            name: words
            for name, part, kernel in known
            if kernel is not None
            and extents[name].is_whole
            and part.runs[0].run is not None
            and kernel.arrays
            and (words := describe_block_counts(kernel.block_lengths, part.records))
        },
        extents=extents,
        probes=records.merge_records(*(part.probes for part in parts)),
        unsandboxed={name: True for name, _, kernel in known if kernel is not None and kernel.is_unsandboxed},
        files={part.name: sorted(part.sources) for part in parts if part.label},
        runs={part.name: marks for part in parts if (marks := _list_marks(part, parts))},
    )


def _list_marks(part: _ProvenanceGroup, parts: Iterable[_ProvenanceGroup]) -> list[str]:
    """What its runs are told by from other runs of the same kernel in the same file; nothing if there are none."""
    others = (other for other in parts if other is not part and other.contender == part.contender)
    if not any(part.sources & other.sources for other in others):
        return []
    return list(dict.fromkeys(one.run.identity_mark if one.run is not None else "" for one in part.runs))


def _group_by_provenance(recorded: Sequence[RecordedRun]) -> list[_ProvenanceGroup]:
    """Contenders, and apart from each other the runs of different provenance that judged them."""
    groups: dict[tuple[str, str], list[tuple[dict[str, str] | None, list[Record]]]] = {}
    for one in recorded:
        by_contender: dict[tuple[str, str], list[Record]] = {}
        for record in one.records:
            by_contender.setdefault((record.implementation, record.platform), []).append(record)
        for key, theirs in by_contender.items():
            provenance = _find_provenance(one, key[0])
            same = next((group for group in groups.setdefault(key, []) if group[0] == provenance), None)
            if same is None:
                groups[key].append((provenance, theirs))
            else:
                same[1].extend(theirs)
    parts = []
    for (implementation, platform), found in sorted(groups.items()):
        of = [[one for one in recorded if _has_provenance(one, implementation, provenance)] for provenance, _ in found]
        sources = [", ".join(dict.fromkeys(one.source or "this run" for one in ones)) for ones in of]
        labels = _build_labels([provenance for provenance, _ in found], sources)
        # `of` has those without a record too: that they planned jobs and left none of them done must not be overlooked.
        for label, (_, theirs), ones in zip(labels, found, of, strict=True):
            marked = _label_records(theirs, label)
            beside = (x for one in ones for x in one.probes if (x.implementation, x.platform) == marked[0].key[:2])
            parts.append(
                _ProvenanceGroup(implementation, platform, label, tuple(ones), marked, _label_records(beside, label))
            )
    return parts


def _label_records(found: Iterable[Record], label: str) -> tuple[Record, ...]:
    return tuple(dataclasses.replace(record, run=label) for record in found) if label else tuple(found)


def _find_provenance(one: RecordedRun, implementation: str) -> dict[str, str] | None:
    return one.run.provenance(implementation) if one.run is not None else None


def _has_provenance(one: RecordedRun, implementation: str, provenance: dict[str, str] | None) -> bool:
    """Whether a run is one of those of this provenance that say something of an implementation."""
    if one.run is None:
        return provenance is None and any(record.implementation == implementation for record in one.records)
    return implementation in one.run.kernels and one.run.provenance(implementation) == provenance


def _build_labels(found: Sequence[dict[str, str] | None], sources: Sequence[str]) -> list[str]:
    """What tells provenances apart, in words; nothing where there is but one."""
    if len(found) == 1:
        return [""]
    known = [provenance for provenance in found if provenance is not None]
    differing = list(
        dict.fromkeys(name for one, other in itertools.pairwise(known) for name in runs.list_differences(one, other))
    )
    told = [
        name
        for name in differing
        if name == "place" or all(len(one.get(name, "")) <= _MAX_VALUE_LENGTH for one in known)
    ]
    labels = []
    for provenance, source in zip(found, sources, strict=True):
        if provenance is None:
            labels.append("of unknown origin")
        else:
            words = [_format_fact(name, provenance.get(name, "")) for name in told if name not in _UNLABELLED][
                :_MAX_LABEL_FACTS
            ]
            labels.append(", ".join(words) or source)
    distinct = len(set(labels)) == len(labels)
    return labels if distinct else [f"{label}, run {place}" for place, label in enumerate(labels, 1)]


def _format_fact(name: str, value: str) -> str:
    """One fact of a provenance in a label; of where a kernel ran, the part that says where."""
    if name == "place":
        return re.split(r" \(|[:,]", value.removeprefix("ran "))[0] if value else "confined"
    return f"{name} {value or 'none'}"


def _compute_extent(part: _ProvenanceGroup) -> Extent:
    """How much of an implementation was asked: of the run that asks most, and of all its shards."""
    if any(one.run is None for one in part.runs):
        return Extent(known=False)
    groups: dict[tuple[str, str, tuple[int, ...]], list[RecordedRun]] = {}
    for one in part.runs:
        assert one.run is not None
        groups.setdefault((one.run.level, one.run.narrowed, one.run.seeds), []).append(one)
    extents = [_compute_plan_extent(part, key[0], key[1], ones) for key, ones in groups.items()]
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


def _compute_plan_extent(part: _ProvenanceGroup, level: str, narrowed: str, ones: Sequence[RecordedRun]) -> Extent:
    """The extent of runs that were planned alike: shards of one, or the same run twice."""
    implementation = part.implementation
    if level == EXPLORATION_LEVEL:  # whose cases are not planned, but drawn
        cases = {record.case for record in part.records if record.verdict in JUDGED}
        narrowed = f"{len(cases):,} {narrowed}"
    planned = {job.key for one in ones if one.run for job in one.run.jobs if job.implementation == implementation}
    # One without a single record answered nothing, whatever its closing line says.
    done = {one.run.jobs[n].key for one in ones if one.run for n, theirs in one.done.items() if theirs} & planned
    whole = next((one.run.whole[implementation] for one in ones if one.run and implementation in one.run.whole), None)
    return Extent(
        level=level,
        narrowed=narrowed,
        planned=len(planned) if planned else None,
        done=len(done),
        whole=whole,
        stopped=(not planned or len(done) < len(planned)) and not all(one.is_complete for one in ones),
    )


def _compute_coverage(parts: Iterable[_ProvenanceGroup]) -> list[dict[str, Any]]:
    """What the cases that were judged cover of the covering arrays."""
    rows = []
    for part in parts:
        kernel = part.kernel
        if kernel is None or not kernel.arrays:
            continue
        judged = {record.case for record in part.records if record.verdict in JUDGED}
        cases, covered = set[str](), [set[Any]() for _ in kernel.arrays]
        planned = set[str]()
        for one in part.runs:
            assert one.run is not None
            theirs = [job for job in one.run.jobs if job.implementation == part.implementation and job.rows]
            planned |= {job.case for job in theirs}
            for job in theirs:
                if job.case not in judged:
                    continue
                cases.add(job.case)
                for place, array in enumerate(kernel.arrays):
                    covered[place].update(itertools.combinations(enumerate(job.rows[place]), array.strength))
        rows.append(
            {
                "implementation": part.name,
                "level": ", ".join(dict.fromkeys(one.run.level for one in part.runs if one.run)),
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
    """How many pairs it declines of what it supports, and how many there are, where most are declined."""
    declined, pairs = kernel.parted
    return {"pairs declined": declined, "pairs": pairs} if 2 * declined > pairs else {}


def _merge_environments(recorded: Sequence[RecordedRun]) -> dict[str, str]:
    """Each fact once, or by file where they differ."""
    sources = [one.source or "this run" for one in recorded]
    facts = [_list_facts(one.run) if one.run is not None else None for one in recorded]
    names = dict.fromkeys(itertools.chain.from_iterable(fact for fact in facts if fact is not None))
    found = {} if names else {"environment": UNKNOWN}
    for name in names:
        values = [UNKNOWN if fact is None else fact.get(name, "") for fact in facts]
        found[name] = values[0] if len(set(values)) == 1 else _format_by_file(values, sources)
    return found if sources == ["this run"] else found | {"rendered from": ", ".join(dict.fromkeys(sources))}


def _list_facts(run: Run) -> dict[str, str]:
    found = dict(run.environment)
    for name, kernel in run.kernels.items():
        if origin := ", ".join(filter(None, (kernel.package, kernel.source and f"source {kernel.source}"))):
            found[name] = origin
    found["started"] = run.started
    if run.resumed:
        found["taken up again"] = ", ".join(run.resumed)
    if run.seeds:
        found["seeds"] = ", ".join(map(str, run.seeds))
    return found


def _format_by_file(values: Sequence[str], sources: Sequence[str]) -> str:
    by_value: dict[str, list[str]] = {}
    for value, source in zip(values, sources, strict=True):
        by_value.setdefault(value or "none", []).append(source)
    return "; ".join(f"{value} ({', '.join(dict.fromkeys(names))})" for value, names in by_value.items())


def _merge_tolerances(recorded: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """The limits in force, each with the files that have it where they differ."""
    tables = [(one.source, one.run.tolerances) for one in recorded if one.run is not None]
    if len({records.serialize_strict_json({"": list(rows)}) for _, rows in tables}) <= 1:
        return [dict(row) for row in tables[0][1]] if tables else []
    return [{"file": source, **row} for source, rows in tables for row in rows]


def _sum_seconds(recorded: Iterable[RecordedRun]) -> float:
    """How long the runs took; of one that was killed, and of older ones, what their records took."""
    spent = (
        one.end.seconds if one.end is not None else math.fsum(record.seconds for record in one.records)
        for one in recorded
    )
    return round(math.fsum(spent), 1)


def _build_notes(recorded: Sequence[RecordedRun], extents: Mapping[str, Extent]) -> list[str]:
    found = [one.note for one in recorded if one.note]
    for one in recorded:
        where = f"{one.source}: " if one.source else ""
        if one.run is None:
            lacking = "coverage, completeness, limits, declarations and environment are unknown"
            found.append(f"{where}no run record, as before there were any: {lacking}")
        elif one.end is None:
            found.append(f"{where}the run was killed, or goes on: {len(one.done):,} of its jobs are done")
        elif one.end.how != runs.COMPLETE:
            found.append(f"{where}{one.end.how}{f', {one.end.reason}' if one.end.reason else ''}")
    kernels = [each for one in recorded if one.run for each in one.run.kernels.items()]
    found += dict.fromkeys(f"{name} {kernel.place}" for name, kernel in kernels if kernel.place)
    found += _find_missing_shards(recorded)
    met = {record.implementation for one in recorded for record in one.records}
    planned = dict.fromkeys(job.implementation for one in recorded if one.run for job in one.run.jobs)
    found += [f"{name}: none of its jobs was judged" for name in planned if name not in met]
    partly = {name: extent for name, extent in extents.items() if extent.is_partial and not extent.stopped}
    found += [f"{name}: {e.done:,} of {e.planned:,} jobs were judged" for name, e in partly.items()]
    return found


def _find_missing_shards(recorded: Iterable[RecordedRun]) -> list[str]:
    """Which shards of the same number are not there."""
    present: dict[int, set[int]] = {}
    for one in recorded:
        if one.run is not None and one.run.shard:
            shard, _, shards = one.run.shard.partition("/")
            present.setdefault(int(shards), set()).add(int(shard))
    return [
        f"shard {shard} of {shards} is missing"
        for shards, there in sorted(present.items())
        for shard in range(1, shards + 1)
        if shard not in there
    ]
