"""Runs of the past in their order: which files are one run, and what was not the same from one run to the next."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from conformance import runs
from conformance.records import make_printable
from conformance.runs import Kernel, RecordedRun, Run

_MAX_VALUE_LENGTH = 24  # a value that is longer is told by the words that differ
_MAX_DIFFERENCE_LENGTH = 120
_LIMITS = "tolerances"
_OURS = "source of attention-conformance"  # which the commit says too

Change = tuple[str, str, str]
"""What changed, from what and to what; the values are empty where they are too much to be told."""


@dataclasses.dataclass(frozen=True)
class RunPiece:
    """A run in a file, or a shard of one: its place among the runs of the file, and what tells it from others.

    It has no records: those of many runs take more memory than there need be.
    """

    path: Path
    place: int
    run: Run | None
    content: int

    @property
    def identity(self) -> tuple[Run | None, int]:
        """What two copies of a run share."""
        return self.run, self.content


@dataclasses.dataclass(frozen=True)
class PastRun:
    """A run of the past, all of its shards that are there; `started` is none in older files, which do not say."""

    pieces: tuple[RunPiece, ...]
    started: datetime.datetime | None

    @property
    def run(self) -> Run | None:
        """What holds for its records; none in older files."""
        return self.pieces[0].run

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of its files."""
        return tuple(dict.fromkeys(piece.path.name for piece in self.pieces))

    @property
    def planned(self) -> frozenset[str]:
        """The implementations that were to be judged."""
        return frozenset(job.implementation for one in self.pieces if one.run for job in one.run.jobs)


def list_pieces(path: Path, recorded: Sequence[RecordedRun]) -> list[RunPiece]:
    """The runs of a file."""
    return [RunPiece(path, n, one.run, hash((one.end, *one.records))) for n, one in enumerate(recorded)]


def order_runs(given: Iterable[Sequence[RunPiece]]) -> list[PastRun]:
    """Runs from the oldest to the newest, those that do not say when they began first.

    What is given together is one run. Shards that are given one by one are one run if they were cut from the same jobs
    by the same versions; a shard that is there already begins another run.

    Raises:
      ValueError: for a run whose time is none.
    """
    together = [PastRun(tuple(group), _find_start(group)) for group in given if group]
    unknown = [past for past in together if past.started is None]
    known = sorted((past for past in together if past.started is not None), key=_get_start)
    found: list[PastRun] = []
    for past in known:
        place = next((n for n in reversed(range(len(found))) if _is_shard_of(past, found[n])), None)
        if place is None or _list_shards(found[place]) & _list_shards(past):
            found.append(past)
        else:
            found[place] = dataclasses.replace(found[place], pieces=(*found[place].pieces, *past.pieces))
    return [*unknown, *found]


def find_changes(earlier: PastRun, later: PastRun, implementation: str) -> list[Change]:
    """What two runs of an implementation do not share: what was asked, its source, versions, flags, limits."""
    one, other = earlier.run, later.run
    if one is None or other is None:
        return []
    found = [
        (name, *_shorten_values(_format_value(getattr(one, name)), _format_value(getattr(other, name))))
        for name in ("level", "seeds", "narrowed")
        if getattr(one, name) != getattr(other, name)
    ]
    there, here = one.provenance(implementation), other.provenance(implementation)
    names = runs.list_differences(there, here)
    for name in names:
        if name == "declared":
            found += _find_declaration_changes(one.kernels.get(implementation), other.kernels.get(implementation))
        elif name == _LIMITS:
            found.append(("limits", "", ""))
        elif name != _OURS or "commit" not in names:
            found.append((name, *_shorten_values(there.get(name, ""), here.get(name, ""))))
    return [(make_printable(name), make_printable(old), make_printable(new)) for name, old, new in found]


def _find_start(group: Iterable[RunPiece]) -> datetime.datetime | None:
    times = [_parse_start(one) for one in group if one.run is not None]
    return min(times, default=None)


def _parse_start(one: RunPiece) -> datetime.datetime:
    assert one.run is not None
    try:
        time = datetime.datetime.fromisoformat(one.run.started)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{one.path} does not say when its run began: {one.run.started!r} is no time") from error
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


def _get_start(past: PastRun) -> datetime.datetime:
    assert past.started is not None
    return past.started


def _is_shard_of(past: PastRun, other: PastRun) -> bool:
    """Whether both are parts of what was planned alike, under the same versions."""
    one, two = past.run, other.run
    if one is None or two is None or not one.shard or not two.shard:
        return False
    if one.shard.partition("/")[2] != two.shard.partition("/")[2] or one.jobs != two.jobs:
        return False
    if (one.level, one.narrowed, one.seeds) != (two.level, two.narrowed, two.seeds):
        return False
    return all(one.provenance(name) == two.provenance(name) for name in (*one.kernels, *two.kernels))


def _list_shards(past: PastRun) -> set[str]:
    return {one.run.shard for one in past.pieces if one.run is not None}


def _find_declaration_changes(one: Kernel | None, other: Kernel | None) -> list[Change]:
    """Which declarations differ."""
    there, here = (kernel.declared if kernel is not None else {} for kernel in (one, other))
    names = dict.fromkeys((*there, *here))
    return [
        (f"declared {name}", *_shorten_values(_format_value(there.get(name)), _format_value(here.get(name))))
        for name in names
        if there.get(name) != here.get(name)
    ]


def _format_value(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else json.dumps(value)


def _shorten_values(old: str, new: str) -> tuple[str, str]:
    """Both values, of long ones the words in which they differ, of very long ones nothing."""
    if max(len(old), len(new)) <= _MAX_VALUE_LENGTH:
        return old or "none", new or "none"
    there, here = old.split(), new.split()
    one = " ".join(word for word in there if word not in here) or "none"
    other = " ".join(word for word in here if word not in there) or "none"
    return (one, other) if len(one) + len(other) <= _MAX_DIFFERENCE_LENGTH and one != other else ("", "")
