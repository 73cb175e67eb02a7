"""A suspicion becomes a statement: the same case fails with a level, and passes without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from conformance.records import Record
from reports.causes.case_levels import Level, find_levels, find_oddities, parse_fields, rank_plainness


@dataclasses.dataclass(frozen=True)
class NearestPassing:
    """The plainest case that fails with some levels, and what was seen beside it.

    Attributes:
      smallest: its record.
      without: for each level, a case that passes and is otherwise the same, empty where there is none.
      passes: a case that passes, though it has all levels and is plain otherwise; empty if there is none.
    """

    smallest: Record
    without: tuple[str, ...] = ()
    passes: str = ""


def find_nearest_passing(
    levels: Sequence[Level], failing: Sequence[Record], passing: Iterable[Record]
) -> NearestPassing:
    """The plainest of the failing cases, one that passes without each of the levels if there is any."""
    ranked = sorted(failing, key=lambda record: (rank_plainness(record.case), record.key))
    right = [record.case for record in passing]
    partly: NearestPassing | None = None
    for record in ranked if levels else ():
        if parse_fields(record.case) is None:
            continue
        beside = tuple(_find_same_without(record.case, level, right) for level in levels)
        if all(beside):
            return NearestPassing(record, beside)
        if any(beside) and partly is None:
            partly = NearestPassing(record, beside)
    passes = _find_plain_passing(levels, right)
    return partly if partly is not None and not passes else NearestPassing(ranked[0], passes=passes)


def _find_same_without(case: str, level: Level, right: Iterable[str]) -> str:
    """A case that passes, lacks the level, and differs in nothing but what decides it."""
    wanted = _drop_fields(parse_fields(case) or {}, level.fields)
    return next(
        (
            x
            for x in right
            if level not in find_levels(x) and _drop_fields(parse_fields(x) or {}, level.fields) == wanted
        ),
        "",
    )


def _drop_fields(fields: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if name not in names}


def _find_plain_passing(levels: Sequence[Level], right: Iterable[str]) -> str:
    """A case that passes, and has all the levels and nothing else out of the ordinary."""
    wanted, deciding = set(levels), {name for level in levels for name in level.fields}
    found = [x for x in right if wanted <= find_levels(x) and find_oddities(x) <= deciding]
    return min(found, key=rank_plainness, default="") if levels else ""
