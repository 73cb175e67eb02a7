"""Order past runs in time: join the shards of a run, and list the changes from one run to the next.

The `history` command reads files of records and shows how verdicts changed from run to run.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from conformance import runs
from conformance.runs import Kernel, RecordedRun, Run

_MAX_VALUE_LENGTH = 24  # if a value is longer, only its words that changed are shown
_MAX_DIFFERENCE_LENGTH = 120
_LIMITS = "tolerances"
_OURS = "source of attention-conformance"  # not listed if the commit changed too, which says the same

Change = tuple[str, str, str]
"""The name of a changed fact, and its old and new values. Both values are empty if they are too long to show."""


@dataclasses.dataclass(frozen=True)
class RunPiece:
    """A run in a file, or one shard of a run, without its records: the records of many runs take too much memory.

    Attributes:
      path: the file.
      place: the position among the runs of the file, from 0.
      run: the run record; None for older files.
      content: a hash of the records and the end of the run.
    """

    path: Path
    place: int
    run: Run | None
    content: int

    @property
    def identity(self) -> tuple[Run | None, int]:
        """The run record and the hash of the content, which are equal for two copies of one run."""
        return self.run, self.content


@dataclasses.dataclass(frozen=True)
class PastRun:
    """A past run with all of its shards that were found.

    `started` is None for older files, which do not say when a run began.
    """

    pieces: tuple[RunPiece, ...]
    started: datetime.datetime | None

    @property
    def run(self) -> Run | None:
        """The run record of the first shard, which holds for all its records; None for older files."""
        return self.pieces[0].run

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the files that contain the run."""
        return tuple(dict.fromkeys(piece.path.name for piece in self.pieces))

    @property
    def planned(self) -> frozenset[str]:
        """The names of the implementations that were to be judged."""
        return frozenset(job.implementation for one in self.pieces if one.run for job in one.run.jobs)


def list_pieces(path: Path, recorded: Sequence[RecordedRun]) -> list[RunPiece]:
    """List the runs of a file as pieces, without their records."""
    return [RunPiece(path, n, one.run, hash((one.end, *one.records))) for n, one in enumerate(recorded)]


def order_runs(pieces_of_runs: Iterable[Sequence[RunPiece]]) -> list[PastRun]:
    """Return runs from the oldest to the newest. Runs without a known time come first.

    Each item of `pieces_of_runs` is one run or one shard. Shards are joined to one run if they were cut from the same
    plan under the same provenance. A second copy of a shard begins another run.

    Raises:
      ValueError: for a run whose start is no valid time.
    """
    past_runs = [PastRun(tuple(group), _find_start(group)) for group in pieces_of_runs if group]
    undated = [past for past in past_runs if past.started is None]
    dated = sorted((past for past in past_runs if past.started is not None), key=_get_start)
    ordered: list[PastRun] = []
    for past in dated:
        position = next((n for n in reversed(range(len(ordered))) if _is_shard_of(past, ordered[n])), None)
        if position is None or _list_shards(ordered[position]) & _list_shards(past):
            ordered.append(past)
        else:
            ordered[position] = dataclasses.replace(ordered[position], pieces=(*ordered[position].pieces, *past.pieces))
    return [*undated, *ordered]


def find_changes(earlier: PastRun, later: PastRun, implementation: str) -> list[Change]:
    """List the changes between two runs of an implementation: plan, source, versions, declarations, flags, limits."""
    old_run, new_run = earlier.run, later.run
    if old_run is None or new_run is None:
        return []
    changes = [
        (name, *_shorten_values(_format_value(getattr(old_run, name)), _format_value(getattr(new_run, name))))
        for name in ("level", "seeds", "narrowed")
        if getattr(old_run, name) != getattr(new_run, name)
    ]
    old, new = old_run.provenance(implementation), new_run.provenance(implementation)
    names = runs.list_differences(old, new)
    for name in names:
        if name == "declared":
            changes += _find_declaration_changes(
                old_run.kernels.get(implementation), new_run.kernels.get(implementation)
            )
        elif name == _LIMITS:
            changes.append(("limits", "", ""))
        elif name != _OURS or "commit" not in names:
            changes.append((name, *_shorten_values(old.get(name, ""), new.get(name, ""))))
    return changes


def _find_start(group: Iterable[RunPiece]) -> datetime.datetime | None:
    """Return the time at which the first of some pieces began; None if no piece records a time."""
    times = [_parse_start(one) for one in group if one.run is not None]
    return min(times, default=None)


def _parse_start(one: RunPiece) -> datetime.datetime:
    """Parse the time at which a run began, in UTC if it names no zone."""
    assert one.run is not None
    try:
        time = datetime.datetime.fromisoformat(one.run.started)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{one.path} does not say when its run began: {one.run.started!r} is not a time") from error
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


def _get_start(past: PastRun) -> datetime.datetime:
    """Return the time at which a run began, which must be known."""
    assert past.started is not None
    return past.started


def _is_shard_of(past: PastRun, other: PastRun) -> bool:
    """Tell whether two runs are shards of one larger run.

    Such runs have the same number of shards, jobs, level, seeds and selection of cases. For every kernel, sources,
    versions, declarations and tolerances are equal too (`Run.provenance`).
    """
    one, two = past.run, other.run
    if one is None or two is None or not one.shard or not two.shard:
        return False
    if one.shard.partition("/")[2] != two.shard.partition("/")[2] or one.jobs != two.jobs:
        return False
    if (one.level, one.narrowed, one.seeds) != (two.level, two.narrowed, two.seeds):
        return False
    return all(one.provenance(name) == two.provenance(name) for name in (*one.kernels, *two.kernels))


def _list_shards(past: PastRun) -> set[str]:
    """List the shards that were found of a run; the second of three shards is `2/3`."""
    return {one.run.shard for one in past.pieces if one.run is not None}


def _find_declaration_changes(one: Kernel | None, other: Kernel | None) -> list[Change]:
    """List the declarations that differ between two run records of an implementation."""
    old, new = (kernel.declared if kernel is not None else {} for kernel in (one, other))
    names = dict.fromkeys((*old, *new))
    return [
        (f"declared {name}", *_shorten_values(_format_value(old.get(name)), _format_value(new.get(name))))
        for name in names
        if old.get(name) != new.get(name)
    ]


def _format_value(value: object) -> str:
    """Format a value of a run for people."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else json.dumps(value)


def _shorten_values(old: str, new: str) -> tuple[str, str]:
    """Shorten two values: long ones to the words that differ, and to empty strings if even these are too long."""
    if max(len(old), len(new)) <= _MAX_VALUE_LENGTH:
        return old or "none", new or "none"
    old_words, new_words = old.split(), new.split()
    old_only = " ".join(word for word in old_words if word not in new_words) or "none"
    new_only = " ".join(word for word in new_words if word not in old_words) or "none"
    return (
        (old_only, new_only)
        if len(old_only) + len(new_only) <= _MAX_DIFFERENCE_LENGTH and old_only != new_only
        else ("", "")
    )
